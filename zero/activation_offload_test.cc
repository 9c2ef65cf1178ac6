#include "zero/activation_offload.h"

#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <numeric>
#include <vector>

#include "runtime/autograd/ops.h"
#include "runtime/autograd/resident_parameters.h"
#include "runtime/base/faulty_file_system.h"
#include "runtime/base/testing.h"

namespace strata {
namespace {

using testing::TemporaryFolder;

// Files would wait for the disk.
const bool in_memory = access("/dev/shm", W_OK) == 0 && setenv("TMPDIR", "/dev/shm", 1) == 0;

constexpr Tier kTiers[] = {Tier::kHost, Tier::kNvme};

struct Fixture {
  TemporaryFolder folder;
  std::unique_ptr<Device> device = NewCpuDevice(1);

  OffloadOptions Options() const {
    OffloadOptions options;
    options.path = folder.path();
    options.block_bytes = 4096;
    return options;
  }
  // `bytes` bytes that count up from `first`.
  Tensor Make(int64_t bytes, int first) const {
    Tensor tensor = Tensor::Empty(device->allocator(), {bytes}, DType::kU8, MemoryTag::kActivations);
    auto* data = static_cast<uint8_t*>(tensor.view().data);
    std::iota(data, data + bytes, static_cast<uint8_t>(first));
    return tensor;
  }
  bool Same(const Tensor& a, const Tensor& b) const {
    const auto* data = static_cast<const uint8_t*>(a.view().data);
    return a.shape() == b.shape() && a.dtype() == b.dtype() &&
           std::equal(data, data + a.view().num_bytes(), static_cast<const uint8_t*>(b.view().data));
  }
  size_t OnDevice() const { return device->allocator().stats().total; }
};

TEST_CASE("what was put is taken back, whatever its size, in reverse order") {
  Fixture f;
  for (Tier tier : kTiers) {
    ActivationOffload offload(*f.device, PosixFileSystem(), tier, f.Options(), 0);
    INFO(Name(tier));
    // Sizes come at other places in the second pass, and the third is shorter.
    for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{5000, 1, 40'000, 4096, 4095, 12'289},
                                              {40'000, 9000, 10, 4097, 100'000, 1, 8192},
                                              {5000, 6000}}) {
      for (int64_t i = 0; i < std::ssize(sizes); ++i) {
        CHECK(offload.Put(f.Make(sizes[static_cast<size_t>(i)], static_cast<int>(i))) == i);
      }
      for (int64_t i = std::ssize(sizes); i-- > 0;) {
        CHECK(f.Same(offload.Take(i), f.Make(sizes[static_cast<size_t>(i)], static_cast<int>(i))));
      }
    }
    CHECK(f.OnDevice() == 0);
  }
}

TEST_CASE("the device holds two tensors on their way out, and the one below what is taken") {
  Fixture f;
  constexpr int64_t kBytes = 8192, kCount = 9;
  for (Tier tier : kTiers) {
    ActivationOffload offload(*f.device, PosixFileSystem(), tier, f.Options(), 0);
    const int64_t before = tier == Tier::kHost ? 0 : 1;
    INFO(Name(tier));
    uint64_t file = 0;
    for (int pass = 0; pass < 3; ++pass) {
      for (int64_t i = 0; i < kCount; ++i) {
        offload.Put(f.Make(kBytes, 3));
        CHECK(f.OnDevice() == static_cast<size_t>(std::min<int64_t>(i + 1, 2) * kBytes));
      }
      for (int64_t i = kCount; i-- > 0;) {
        const Tensor taken = offload.Take(i);
        CHECK(f.OnDevice() == static_cast<size_t>(std::min<int64_t>(i + 1, 2) * kBytes));
      }
      CHECK(f.OnDevice() == 0);
      if (pass == 0) file = offload.store().nvme_bytes();
      CHECK(offload.store().nvme_bytes() == file);
    }
    CHECK(file == static_cast<uint64_t>(before * kCount * kBytes));
    // The last two of a pass need not be read.
    CHECK(offload.store().written_bytes() == before * 3 * kCount * kBytes);
    CHECK(offload.store().read_bytes() == before * 3 * (kCount - 2) * kBytes);
  }
}

