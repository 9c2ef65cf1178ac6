// A main for fuzz targets where there is no libFuzzer: runs a target on every file of a folder, then on a
// fixed number of mutations of them, the same every time. An input that ends the process is written to a
// file.
//
// usage: X_fuzz SEED_FOLDER MUTATIONS
//        X_fuzz FILE                     this one input
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "tests/fuzz.h"

extern "C" void __sanitizer_set_death_callback(void (*callback)()) __attribute__((weak));

namespace {

// What a signal handler must know: the input that runs, and where to write it.
struct Running {
  const char* data = nullptr;
  size_t size = 0;
  char path[4096] = "";
};
Running running;

// Only what a signal handler may call.
void WriteInput() {
  const int file = open(running.path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
  if (file < 0 || write(file, running.data, running.size) < 0) return;
  close(file);
  constexpr char kMessage[] = "\nthe input that ended the process: ";
  for (const std::string_view text : {std::string_view(kMessage), std::string_view(running.path), {"\n"}}) {
    if (write(STDERR_FILENO, text.data(), text.size()) < 0) return;
  }
}

void OnSignal(int signal) {
  WriteInput();
  ::signal(signal, SIG_DFL);
  raise(signal);
}

void CatchEnds(const std::string& target) {
  const char* outputs = std::getenv("TEST_UNDECLARED_OUTPUTS_DIR");  // which Bazel keeps
  std::snprintf(running.path, sizeof running.path, "%s/crash-%s", outputs ? outputs : ".", target.c_str());
  std::vector<int> signals = {SIGABRT, SIGTERM};
  if (__sanitizer_set_death_callback) {
    __sanitizer_set_death_callback(WriteInput);  // it catches the others itself, and says more of them
  } else {
    signals.insert(signals.end(), {SIGSEGV, SIGBUS, SIGFPE, SIGILL});
  }
  static char stack[1 << 16];  // an overflown stack is one of the ends
  const stack_t alternative{stack, 0, sizeof stack};
  sigaltstack(&alternative, nullptr);
  struct sigaction action = {};
  action.sa_handler = OnSignal;
  action.sa_flags = SA_ONSTACK;
  for (int signal : signals) sigaction(signal, &action, nullptr);
}

std::string Read(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void Run(const std::string& input) {
  // A copy of exactly its size, so that AddressSanitizer sees a read beyond its end.
  const std::vector<uint8_t> copy(input.begin(), input.end());
  running.data = input.data();
  running.size = input.size();
  LLVMFuzzerTestOneInput(copy.data(), copy.size());
}

class Mutator {
 public:
  explicit Mutator(std::vector<std::string> seeds) : seeds_(std::move(seeds)) {}

  std::string Next() {
    std::string input = seeds_[Below(seeds_.size())];
    for (size_t n = 1 + Below(4); n > 0; --n) Mutate(input);
    return input;
  }

 private:
  static constexpr size_t kLongest = 1 << 16;

  size_t Below(size_t n) { return n == 0 ? 0 : random_() % n; }

  // A number that is apt to be mishandled, as bytes or as digits.
  std::string Number() {
    constexpr uint64_t kApt[] = {0,
                                 1,
                                 0x7F,
                                 0xFF,
                                 0x7FFF,
                                 0xFFFF,
                                 0x7FFFFFFF,
                                 0xFFFFFFFF,
                                 0x80000000,
                                 uint64_t{1} << 62,
                                 ~uint64_t{} >> 1,
                                 ~uint64_t{},
                                 uint64_t{1} << 63,
                                 1000000};
    const uint64_t value = kApt[Below(std::size(kApt))];
    const size_t kind = Below(6);
    if (kind == 4) return std::to_string(value);
    if (kind == 5) return std::to_string(static_cast<int64_t>(value));
    return {reinterpret_cast<const char*>(&value), size_t{1} << kind};
  }

  void Mutate(std::string& input) {
    const size_t at = Below(input.size() + 1), left = input.size() - at;
    const size_t some = 1 + Below(std::min<size_t>(left, Below(4) == 0 ? kLongest : 16));
    const std::string& other = seeds_[Below(seeds_.size())];
    switch (Below(8)) {
      case 0:
        if (left > 0) input[at] = static_cast<char>(input[at] ^ 1 << Below(8));
        break;
      case 1:
        if (left > 0) input[at] = static_cast<char>(random_());
        break;
      case 2:
        input.erase(at, some);
        break;
      case 3: {
        const std::string number = Number();
        input.replace(at, Below(2) * number.size(), number);
        break;
      }
      case 4:  // again, once or many times: depth
        for (size_t n = size_t{1} << Below(8); n > 0 && input.size() < kLongest; --n) {
          input.insert(at, input.substr(at, some));
        }
        break;
      case 5:
        input.insert(at, other.substr(Below(other.size() + 1), 1 + Below(64)));
        break;
      case 6:
        input.replace(at, left, other.substr(Below(other.size() + 1)));
        break;
      case 7:
        input.resize(at);
        break;
    }
  }

  std::vector<std::string> seeds_;
  std::mt19937_64 random_;  // its default seed: the same everywhere
};

}  // namespace

int main(int argc, char** argv) {
  namespace fs = std::filesystem;
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s SEED_FOLDER MUTATIONS | FILE\n", argv[0]);
    return 2;
  }
  CatchEnds(fs::path(argv[0]).filename().string());
  const fs::path path(argv[1]);
  if (!fs::is_directory(path)) {
    Run(Read(path));
    return 0;
  }
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(path)) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  std::vector<std::string> seeds;
  for (const fs::path& file : files) seeds.push_back(Read(file));
  if (seeds.empty()) {
    std::fprintf(stderr, "%s: no seeds\n", argv[1]);
    return 1;
  }
  for (const std::string& seed : seeds) Run(seed);
  const long mutations = argc > 2 ? std::atol(argv[2]) : 0;
  Mutator mutator(seeds);
  for (long i = 0; i < mutations; ++i) Run(mutator.Next());
  std::printf("%zu seeds, %ld mutations\n", seeds.size(), mutations);
  return 0;
}
