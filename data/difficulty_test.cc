#include "data/difficulty.h"

#include <xxhash.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <random>

#include "data/test_data.h"
#include "runtime/base/error.h"
#include "runtime/base/faulty_file_system.h"
#include "runtime/base/memory_file_system.h"
#include "runtime/base/testing.h"

namespace strata {
namespace {

FileSystem& Disk() { return PosixFileSystem(); }

// Random rows, some with padding, whose targets are the next inputs and sometimes ignored.
class RandomRows : public Dataset {
 public:
  RandomRows(int64_t num_samples, int64_t length, int32_t vocab, bool padding)
      : length_(length), padding_(padding) {
    std::mt19937 random(7);
    for (int64_t i = 0; i < num_samples * length; ++i) {
      const int32_t one = static_cast<int32_t>(random() % static_cast<uint32_t>(vocab));
      inputs.push_back(static_cast<int32_t>(random() % static_cast<uint32_t>(one + 1)));  // uneven counts
      ignored.push_back(random() % 5 == 0);
    }
    for (int64_t i = 0; i < num_samples; ++i)
      real.push_back(padding ? static_cast<int64_t>(random() % static_cast<uint32_t>(length)) : length);
  }

  int64_t num_samples() const override { return std::ssize(real); }
  int64_t seq_len() const override { return length_; }
  DatasetFeatures features() const override { return {.documents = false, .padding = padding_}; }
  uint64_t fingerprint() const override { return identity; }
  void Get(int64_t sample, int64_t begin, SampleRow row) const override {
    for (size_t i = 0; i < row.inputs.size(); ++i) {
      const int64_t column = begin + static_cast<int64_t>(i);
      const auto at = static_cast<size_t>(sample * length_ + column);
      row.inputs[i] = inputs[at];
      row.targets[i] = ignored[at] ? kIgnoredTarget : inputs[at];
      if (padding_) row.key_mask[i] = column < real[static_cast<size_t>(sample)];
    }
  }

  uint64_t identity = 1;
  std::vector<int32_t> inputs;
  std::vector<bool> ignored;
  std::vector<int64_t> real;  // inputs of each sample that are not padding

 private:
  int64_t length_;
  bool padding_;
};

// One token a sample, for tests of what becomes of values.
class Numbers : public RandomRows {
 public:
  explicit Numbers(int64_t num_samples) : RandomRows(num_samples, 1, 2, false) {}
};

// A metric of the user's own: any function of the sample's number. Keeps what it was asked for.
class ByNumber : public DifficultyMetric {
 public:
  explicit ByNumber(std::function<double(int64_t)> function) : function_(std::move(function)) {}
  std::string name() const override { return "by_number"; }
  double resolution() const override { return 0.5; }
  uint64_t fingerprint() const override { return identity; }
  void Measure(const Batch& batch, std::span<double> difficulty) override {
    for (size_t row = 0; row < difficulty.size(); ++row) {
      measured.push_back(batch.sample_ids[row]);
      difficulty[row] = function_(batch.sample_ids[row]);
    }
  }

  uint64_t identity = 0;
  std::vector<int64_t> measured;

