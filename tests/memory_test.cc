// Memory: what is there after ten steps is there after two thousand, and every setting that promises to save
// some does.
#include <stdlib.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <fstream>

#include "runtime/base/testing.h"
#include "tests/tiny_run.h"

namespace strata {
namespace {

using testing::RunTiny;
using testing::TemporaryFolder;
using testing::TinyLayout;

// Files would wait for the disk.
const bool in_memory = access("/dev/shm", W_OK) == 0 && setenv("TMPDIR", "/dev/shm", 1) == 0;

// Bytes of this process in memory.
int64_t ResidentBytes() {
  std::ifstream statm("/proc/self/statm");
  int64_t size = 0, resident = 0;
  statm >> size >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

TEST_CASE("nothing grows from the tenth step to the two-thousandth") {
  // Without huge pages: the kernel merges pages into them when it has time, and counts what nobody has
  // touched.
  REQUIRE(prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0);
  TemporaryFolder folder;
  struct Row {
    int stage;
    RecomputePolicy recompute;
    Tier activations;
  };
  for (const auto& [stage, recompute, activations] :
       {Row{0, RecomputePolicy::kNone, Tier::kDevice}, Row{3, RecomputePolicy::kFull, Tier::kDevice},
        Row{0, RecomputePolicy::kFull, Tier::kNvme}}) {
    TinyLayout layout;
    layout.ranks = 2;
    layout.zero.stage = stage;
    layout.zero.offload.path = folder.path();
    layout.recompute = recompute;
    layout.activations = activations;
    if (activations != Tier::kDevice) layout.num_layers = 4;  // two of them come back from there
    layout.steps = 2000;
    MemoryStats early, late;
    int64_t resident_early = 0, resident_late = 0;
    layout.on_step = [&](int step, const MemoryStats& stats) {
      if (step == 10) {
        early = stats;
        resident_early = ResidentBytes();
      }
      if (step == 2000) {
        late = stats;
        resident_late = ResidentBytes();
      }
    };
    RunTiny(layout);
    INFO("stage " << stage);
    REQUIRE(early.total > 0);
    CHECK(late.current == early.current);
    CHECK(late.peak == early.peak);
    CHECK(late.total_peak == early.total_peak);
    CHECK(late.reserved == early.reserved);
    CHECK(resident_late - resident_early < int64_t{1} << 20);
  }
  prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0);
}

// Peaks of a model large enough for its state and its activations to stand out.
MemoryStats PeakOf(const std::function<void(TinyLayout&)>& change) {
  TinyLayout layout;
  layout.ranks = 4;
  layout.hidden_size = 64;
  change(layout);
  MemoryStats last;
  layout.on_step = [&](int, const MemoryStats& stats) { last = stats; };
  RunTiny(layout);
  return last;
}

size_t TagPeak(const MemoryStats& stats, MemoryTag tag) { return stats.peak[static_cast<size_t>(tag)]; }

TEST_CASE("each ZeRO stage holds less than the one before, and of what it says") {
  std::vector<MemoryStats> stages;
  for (int stage = 0; stage <= 3; ++stage) {
    stages.push_back(PeakOf([&](TinyLayout& layout) {
      layout.zero.stage = stage;
      layout.micro_batches = 3;         // stages 0 and 1 sum them on the rank
      layout.zero.overlap = false;      // what is under way would be most of so small a model
      layout.precision = DType::kBF16;  // so that stage 0 has a master copy to partition
    }));
    INFO("stage " << stage << "\n" << stages.back().ToString());
    if (stage > 0) CHECK(stages.back().total_peak < stages[stages.size() - 2].total_peak);
  }
  // A quarter on four ranks, and what padding adds.
  CHECK(TagPeak(stages[1], MemoryTag::kOptimizer) < TagPeak(stages[0], MemoryTag::kOptimizer) * 0.27);
  CHECK(TagPeak(stages[2], MemoryTag::kGradients) < TagPeak(stages[1], MemoryTag::kGradients));
  CHECK(TagPeak(stages[3], MemoryTag::kParameters) < TagPeak(stages[2], MemoryTag::kParameters));
}

TEST_CASE("every key of the tiers and of what is under way makes the device hold less") {
  testing::TemporaryFolder folder;
  auto peak = [&](const std::function<void(TinyLayout&)>& change) {
    return PeakOf([&](TinyLayout& layout) {
             layout.ranks = 2;
             layout.zero.stage = 3;
             layout.precision = DType::kBF16;
             layout.num_layers = 6;
             layout.hidden_size = 64;
             layout.micro_batches = 6;
             layout.recompute = RecomputePolicy::kFull;
             layout.zero.offload.path = folder.path();
             layout.zero.offload.sub_group_bytes = 32768;
             layout.zero.bucket_bytes =
                 65536;  // less than a block's gradient, as in a model worth offloading
             change(layout);
           })
        .total_peak;
  };
  const size_t all = peak([](TinyLayout&) {});
  const std::pair<const char*, std::function<void(TinyLayout&, Tier)>> tiers[] = {
      {"optimizer", [](TinyLayout& l, Tier tier) { l.zero.offload.optimizer = tier; }},
      {"parameters", [](TinyLayout& l, Tier tier) { l.zero.offload.parameters = tier; }},
      {"gradients", [](TinyLayout& l, Tier tier) { l.zero.offload.gradients = tier; }},
  };
  for (const auto& [name, change] : tiers) {
    for (Tier tier : {Tier::kHost, Tier::kNvme}) {
      INFO("zero.offload." << name << ": " << Name(tier));
      CHECK(peak([&, &change = change](TinyLayout& l) { change(l, tier); }) < all);
    }
  }
  const size_t half = peak([](TinyLayout& l) {
    l.zero.offload.optimizer = Tier::kHost;
    l.zero.offload.ratio = 0.5;
  });
  CHECK(half < all);
  CHECK(peak([](TinyLayout& l) { l.zero.offload.optimizer = Tier::kHost; }) < half);
  CHECK(peak([](TinyLayout& l) { l.zero.prefetch_bytes = 1; }) < all);
  CHECK(peak([](TinyLayout& l) { l.zero.max_live_bytes = 1; }) < all);
  CHECK(peak([](TinyLayout& l) { l.zero.bucket_bytes = int64_t{1} << 30; }) > all);
}

TEST_CASE("recomputation, smaller micro-batches and bf16 hold fewer activations") {
  const auto activations = [](const std::function<void(TinyLayout&)>& change) {
    return TagPeak(PeakOf([&](TinyLayout& layout) {
                     layout.ranks = 1;
                     change(layout);
                   }),
                   MemoryTag::kActivations);
  };
  const size_t all = activations([](TinyLayout&) {});
  const size_t selective = activations([](TinyLayout& l) { l.recompute = RecomputePolicy::kSelective; });
  const size_t full = activations([](TinyLayout& l) { l.recompute = RecomputePolicy::kFull; });
  const size_t smaller = activations([](TinyLayout& l) { l.micro_batches = 4; });
  const size_t bf16 = activations([](TinyLayout& l) { l.precision = DType::kBF16; });
  INFO("all " << all << ", selective " << selective << ", full " << full << ", smaller " << smaller
              << ", bf16 " << bf16);
  CHECK(selective < all);
  CHECK(full < selective);
  CHECK(smaller < all / 3);
  CHECK(bf16 < all);
}

TEST_CASE("offloaded activations hold the device at a few blocks' inputs, and host and disk at the rest") {
  TemporaryFolder folder;
  constexpr size_t kBlocks = 12;
  const auto run = [&](Tier tier, size_t& host, int64_t& disk) {
    return PeakOf([&](TinyLayout& layout) {
      layout.ranks = 1;
      layout.num_layers = kBlocks;
      layout.micro_batches = 2;
      layout.steps = 20;
      layout.recompute = RecomputePolicy::kFull;
      layout.activations = tier;
      layout.zero.offload.path = folder.path();
      layout.on_end = [&](const testing::TinyRank& rank) {
        host = TagPeak(rank.device.host_allocator().stats(), MemoryTag::kActivations);
        disk = rank.activations ? static_cast<int64_t>(rank.activations->store().nvme_bytes()) : 0;
      };
    });
  };
  // 18 rows of 8 tokens, 64 wide, fp32.
  constexpr size_t kInput = size_t{18} * 8 * 64 * 4;
  size_t host = 0;
  int64_t disk = 0;
  const size_t kept = TagPeak(run(Tier::kDevice, host, disk), MemoryTag::kActivations);
  CHECK(host == 0);
  const size_t with_host = TagPeak(run(Tier::kHost, host, disk), MemoryTag::kActivations);
  CHECK(host == kBlocks * kInput);
  const size_t with_nvme = TagPeak(run(Tier::kNvme, host, disk), MemoryTag::kActivations);
  CHECK(host == 0);
  CHECK(disk == kBlocks * kInput);
  INFO("kept " << kept << ", on the host " << with_host << ", on nvme " << with_nvme);
  // Two that are being written stay; so may be the one in use, and the one that is on its way back.
  CHECK(with_host <= kept - (kBlocks - 4) * kInput);
  CHECK(with_nvme == with_host);
}

}  // namespace
}  // namespace strata