TEST_CASE("taking one forgets those above it, and a pass may end early") {
  Fixture f;
  for (Tier tier : kTiers) {
    ActivationOffload offload(*f.device, PosixFileSystem(), tier, f.Options(), 0);
    for (int i = 0; i < 6; ++i) offload.Put(f.Make(5000, i));
    CHECK(f.Same(offload.Take(3), f.Make(5000, 3)));
    CHECK(offload.Put(f.Make(6000, 40)) == 3);
    CHECK(offload.Put(f.Make(7000, 50)) == 4);
    CHECK(offload.Put(f.Make(8000, 60)) == 5);
    CHECK(f.Same(offload.Take(5), f.Make(8000, 60)));
    CHECK(f.Same(offload.Take(2), f.Make(5000, 2)));
    offload.Clear();
    CHECK(f.OnDevice() == 0);
    CHECK(offload.Put(f.Make(5000, 7)) == 0);
    CHECK(f.Same(offload.Take(0), f.Make(5000, 7)));
  }
}

// A chain of eight linear layers, each a unit that is run again; twice forward and backward.
void TrainChain(const Executor& executor, FileSystem& file_system, const OffloadOptions& options) {
  constexpr int64_t kRows = 64, kWidth = 32;  // 8 KiB
  std::vector<Parameter> weights(8);
  std::vector<Parameter*> all;
  for (Parameter& w : weights) {
    w.shape = w.global_shape = {kWidth, kWidth};
    all.push_back(&w);
  }
  ResidentParameters resident(executor, all, DType::kF32);
  std::vector<Unit> units;
  for (Parameter& w : weights) {
    std::fill_n(w.data.f32(), w.data.num_elements(), 0.01f);
    units.push_back({"unit", {&w}, {}});
  }
  ActivationOffload offload(executor.device(), file_system, Tier::kNvme, options, 0);
  for (int pass = 0; pass < 2; ++pass) {
    TapeOptions tape_options;
    tape_options.recompute = RecomputePolicy::kFull;
    tape_options.activation_store = &offload;
    Tape tape(executor, resident, tape_options);
    Tensor x = tape.Empty({kRows, kWidth});
    std::fill_n(x.view().f32(), kRows * kWidth, 1.0f);
    for (size_t i = 0; i < units.size(); ++i) {
      x = tape.RunUnit(units[i], std::move(x),
                       [&, i](const Tensor& in) { return Linear(tape, in, weights[i], nullptr); });
    }
    const Tensor roots[] = {x};
    tape.Backward(roots);
  }
}

TEST_CASE("a fault at any operation ends the pass with an error that names file, offset and bytes") {
  Fixture f;
  const Executor executor(*f.device, ReferenceKernels());
  using Kind = FaultPlan::Kind;
  for (Kind kind : {Kind::kNoSpace, Kind::kIoError, Kind::kShortWrite, Kind::kReadError}) {
    bool through = false;
    int faults = 0, transfers = 0;
    for (int64_t nth = 1; !through; ++nth) {
      REQUIRE(nth < 100);
      FaultyFileSystem fs(PosixFileSystem(), {kind, nth});
      INFO("kind " << static_cast<int>(kind) << ", operation " << nth);
      try {
        TrainChain(executor, fs, f.Options());
        through = true;
        CHECK_FALSE(fs.struck());
      } catch (const IoError& e) {
        const std::string what = e.what();
        INFO(what);
        ++faults;
        CHECK(fs.struck());
        CHECK(what.find(f.folder.path()) != std::string::npos);
        if (what.find("offset") != std::string::npos) {
          ++transfers;
          CHECK(what.find(", 8192 bytes") != std::string::npos);
        }
      }
      CHECK(f.OnDevice() == 0);  // nothing is left of what was under way
      for (const std::string& left : PosixFileSystem().List(f.folder.path()))
        PosixFileSystem().Remove(JoinPath(f.folder.path(), left));
    }
    // Eight writes and six reads a pass.
    CHECK(transfers == (kind == Kind::kReadError ? 12 : kind == Kind::kShortWrite ? faults : 16));
  }
}

}  // namespace
}  // namespace strata