 private:
  std::function<double(int64_t)> function_;
};

double Hashed(int64_t sample) { return static_cast<double>(sample * 7919 % 53) / 2; }

void MeasureOn(int64_t workers, const std::string& folder, const Dataset& dataset, DifficultyMetric& metric,
               int64_t batch_size = 3) {
  for (int64_t rank = 0; rank < workers; ++rank)
    MeasureDifficulty(Disk(), folder, dataset, metric, batch_size, {rank, workers, {}});
}

std::unique_ptr<DifficultyFile> Analyse(const std::string& folder, const Dataset& dataset,
                                        DifficultyMetric& metric, int64_t workers = 1) {
  MeasureOn(workers, folder, dataset, metric);
  IndexDifficulty(Disk(), folder, dataset, metric);
  return DifficultyFile::Open(Disk(), DifficultyPath(folder, metric.name()), dataset);
}

std::string Message(const std::function<void()>& body) {
  try {
    body();
  } catch (const DataError& e) {
    return e.what();
  }
  return "nothing was thrown";
}

TEST_CASE("metrics are what a plain script computes") {
  constexpr int32_t kVocab = 300;
  for (const bool padding : {false, true}) {
    const RandomRows rows(200, 37, kVocab, padding);
    // The oracle: counts, then a sum of logarithms for each sample.
    std::vector<int64_t> counts(kVocab + 1);
    int64_t total = 0;
    for (int64_t s = 0; s < 200; ++s) {
      for (int64_t i = 0; i < rows.real[static_cast<size_t>(s)]; ++i, ++total)
        ++counts[static_cast<size_t>(rows.inputs[static_cast<size_t>(s * 37 + i)])];
    }
    std::vector<int64_t> summed(kVocab + 1);
    for (int64_t rank : {0, 1, 2}) {
      const auto part = CountTokens(rows, kVocab + 1, {rank, 3, {}});
      for (size_t t = 0; t < part.size(); ++t) summed[t] += part[t];
    }
    CHECK(summed == counts);
    CHECK(counts[kVocab] == 0);

    const testing::TemporaryFolder folder;
    const auto length = NewSequenceLength(), mean = NewVocabRarity(counts), sum = NewTotalRarity(counts);
    const auto lengths = Analyse(folder.path(), rows, *length);
    const auto means = Analyse(folder.path(), rows, *mean);
    const auto sums = Analyse(folder.path(), rows, *sum);
    CHECK(means->path() == folder.path() + "/vocab_rarity.difficulty");
    CHECK(means->resolution() == 1e-3);
    for (int64_t s = 0; s < 200; ++s) {
      const int64_t real = rows.real[static_cast<size_t>(s)];
      double rarity = 0;
      int64_t targets = 0;
      for (int64_t i = 0; i < 37; ++i) {
        const auto at = static_cast<size_t>(s * 37 + i);
        targets += rows.ignored[at] ? 0 : 1;
        if (i < real)
          rarity -= std::log(static_cast<double>(counts[static_cast<size_t>(rows.inputs[at])]) /
                             static_cast<double>(total));
      }
      CHECK(lengths->Value(s) == targets);
      CHECK(sums->Value(s) == std::lround(rarity));
      CHECK(means->Value(s) == std::lround(1000 * rarity / static_cast<double>(std::max<int64_t>(real, 1))));
    }
  }
}

TEST_CASE(
    "a token that was never counted is taken for counted once; one outside the vocabulary is an error") {
  Batch batch;
  batch.batch_size = 1;
  batch.seq_len = 3;
  batch.inputs = {0, 1, 2};
  batch.sample_ids = {41};
  double value = 0;
  NewTotalRarity({7, 1, 0})->Measure(batch, {&value, 1});
  CHECK(value == Approx(std::log(8.0 / 7) + 2 * std::log(8.0)));
  for (int32_t id : {3, -1}) {
    batch.inputs[1] = id;
    CHECK_THAT(Message([&] {
                 NewVocabRarity({7, 1, 0})->Measure(batch, {&value, 1});
               }),
               Catch::Contains("sample 41 has token " + std::to_string(id)));
  }
}

TEST_CASE("any number of workers makes the same file") {
  const RandomRows rows(1000, 5, 40, false);  // blocks of 16, the last of 8
  const testing::TemporaryFolder folder;
  std::vector<std::string> files;
  for (int64_t workers : {1, 2, 3, 100}) {
    const std::string path = folder.path() + "/" + std::to_string(workers);
    const auto metric = NewTotalRarity(CountTokens(rows, 40, {}));
    Analyse(path, rows, *metric, workers);
    CHECK(Disk().List(path) == std::vector<std::string>{"total_rarity.difficulty"});
    files.push_back(ReadFile(Disk(), path + "/total_rarity.difficulty"));
    CHECK(files.back() == files.front());
  }
}

TEST_CASE("ten samples, batch 3, two workers: each once") {
  const Numbers ten(10);
  const testing::TemporaryFolder folder;
  ByNumber metric(Hashed);
  const auto file = Analyse(folder.path(), ten, metric, 2);
  std::sort(metric.measured.begin(), metric.measured.end());
  CHECK(metric.measured == std::vector<int64_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9});
  std::vector<int64_t> ordered;
  for (int64_t i = 0; i < 10; ++i) ordered.push_back(file->Ordered(i));
  std::sort(ordered.begin(), ordered.end());
  CHECK(ordered == metric.measured);
}

TEST_CASE("the index is the samples sorted by value, equal ones by number") {
  // More samples than indexing holds at a time, so that a value's samples come from several chunks.
  for (const int64_t n : {int64_t{1}, int64_t{7}, int64_t{1000}, int64_t{300'000}}) {
    const Numbers numbers(n);
    const testing::TemporaryFolder folder;
    ByNumber metric(Hashed);
    MeasureOn(1, folder.path(), numbers, metric, 4096);
    IndexDifficulty(Disk(), folder.path(), numbers, metric);
    const auto file = DifficultyFile::Open(Disk(), DifficultyPath(folder.path(), "by_number"), numbers);
    REQUIRE(file->num_samples() == n);
    CHECK(file->resolution() == 0.5);
    std::vector<int64_t> order(static_cast<size_t>(n));
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [](int64_t a, int64_t b) { return Hashed(a) < Hashed(b); });
    int64_t wrong = 0;
    for (int64_t i = 0; i < n; ++i) {
      wrong += file->Ordered(i) != order[static_cast<size_t>(i)];
      wrong += file->Value(i) != std::lround(2 * Hashed(i));
    }
    CHECK(wrong == 0);
    for (int64_t value : {-1, 0, 1, 25, 51, 52, 53, 1'000'000}) {
      CHECK(file->CountUpToValue(value) == std::count_if(order.begin(), order.end(), [&](int64_t sample) {
              return 2 * Hashed(sample) <= static_cast<double>(value);
            }));
    }
    CHECK(file->CountUpToValue(std::numeric_limits<int64_t>::max()) == n);
    CHECK(file->CountUpToPercentile(0) == 0);
    CHECK(file->CountUpToPercentile(1) == static_cast<int64_t>(std::ceil(static_cast<double>(n) / 100)));
    CHECK(file->CountUpToPercentile(50) == (n + 1) / 2);
    CHECK(file->CountUpToPercentile(100) == n);
  }
}

TEST_CASE("all values different, at both ends of the range") {
  const Numbers numbers(100);
  const testing::TemporaryFolder folder;
  constexpr double kLargest = std::numeric_limits<uint32_t>::max();
  ByNumber metric([](int64_t s) { return s == 3 ? kLargest / 2 : static_cast<double>(100 - s) / 2; });
  const auto file = Analyse(folder.path(), numbers, metric);
  CHECK(file->Ordered(0) == 99);
  CHECK(file->Ordered(99) == 3);
  CHECK(file->Value(3) == std::numeric_limits<uint32_t>::max());
  CHECK(file->CountUpToValue(std::numeric_limits<uint32_t>::max() - 1) == 99);
}

TEST_CASE("measuring goes on from the blocks that are there, and from those alone") {
  const Numbers numbers(640);  // blocks of ten
  const testing::TemporaryFolder folder;
  ByNumber whole(Hashed);
  Analyse(folder.path() + "/whole", numbers, whole);
  CHECK(std::ssize(whole.measured) == 640);
  const std::string expected = ReadFile(Disk(), folder.path() + "/whole/by_number.difficulty");

  const std::string broken = folder.path() + "/broken", blocks = broken + "/by_number.blocks/";
  ByNumber first(Hashed), second(Hashed);
  MeasureOn(1, broken, numbers, first);
  Disk().Remove(blocks + "0");
  Disk().Remove(blocks + "13");
  testing::PutFile(blocks + "13.tmp", "what a killed worker left");
  testing::PutFile(blocks + "20", ReadFile(Disk(), blocks + "20").substr(0, 47));
  std::string flipped = ReadFile(Disk(), blocks + "30");
  flipped[5] ^= 1;
  testing::PutFile(blocks + "30", flipped);
  Disk().Rename(blocks + "40", blocks + "41");  // a sound block of other samples
  MeasureOn(3, broken, numbers, second);
  std::vector<int64_t> again;
  for (int64_t block : {0, 13, 20, 30, 40, 41}) {
    for (int64_t i = 0; i < 10; ++i) again.push_back(block * 10 + i);
  }
  std::sort(second.measured.begin(), second.measured.end());
  CHECK(second.measured == again);
  IndexDifficulty(Disk(), broken, numbers, second);
  CHECK(ReadFile(Disk(), broken + "/by_number.difficulty") == expected);
  CHECK(Disk().List(broken) == std::vector<std::string>{"by_number.difficulty"});

  // Blocks of other data, or of the metric under another model, are not taken up.
  MeasureOn(1, broken, numbers, first);
  ByNumber other(Hashed);
  other.identity = 1;
  MeasureOn(2, broken, numbers, other);
  CHECK(std::ssize(other.measured) == 640);
  Numbers changed(640);
  changed.identity = 2;
  MeasureOn(2, broken, changed, other);
  CHECK(std::ssize(other.measured) == 1280);
  CHECK_THAT(Message([&] { IndexDifficulty(Disk(), broken, numbers, first); }),
             Catch::Contains("samples 0 to 9 are not measured"));
}

TEST_CASE("progress grows to all that the worker has") {
  const Numbers numbers(1000);
  const testing::TemporaryFolder folder;
  int64_t all = 0;
  for (int64_t rank : {0, 1}) {
    int64_t last = 0, total = 0;
    const auto see = [&](int64_t done, int64_t of) {
      CHECK(done >= last);
      last = done;
      total = of;
    };
    ByNumber metric(Hashed);
    MeasureDifficulty(Disk(), folder.path(), numbers, metric, 7, {rank, 2, see});
    CHECK(last == total);
    CHECK(std::ssize(metric.measured) == total);
    all += total;
  }
  CHECK(all == 1000);
}

TEST_CASE("what cannot be a difficulty is refused, with the sample") {
  const Numbers numbers(10);
  const testing::TemporaryFolder folder;
  for (double bad : {std::nan(""), -1.0, std::numeric_limits<double>::infinity(), std::ldexp(1.0, 31)}) {
    ByNumber metric([bad](int64_t sample) { return sample == 7 ? bad : 1; });
    CHECK_THAT(Message([&] { MeasureOn(1, folder.path(), numbers, metric); }),
               Catch::Contains("by_number of sample 7 is "));
  }
  class Misnamed : public ByNumber {
   public:
    using ByNumber::ByNumber;
    std::string name() const override { return "../loss"; }
  } misnamed(Hashed);
  CHECK_THROWS_AS(MeasureOn(1, folder.path(), numbers, misnamed), ConfigError);
}

TEST_CASE("files that are damaged or of other data are refused") {
  Numbers numbers(100);
  const testing::TemporaryFolder folder;
  ByNumber metric(Hashed);
  const std::string sound = ReadFile(Disk(), Analyse(folder.path(), numbers, metric)->path());
  const auto message = [&](const std::string& content) {
    MemoryFileSystem fs({{"f", content}});
    return Message([&] { DifficultyFile::Open(fs, "f", numbers); });
  };

  CHECK(message(sound) == "nothing was thrown");
  numbers.identity = 2;
  CHECK_THAT(message(sound), Catch::Contains("100 samples of fingerprint 1, not 100 of 2"));
  numbers.identity = 1;
  CHECK_THAT(Message([&] {
               DifficultyFile::Open(Disk(), DifficultyPath(folder.path(), "by_number"), Numbers(101));
             }),
             Catch::Contains("of other data"));
  CHECK_THAT(Message([&] { DifficultyFile::Open(Disk(), folder.path() + "/none", numbers); }),
             Catch::Contains("none is not there"));

  for (size_t size : {size_t{0}, size_t{127}, size_t{128}, sound.size() - 1})
    CHECK_THAT(message(sound.substr(0, size)), Catch::Contains("f: byte " + std::to_string(size)));
  for (size_t bit = 0; bit < 8 * sound.size(); bit += bit < 8 * 128 ? 1 : 61) {
    std::string flipped = sound;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ 1 << bit % 8);
    INFO("bit " << bit);
    CHECK_THAT(message(flipped), Catch::Contains("f: byte "));
  }

  // Checksums can be right where the content is not.
  const auto forged = [&](size_t at, uint64_t value, size_t bytes) {
    std::string file = sound;
    std::memcpy(file.data() + at, &value, bytes);
    DifficultyHeader header;
    std::memcpy(&header, file.data(), sizeof header);
    header.content_hash = XXH3_64bits(file.data() + 128, file.size() - 128);
    header.header_hash = XXH3_64bits(&header, offsetof(DifficultyHeader, header_hash));
    std::memcpy(file.data(), &header, sizeof header);
    return message(file);
  };
  CHECK_THAT(forged(128 + 400, 100, 4), Catch::Contains("byte 528: sample 100 of 100"));
  CHECK_THAT(forged(128 + 800 + 16, 0, 4), Catch::Contains("byte 944: value 0 ends at sample 4"));
  CHECK_THAT(forged(sound.size() - 8, 99, 8), Catch::Contains("ends at sample 99"));
  CHECK_THAT(forged(offsetof(DifficultyHeader, num_samples), 90, 8), Catch::Contains("contradicts itself"));
  CHECK_THAT(forged(offsetof(DifficultyHeader, version), 2, 4), Catch::Contains("version 2"));
}

TEST_CASE("a disk that fails, or a power cut, leaves the former file or the new one") {
  Numbers numbers(4);
  const testing::TemporaryFolder folder;
  ByNumber metric(Hashed);
  const auto analysed = [&](const std::string& name) {
    Analyse(folder.path() + name, numbers, metric);
    return ReadFile(Disk(), DifficultyPath(folder.path() + name, "by_number"));
  };
  const std::string expected = analysed("/reference");
  numbers.identity = 2;
  const std::string before = analysed("/former");
  numbers.identity = 1;
  const std::string path = DifficultyPath(folder.path() + "/tried", "by_number");

  for (const auto kind : {FaultPlan::Kind::kNoSpace, FaultPlan::Kind::kCrash}) {
    bool struck = true;
    for (int64_t nth = 1; struck; ++nth) {
      Disk().CreateDirectories(folder.path() + "/tried");
      testing::PutFile(path, before);
      {
        FaultyFileSystem fs(Disk(), {kind, nth});
        try {
          MeasureDifficulty(fs, folder.path() + "/tried", numbers, metric, 8, {});
          IndexDifficulty(fs, folder.path() + "/tried", numbers, metric);
        } catch (const IoError&) {  // NOLINT(bugprone-empty-catch): what is left is looked at below
        }
        struck = fs.struck();
      }
      const std::string after = ReadFile(Disk(), path);
      INFO("operation " << nth);
      CHECK((after == before || after == expected));
      if (!struck) CHECK(after == expected);
      // What is left does not mislead the next measurement.
      if (kind == FaultPlan::Kind::kCrash) CHECK(analysed("/tried") == expected);
      Disk().RemoveTree(folder.path() + "/tried");
    }
  }
}

}  // namespace
}  // namespace strata
