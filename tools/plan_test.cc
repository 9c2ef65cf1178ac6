#include "tools/plan.h"

#include <stdlib.h>
#include <unistd.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <functional>
#include <nlohmann/json.hpp>

#include "runtime/base/testing.h"
#include "tools/disk_rate.h"
#include "tools/plan_run.h"

namespace strata::testing {
namespace {

// Files would wait for the disk.
const bool in_memory = access("/dev/shm", W_OK) == 0 && setenv("TMPDIR", "/dev/shm", 1) == 0;

size_t At(const std::array<size_t, kNumMemoryTags>& bytes, MemoryTag tag) {
  return bytes[static_cast<size_t>(tag)];
}

// Bytes of parameters, gradients and optimiser state a parameter of the model, at rest on the device.
double DeviceState(const Plan& plan) {
  return static_cast<double>(At(plan.memory.current, MemoryTag::kParameters) +
                             At(plan.memory.current, MemoryTag::kGradients) +
                             At(plan.memory.current, MemoryTag::kOptimizer)) /
         static_cast<double>(kParameters);
}

TEST_CASE("Model state a parameter is 18 bytes in bf16 with Adam, less what each stage partitions") {
  CHECK(PlanOf({0}).parameters == kParameters);
  struct Row {
    int stage, micro_batches;
    double whole, shared;  // bytes: whole + shared / ranks
  };
  for (const Row& row : {Row{0, 1, 18, 0},
                         {0, 3, 18, 0},
                         {1, 1, 2, 16},
                         {1, 2, 6, 12},
                         {2, 1, 2, 16},
                         {2, 3, 2, 16},
                         {3, 1, 0, 18},
                         {3, 3, 0, 18}}) {
    for (const int ranks : {1, 2}) {
      CAPTURE(row.stage, row.micro_batches, ranks);
      CHECK(DeviceState(PlanOf({row.stage, row.micro_batches, "", "bf16", ranks})) ==
            row.whole + row.shared / ranks);
    }
  }
  // fp32 needs no second copy.
  for (const Row& row : {Row{0, 1, 16, 0}, {1, 1, 4, 12}, {1, 2, 8, 8}, {2, 1, 4, 12}, {3, 1, 0, 16}}) {
    CAPTURE(row.stage, row.micro_batches);
    CHECK(DeviceState(PlanOf({row.stage, row.micro_batches, "", "fp32"})) == row.whole + row.shared / 2);
  }
}

TEST_CASE("Offloaded state leaves the device for the tier it names") {
  const Plan host = PlanOf({1, 1, "zero.offload.optimizer=host"});
  CHECK(DeviceState(host) == 2 + 4 / 2.0);
  CHECK(At(host.host.current, MemoryTag::kOptimizer) == 12 * kParameters / 2);
  CHECK(host.nvme_bytes == 0);
  CHECK(host.disk_read + host.disk_written == 0);

  const Plan everything =
      PlanOf({3, 1, "zero.offload.optimizer=host zero.offload.parameters=host zero.offload.gradients=host"});
  CHECK(DeviceState(everything) == 0);
  CHECK(At(everything.host.current, MemoryTag::kParameters) == 2 * kParameters / 2);
  CHECK(At(everything.host.current, MemoryTag::kGradients) == 4 * kParameters / 2);
  CHECK(everything.state_bytes() == 18 * kParameters / 2);

  // The first half of the state stays: it ends inside the first block, which is not divided.
  const Plan half = PlanOf({0, 1, "zero.offload.optimizer=host zero.offload.ratio=0.5"});
  CHECK(At(half.memory.current, MemoryTag::kOptimizer) == 12 * (kUnits[0] + kBlock));
  CHECK(At(half.host.current, MemoryTag::kOptimizer) == 12 * (kBlock + kUnits[3]));
}

// What `arrays` arrays of `width` bytes an element take in a file, each unit's shard of two in whole blocks.
int64_t InFile(int64_t arrays, int64_t width) {
  int64_t bytes = 0;
  for (const int64_t unit : kUnits) bytes += arrays * ((unit / 2 * width + 4095) / 4096 * 4096);
  return bytes;
}

TEST_CASE("State on nvme is read and written once an update, parameters read on each way") {
  const Plan optimizer = PlanOf({1, 2, "zero.offload.optimizer=nvme"});
  CHECK(optimizer.nvme_bytes == InFile(3, 4));
  CHECK(optimizer.disk_read == InFile(3, 4));
  CHECK(optimizer.disk_written == InFile(3, 4));
  CHECK(DeviceState(optimizer) == 2 + 4);

  for (const int micro_batches : {1, 2, 5}) {
    CAPTURE(micro_batches);
    const Plan parameters = PlanOf({3, micro_batches, "zero.offload.parameters=nvme"});
    CHECK(parameters.nvme_bytes == InFile(1, 2));
    CHECK(parameters.disk_read == micro_batches * 2 * InFile(1, 2));
    CHECK(parameters.disk_written == InFile(1, 2));
    // Each micro-batch's shard is added to the sum of those before it; the update reads the sum.
    const Plan gradients = PlanOf({2, micro_batches, "zero.offload.gradients=nvme"});
    CHECK(gradients.nvme_bytes == InFile(1, 4));
    CHECK(gradients.disk_read == micro_batches * InFile(1, 4));
    CHECK(gradients.disk_written == micro_batches * InFile(1, 4));
  }
}

TEST_CASE("Offloaded activations leave the device for the tier they name") {
  // Eight blocks' inputs of 2 x 16 tokens, 64 wide, in bf16: one disk block each.
  constexpr int64_t kInput = 4096;
  const std::string full = "model.num_layers=8 recompute.policy=full ";
  const auto device = [](const Plan& plan) {
    return static_cast<int64_t>(At(plan.memory.peak, MemoryTag::kActivations));
  };
  for (const int micro_batches : {1, 2, 5}) {
    CAPTURE(micro_batches);
    const Plan none = PlanOf({0, micro_batches, full});
    const Plan host = PlanOf({0, micro_batches, full + "recompute.offload=host"});
    const Plan nvme = PlanOf({0, micro_batches, full + "recompute.offload=nvme"});
    // Two are being written; all others were there when backward began.
    CHECK(device(none) - device(host) >= 5 * kInput);
    CHECK(device(nvme) == device(host));
    CHECK(At(host.host.peak, MemoryTag::kActivations) == 8 * kInput);
    CHECK(host.nvme_bytes == 0);
    CHECK(nvme.nvme_bytes == 8 * kInput);
    CHECK(nvme.state_bytes() == none.state_bytes());
    CHECK(nvme.disk_written == micro_batches * 8 * kInput);
    CHECK(nvme.disk_read == micro_batches * 6 * kInput);
  }
}

TEST_CASE("Traffic is that of the formulas, for any number of micro-batches") {
  const int64_t whole = kParameters / 2;  // elements times (N - 1) / N, on two ranks
  for (const int64_t k : {1, 2, 3, 4, 7}) {
    CAPTURE(k);
    const auto sent = [&](int stage, const char* operation, const std::string& more = "") {
      const Plan plan = PlanOf({stage, static_cast<int>(k), more});
      const auto found = plan.traffic.find(operation);
      return found == plan.traffic.end() ? int64_t{0} : found->second.bytes;
    };
    CHECK(sent(0, "dp.reduce_scatter") == 4 * whole);
    CHECK(sent(0, "dp.all_gather") == 4 * whole);
    CHECK(sent(1, "dp.reduce_scatter") == 4 * whole);
    CHECK(sent(1, "dp.all_gather") == 2 * whole);
    CHECK(sent(1, "dp.reduce_scatter", "zero.reduce=micro_batch") == 4 * k * whole);
    CHECK(sent(2, "dp.reduce_scatter") == 4 * k * whole);
    CHECK(sent(2, "dp.reduce_scatter", "zero.reduce_dtype=bf16") == 2 * k * whole);
    CHECK(sent(2, "dp.all_gather") == 2 * whole);
    CHECK(sent(3, "dp.reduce_scatter") == 4 * k * whole);
    for (const char* more : {"", "recompute.policy=full", "zero.overlap=false"}) {
      CHECK(sent(3, "dp.all_gather", more) == 2 * 2 * k * whole);
    }
    CHECK(sent(3, "dp.all_gather", "zero.persistence_threshold=1000000") == 2 * whole);
  }
  CHECK(PlanOf({3, 1, "", "bf16", 1}).traffic_bytes() == 0);
}

TEST_CASE("Ranks that share layers hold and compute their share, and sum activations four times a block") {
  for (const int tensor : {2, 4}) {
    CAPTURE(tensor);
    const Plan plan = PlanOf({0, 1, StrCat("parallel.tensor=", tensor), "fp32", tensor});
    // A token's sums: of the embedding and of the gradient that goes into the head, and of the blocks.
    const int64_t activations = 2 * kLen * kWidth * 4;
    REQUIRE(activations <= 16 << 10);
    // Three numbers a token besides, in the loss.
    const int64_t sums = (4 * kLayers + 2) * activations;
    const int64_t sent = plan.traffic.at("tp.all_reduce").bytes;
    CHECK(sent >= (tensor - 1) * sums);
    CHECK(sent <= (tensor - 1) * (sums + 2 * kLen * 16));
    const Plan whole = PlanOf({0, 1, "", "fp32", 1});
    CHECK(plan.flops == Approx(whole.flops / tensor).epsilon(1e-12));
    CHECK(plan.parameters == whole.parameters);
    CHECK(plan.checkpoint_bytes == whole.checkpoint_bytes);
    // Norms, positions and biases of second matrices are whole.
    const int64_t replicated = kLen * kWidth + kLayers * 6 * kWidth + 2 * kWidth;
    CHECK(plan.state_bytes() == 16 * (replicated + (kParameters - replicated) / tensor));
  }
}

TEST_CASE("The operations that a dry step counts are those of the model's formula") {
  const double tokens = 2 * kLen, width = kWidth;
  for (const int micro_batches : {1, 4}) {
    const Plan plan = PlanOf({0, micro_batches});
    CHECK(plan.flops == Approx(plan.flops_per_token * tokens * micro_batches).epsilon(1e-12));
  }
  // Once more forward through the blocks: 12 width² of weights and two products of the attention, a token
  // seeing (T + 1) / 2 others.
  const Plan once = PlanOf({0}), again = PlanOf({0, 1, "recompute.policy=full"});
  const double forward = kLayers * (2 * 12 * width * width + 2 * 2 * width * (kLen + 1) / 2.0);
  CHECK(again.flops - once.flops == Approx(forward * tokens).epsilon(1e-12));
}

TEST_CASE("The expected time of a step, by cause") {
  Plan plan;
  plan.flops = 3e12;
  plan.traffic = {{"dp.all_gather", {2'000'000, 4, 0}}, {"dp.reduce_scatter", {1'000'000, 4, 0}}};
  plan.disk_read = 600;
  plan.disk_written = 400;
  const StepTime time = ExpectedStep(plan, {1e12, 1e6, 500});
  CHECK(time.compute == 3);
  CHECK(time.traffic == 3);
  CHECK(time.disk == 2);
  CHECK(time.AtLeast() == 3);
  CHECK(time.AtMost() == 8);
  CHECK(ExpectedStep(plan, {1e12, 0, 0}).AtMost() == 3);
}

TEST_CASE("A trillion parameters on thousands of ranks are planned without memory") {
  RunConfig config = RunConfig::Parse(
      "model: {preset: gpt-1t}\nzero: {stage: 3}\nrecompute: {policy: full}\n"
      "train: {precision: bf16, micro_batch_size: 1, gradient_accumulation_steps: 64}",
      "plan_test", {});
  config.Resolve(4096, 0);
  const Plan plan = MakePlan(config, 4096);
  CHECK(plan.parameters == Approx(1.008e12).epsilon(0.001));
  CHECK(static_cast<double>(plan.state_bytes()) ==
        Approx(18.0 / 4096 * static_cast<double>(plan.parameters)).epsilon(0.001));
}

TEST_CASE("A run holds and sends what its plan says, to the byte") {
  const TemporaryFolder folder;
  const std::string all_host =
      "zero.offload.optimizer=host zero.offload.parameters=host zero.offload.gradients=host";
  const std::string all_nvme =
      "zero.offload.optimizer=nvme zero.offload.parameters=nvme zero.offload.gradients=nvme "
      "zero.offload.nvme.sub_group_bytes=64KiB";
  // Inputs of blocks are of a size that moves.
  const std::string full = "recompute.policy=full model.num_layers=5 train.micro_batch_size=8 ";
  const Layout layouts[] = {
      {0},
      {0, 2, all_host},
      {1, 1, "zero.offload.optimizer=host", "fp32"},
      {1, 2, all_nvme},
      {2, 3, "zero.overlap=false"},
      {2, 2, "zero.offload.optimizer=nvme zero.offload.ratio=0.5"},
      {3, 1, "zero.prefetch_bytes=64KiB zero.max_live_bytes=128KiB recompute.policy=full"},
      {3, 5, all_nvme},
      {3, 2, all_host, "fp32"},
      {3, 2, "zero.persistence_threshold=1000 zero.bucket_bytes=100KiB zero.reduce_dtype=bf16"},
      {0, 1, all_nvme, "bf16", 1},
      {0, 2, full + "recompute.offload=host"},
      {3, 2, full + "recompute.offload=nvme " + all_nvme},
      {0, 1, "parallel.tensor=2"},
      {3, 2, "parallel.tensor=2 parallel.sequence_parallel=true recompute.policy=full", "bf16", 4},
      // All-reduces of 20 KiB, and of 256 bytes.
      {1, 2, "parallel.tensor=4 train.micro_batch_size=20 recompute.policy=full", "fp32", 4},
      {1, 1, "parallel.tensor=4 data.seq_len=2 " + all_host, "fp32", 4},
  };
  for (Layout layout : layouts) {
    // Quick without SIMD.
    layout.more = "model.hidden_size=32 data.seq_len=8 train.micro_batch_size=1 " + layout.more;
    CAPTURE(layout.stage, layout.micro_batches, layout.more, layout.precision, layout.ranks);
    const Plan plan = PlanOf(layout);
    const Measured measured = Run(layout, folder.path());
    CHECK(plan.memory.peak == measured.memory.peak);
    CHECK(plan.memory.current == measured.memory.current);
    CHECK(plan.memory.total_peak == measured.memory.total_peak);
    CHECK(plan.host.peak == measured.host.peak);
    CHECK(plan.host.total_peak == measured.host.total_peak);
    CHECK(plan.nvme_bytes == measured.step.nvme_bytes);
    CHECK(plan.disk_read == measured.step.disk_read);
    CHECK(plan.disk_written == measured.step.disk_written);
    for (const auto& [name, total] : plan.traffic) {
      // The trainer counts tokens and adds losses besides.
      if (!name.starts_with("dp.") && !name.starts_with("tp.")) continue;
      CAPTURE(name);
      REQUIRE(measured.traffic.contains(name));
      CHECK(total.bytes == measured.traffic.at(name).bytes);
      CHECK(total.count == measured.traffic.at(name).count);
    }
  }
}

// Where tokens go is known only then: a plan spreads them evenly, a run does so on the average of its ranks.
TEST_CASE("Sixteen ranks with sixteen experts hold what their plan says, within 5 %") {
  const TemporaryFolder folder;
  const std::string whole = "parallel.tensor=1 parallel.expert=16 ",
                    cut = "parallel.tensor=4 parallel.expert=4 ";
  const Layout layouts[] = {
      {1, 1, whole + "recompute.policy=full"},
      {1, 1, whole + "recompute.policy=selective train.micro_batch_size=12 moe.dispatch=dropless"},
      {1, 1, cut + "recompute.policy=full"},
      {1, 1, cut + "recompute.policy=selective train.micro_batch_size=12 moe.dispatch=dropless"},
      {3, 1, cut + "recompute.policy=full recompute.stash_collectives=false moe.drop_duplicates=false"},
  };
  for (Layout layout : layouts) {
    layout.ranks = 16;
    layout.more += " model.hidden_size=32 moe.num_experts=16 moe.expert_tensor_parallel=true";
    CAPTURE(layout.stage, layout.more);
    const Plan plan = PlanOf(layout);
    const Measured measured = Run(layout, folder.path());
    CHECK(static_cast<double>(plan.memory.total_peak) == Approx(measured.mean_peak).epsilon(0.05));
    CHECK(plan.memory.current == measured.memory.current);
    CHECK(plan.traffic.at("ep.all_to_all").count == measured.traffic.at("ep.all_to_all").count);
  }
}

TEST_CASE("The largest model that fits is the last one that does") {
  const auto fitted = [](Fit fit, const std::string& more) {
    std::vector<std::string> overrides = {"device.memory_limit=8MiB"};
    std::istringstream words(more);
    for (std::string word; words >> word;) overrides.push_back(word);
    const RunConfig config = RunConfig::Parse(
        "model: {hidden_size: 128, num_heads: 8, num_kv_heads: 4, ffn_hidden_size: 192, num_layers: 4,\n"
        "  vocab_size: 96, max_seq_len: 16}\ntrain: {micro_batch_size: 2}",
        "plan_test", overrides);
    return LargestThatFits(config, 4, 0, fit);
  };
  const auto peak = [](RunConfig config, const std::function<void(TransformerConfig&)>& change) {
    change(config.model.sizes);
    return MakePlan(config, 4).memory.total_peak;
  };
  const auto same = [](TransformerConfig&) {};
  constexpr size_t kLimit = 8 << 20;
  for (const char* more : {"", "parallel.tensor=4 moe.num_experts=4", "zero.stage=3 recompute.policy=full"}) {
    CAPTURE(more);
    const RunConfig wide = fitted(Fit::kWidth, more);
    const TransformerConfig& c = wide.model.sizes;
    const int64_t tensor = wide.parallel.tensor;
    CHECK(c.num_layers == 4);
    CHECK(c.hidden_size == 16 * c.num_heads);
    CHECK(c.ffn_hidden_size == 24 * c.num_heads);
    CHECK(2 * c.num_kv_heads == c.num_heads);
    CHECK(c.num_heads % (2 * tensor) == 0);
    CHECK(peak(wide, same) <= kLimit);
    CHECK(peak(wide, [&](TransformerConfig& next) {
            next.num_heads += 2 * tensor;
            next.num_kv_heads += tensor;
            next.hidden_size += 32 * tensor;
            next.ffn_hidden_size += 48 * tensor;
          }) > kLimit);

    const RunConfig deep = fitted(Fit::kLayers, more);
    const int64_t interval = deep.model.sizes.moe.enabled() ? 2 : 1;
    CHECK(deep.model.sizes.hidden_size == 128);
    CHECK(deep.model.sizes.num_layers % interval == 0);
    CHECK(peak(deep, same) <= kLimit);
    CHECK(peak(deep, [&](TransformerConfig& next) { next.num_layers += interval; }) > kLimit);
  }
  CHECK_THROWS_WITH(fitted(Fit::kWidth, "device.memory_limit=1KiB"),
                    Catch::Contains("1.00 KiB hold no model of this shape"));
  CHECK_THROWS_WITH(fitted(Fit::kWidth, "device.memory_limit=null"), Catch::Contains("no limit is given"));
  CHECK_THROWS_WITH(fitted(Fit::kLayers, "moe.num_experts=[2,4]"), Catch::Contains("is a list"));
}

TEST_CASE("The metrics of a run tell what is on the host and on nvme") {
  const TemporaryFolder folder;
  const Layout layout{1, 1,
                      "zero.offload.optimizer=host zero.offload.gradients=nvme train.max_steps=1 "
                      "model.hidden_size=32",
                      "bf16", 1};
  const RunConfig config = ConfigOf(layout, folder.path());
  const Plan plan = MakePlan(config, 1);
  ThreadJob::Run(1, [&](Transport& transport) {
    const auto device = NewCpuDevice(1);
    const Executor executor(*device, ReferenceKernels());
    TrafficLog traffic;
    CommEngine comm(transport, CommOptions{});
    ProcessMesh mesh(comm, MeshShape{});
    Transformer model(config.model.sizes);
    const RandomRows data(config.data.seq_len);
    Trainer trainer({config, executor, mesh, PosixFileSystem(), traffic, model, data});
    trainer.Start();
    const std::atomic<bool> stop{true};  // after one step
    trainer.Run(stop);
  });
  const std::string text = ReadFile(PosixFileSystem(), JoinPath(folder.path(), "metrics.jsonl"));
  const auto memory = nlohmann::json::parse(text.substr(0, text.find('\n'))).at("memory");
  CHECK(memory.at("optimizer") == 0);
  CHECK(memory.at("peak") == plan.memory.total_peak);
  CHECK(memory.at("host").at("optimizer") == At(plan.host.peak, MemoryTag::kOptimizer));
  CHECK(memory.at("host").at("peak") == plan.host.total_peak);
  CHECK(memory.at("nvme") == plan.nvme_bytes);
}

TEST_CASE("The rate of a disk is taken without leaving anything behind") {
  const TemporaryFolder folder;
  CHECK(MeasureDiskRate(PosixFileSystem(), folder.path(), {}, 1) > 0);
  CHECK(PosixFileSystem().List(folder.path()).empty());
}

}  // namespace
}  // namespace strata::testing
