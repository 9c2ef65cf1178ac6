// What ZeRO promises beside equal bits (tests/layout_test.cc): ranks that use other units than their
// neighbours, units used twice, exact traffic, memory as the formulas say.
#include <catch2/catch.hpp>

#include "runtime/base/testing.h"
#include "runtime/nn/layers.h"
#include "tests/tiny_run.h"

namespace strata::testing {
namespace {

constexpr int64_t kVocab = 24, kHidden = 16, kRows = 6;

// A chain of blocks, each x + linear(x), of which any may be skipped, and used twice.
class Chain : public Module {
 public:
  explicit Chain(int blocks) {
    Register("embedding", embedding_);
    for (int i = 0; i < blocks; ++i) {
      blocks_.push_back(std::make_unique<LinearLayer>(kHidden, kHidden, true, Initializer::Normal(0.2f)));
      Register("block" + std::to_string(i), *blocks_.back());
    }
    Register("head", head_);
    AssignNames();
    Add("embedding", embedding_);
    for (auto& block : blocks_) Add("block", *block);
    Add("head", head_);
  }

  // Runs the blocks of `order`, forward and backward; the sum of the losses of rows that follow from `seed`.
  double Run(Tape& tape, const std::vector<int>& order, int seed, float grad_scale) {
    std::vector<int32_t> ids, targets, positions;
    for (int32_t i = 0; i < kRows; ++i) {
      ids.push_back((seed * 7 + i * 5) % kVocab);
      targets.push_back((seed * 3 + i * 11 + 1) % kVocab);
      positions.push_back(i);
    }
    auto upload = [&](std::vector<int32_t>& values) {
      return tape.Upload(TensorView(values.data(), DType::kI32, {kRows}));
    };
    const Tensor tokens = upload(ids), wanted = upload(targets), places = upload(positions);
    Tensor x = tape.RunUnit(*units_.front(), {}, [&](std::span<const Tensor>) {
      return std::vector{Embedding(tape, tokens, embedding_.weight(), places, nullptr)};
    })[0];
    for (int block : order) {
      const LinearLayer& layer = *blocks_[static_cast<size_t>(block)];
      x = tape.RunUnit(*units_[static_cast<size_t>(block) + 1], x, [&](const Tensor& in) {
        return layer.Forward(tape, in, {Activation::kNone, in});
      });
    }
    const auto losses = tape.RunUnit(*units_.back(), {x}, [&](std::span<const Tensor> in) {
      return std::vector{LinearCrossEntropy(tape, in[0], head_.weight(), nullptr, wanted, grad_scale)};
    });
    double sum = 0;
    for (int64_t i = 0; i < kRows; ++i) sum += losses[0].view().f32()[i];
    tape.Backward(losses);
    return sum;
  }

  std::vector<Unit*> Units() const {
    std::vector<Unit*> units;
    for (const auto& unit : units_) units.push_back(unit.get());
    return units;
  }

 private:
  void Add(const std::string& name, Module& module) {
    units_.push_back(std::make_unique<Unit>(Unit{name, module.Parameters(), {}}));
  }

  EmbeddingTable embedding_{kVocab, kHidden, Initializer::Normal(1.0f), true};
  std::vector<std::unique_ptr<LinearLayer>> blocks_;
  LinearLayer head_{kHidden, kVocab, false, Initializer::Normal(0.3f)};
  std::vector<std::unique_ptr<Unit>> units_;
};

struct ChainLayout {
  int ranks = 1, micro_batches = 1;
  ZeroOptions zero;
  DType precision = DType::kF32;
  int blocks = 4, steps = 3;
  // What blocks micro-batch `index` of the step (over all ranks) uses, in order.
  std::function<std::vector<int>(int index)> order;
  std::vector<int> twice;  // blocks that stand in Units() again, before the head
};

struct ChainResult {
  TinyResult run;
  std::map<std::string, TrafficTotal> traffic;  // of the last step, sent by rank 0
  int64_t elements = 0;                         // parameters with padding
};

ChainResult RunChain(const ChainLayout& layout) {
  ChainResult result;
  std::mutex mutex;
  ThreadJob::Run(layout.ranks, [&](Transport& transport) {
    auto device = NewCpuDevice(1);
    Executor executor(*device, CpuKernels());
    TrafficLog traffic;
    CommOptions comm_options;
    comm_options.traffic = &traffic;
    CommEngine comm(transport, comm_options);
    ProcessMesh mesh(comm, MeshShape{layout.ranks, 1, 1});
    Chain model(layout.blocks);
    std::vector<Unit*> units = model.Units();
    for (int block : layout.twice) units.insert(units.end() - 1, units[static_cast<size_t>(block) + 1]);
    OptimizerConfig optimizer;
    auto host_device = NewCpuDevice(1);
    Executor host(*host_device, CpuKernels());
    ZeroEngine engine({executor, mesh, PosixFileSystem(), &host}, units, layout.precision, optimizer,
                      layout.zero);
    engine.InitializeParameters(3);
    const double tokens = kRows * layout.ranks * layout.micro_batches;
    for (int step = 0; step < layout.steps; ++step) {
      traffic.Reset();
      double loss = 0;
      for (int m = 0; m < layout.micro_batches; ++m) {
        engine.BeginMicroBatch(m, layout.micro_batches);
        const int index = m * layout.ranks + transport.rank();
        TapeOptions options;
        options.compute_dtype = layout.precision;
        Tape tape(executor, engine, options);
        loss += model.Run(tape, layout.order(index), step * 100 + index, static_cast<float>(1.0 / tokens));
      }
      const StepOutcome outcome = engine.FinishStep(1e-2, 1.0, 1.0);
      const auto sent = traffic.Totals();
      mesh.dp().AllReduce(TensorView(&loss, DType::kF64, {1}));
      std::lock_guard lock(mutex);
      if (transport.rank() != 0) continue;
      result.traffic = sent;
      result.run.losses.push_back(loss / tokens);
      result.run.norms.push_back(outcome.grad_norm);
    }
    engine.ForEachParameter([&](const Parameter& parameter, const TensorView& whole) {
      if (transport.rank() != 0) return;
      result.run.weights[parameter.name].assign(whole.f32(), whole.f32() + whole.num_elements());
    });
    if (transport.rank() != 0) return;
    for (const Unit* unit : model.Units()) {
      int64_t n = 0;
      for (const Parameter* p : unit->parameters) n += (p->shape.num_elements() + 15) / 16 * 16;
      const int64_t multiple = int64_t{16} * layout.ranks;
      result.elements += (n + multiple - 1) / multiple * multiple;
    }
  });
  return result;
}

std::vector<int> AllOf(int blocks) {
  std::vector<int> order(static_cast<size_t>(blocks));
  for (int i = 0; i < blocks; ++i) order[static_cast<size_t>(i)] = i;
  return order;
}

TEST_CASE("ranks that skip other units than their neighbours finish, and train as one rank does") {
  TemporaryFolder folder;
  // Micro-batches that use some of the blocks, all, or none.
  const std::vector<std::vector<int>> orders = {{0, 2}, {1, 3}, {}, {0, 1, 2, 3}, {3}, {0}};
  ChainLayout one;
  one.micro_batches = 6;
  one.order = [&](int index) { return orders[static_cast<size_t>(index)]; };
  const TinyResult expected = RunChain(one).run;
  for (int ranks : {2, 3}) {
    TinyResult first;
    for (int stage = 0; stage <= 3; ++stage) {
      for (Tier tier : {Tier::kDevice, Tier::kNvme}) {
        for (bool overlap : {true, false}) {
          ChainLayout layout = one;
          layout.ranks = ranks;
          layout.micro_batches = 6 / ranks;
          layout.zero.stage = stage;
          layout.zero.reduce = ZeroOptions::Reduce::kMicroBatch;
          layout.zero.overlap = overlap;
          layout.zero.offload.optimizer = layout.zero.offload.parameters = tier;
          layout.zero.offload.gradients = tier;
          layout.zero.offload.path = folder.path();
          const TinyResult result = RunChain(layout).run;
          INFO("ranks " << ranks << " stage " << stage << " " << Name(tier) << " overlap " << overlap);
          if (first.losses.empty()) first = result;
          CHECK(BitEqual(result, first));
          CHECK(MaxWeightDifference(result, expected) < 2e-6);
          for (size_t i = 0; i < expected.losses.size(); ++i)
            CHECK(result.losses[i] == Approx(expected.losses[i]).epsilon(1e-6));
        }
      }
    }
  }
}

TEST_CASE("a unit used twice a pass has the gradient of both uses, in every stage") {
  ChainLayout one;
  one.order = [](int) { return std::vector<int>{0, 1, 2, 3, 1}; };
  one.twice = {1};
  one.micro_batches = 2;
  const TinyResult expected = RunChain(one).run;
  // Without the second use it is another model.
  ChainLayout once = one;
  once.order = [](int) { return AllOf(4); };
  CHECK(MaxWeightDifference(RunChain(once).run, expected) > 1e-3);
  for (int stage = 0; stage <= 3; ++stage) {
    ChainLayout layout = one;
    layout.ranks = 2;
    layout.micro_batches = 1;
    layout.zero.stage = stage;
    INFO("stage " << stage);
    CHECK(MaxWeightDifference(RunChain(layout).run, expected) < 2e-6);
  }
}

// docs/zero.md: Ψ is the number of parameters; a rank sends (N − 1)/N of each.
TEST_CASE("traffic is exactly that of the formulas") {
  for (DType precision : {DType::kF32, DType::kBF16}) {
    for (int ranks : {2, 4}) {
      for (int k : {1, 3}) {
        for (int stage = 0; stage <= 3; ++stage) {
          for (auto reduce : {ZeroOptions::Reduce::kAuto, ZeroOptions::Reduce::kMicroBatch}) {
            ChainLayout layout;
            layout.precision = precision;
            layout.ranks = ranks;
            layout.micro_batches = k;
            layout.order = [](int) { return AllOf(4); };
            layout.zero.stage = stage;
            layout.zero.reduce = reduce;
            layout.zero.prefetch_bytes = 3000;
            layout.steps = 1;
            const ChainResult result = RunChain(layout);
            const int64_t psi = result.elements / ranks * (ranks - 1);
            const auto width = static_cast<int64_t>(SizeOf(precision));
            const int64_t reductions = layout.zero.ReducesEachMicroBatch() ? k : 1;
            const int64_t gathers = stage == 3 ? 2 * k : 1;
            INFO("stage " << stage << " " << Name(precision) << " ranks " << ranks << " micro-batches " << k);
            CHECK(result.traffic.at("dp.reduce_scatter").bytes == reductions * psi * 4);
            // Stage 0 shares out sums of gradients, the others parameters.
            CHECK(result.traffic.at("dp.all_gather").bytes == gathers * psi * (stage == 0 ? 4 : width));
            layout.zero.reduce_dtype = DType::kBF16;
            CHECK(RunChain(layout).traffic.at("dp.reduce_scatter").bytes == reductions * psi * 2);
          }
        }
      }
    }
  }
}

TEST_CASE("recomputation adds no traffic") {
  // The tiny transformer's tied embedding is gathered for both its uses, with and without.
  for (int stage : {0, 3}) {
    std::map<std::string, TrafficTotal> sent[2];
    for (int full : {0, 1}) {
      TinyLayout layout;
      layout.ranks = 2;
      layout.zero.stage = stage;
      layout.recompute = full ? RecomputePolicy::kFull : RecomputePolicy::kNone;
      sent[full] = RunTiny(layout).traffic;
      for (auto& [name, total] : sent[full]) total.seconds = 0;
    }
    CHECK(!sent[0].empty());
    CHECK(sent[0] == sent[1]);
  }
}

TEST_CASE("sums in bf16 stay near those in fp32") {
  TinyLayout layout;
  layout.ranks = 2;
  layout.zero.stage = 2;
  const TinyResult exact = RunTiny(layout);
  layout.zero.reduce_dtype = DType::kBF16;
  const TinyResult rounded = RunTiny(layout);
  CHECK_FALSE(BitEqual(exact, rounded));
  for (size_t i = 0; i < exact.norms.size(); ++i) {
    CHECK(rounded.norms[i] == Approx(exact.norms[i]).epsilon(1e-2));
    CHECK(rounded.losses[i] == Approx(exact.losses[i]).epsilon(1e-2));
  }
}

}  // namespace
}  // namespace strata::testing
