#include "runtime/autograd/tape.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <limits>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "runtime/autograd/ops.h"
#include "runtime/autograd/resident_parameters.h"

namespace strata {
namespace {

// One rank on the reference kernels.
struct Bench {
  std::unique_ptr<Device> device = NewCpuDevice(1);
  Executor executor{*device, ReferenceKernels()};

  static Parameter Weight(Shape shape) {
    Parameter p;
    p.name = "w";
    p.shape = p.global_shape = shape;
    return p;
  }
  static void Fill(const TensorView& view, float start) {
    for (int64_t i = 0; i < view.num_elements(); ++i)
      view.f32()[i] = start + 0.25f * static_cast<float>(i % 5);
  }
};

// Keeps everything, and writes down what the tape asks of it.
class Recorder : public ParamResidency {
 public:
  explicit Recorder(ParamResidency& inner) : inner_(inner) {}
  void Acquire(Unit& unit, Phase phase) override {
    log.push_back("+" + unit.name + (phase == Phase::kForward ? "f" : "b"));
  }
  void Release(Unit& unit, Phase phase) override {
    log.push_back("-" + unit.name + (phase == Phase::kForward ? "f" : "b"));
  }
  TensorView Gradient(Parameter& parameter) override { return inner_.Gradient(parameter); }
  std::vector<std::string> log;

 private:
  ParamResidency& inner_;
};

// y = x, telling when its backward runs.
Tensor Mark(Tape& tape, const Tensor& x, Parameter& p, int id, std::vector<int>& order) {
  Tensor y = x.Detached();
  Parameter* const parameters[] = {&p};
  tape.Record("mark", {x}, parameters, {&y}, [id, &order](Backprop& bp) {
    order.push_back(id);
    bp.GiveDin(0, bp.TakeDout());
  });
  return y;
}

TEST_CASE("backward runs in strictly decreasing order, not depth first") {
  Bench b;
  Parameter p = Bench::Weight({1});
  ResidentParameters resident(b.executor, {&p}, DType::kF32);
  Tape tape(b.executor, resident, {});
  std::vector<int> order;
  Tensor x = tape.Empty({2, 2});
  Bench::Fill(x.view(), 1);
  Tensor a = Mark(tape, x, p, 0, order);
  Tensor b1 = Mark(tape, a, p, 1, order);
  Tensor c1 = Mark(tape, a, p, 2, order);
  Tensor b2 = Mark(tape, b1, p, 3, order);
  Tensor sum = Add(tape, b2, c1);
  const Tensor roots[] = {sum};
  tape.Backward(roots);
  CHECK(order == std::vector<int>{3, 2, 1, 0});
}

TEST_CASE("a value used twice gets the sum of its gradients, and no shared gradient is written into") {
  Bench b;
  Parameter w = Bench::Weight({2, 2});
  ResidentParameters resident(b.executor, {&w}, DType::kF32);
  Bench::Fill(w.data, 0.5f);
  Tape tape(b.executor, resident, {});
  Tensor in = tape.Empty({1, 2});
  Bench::Fill(in.view(), 1);
  Tensor x = Linear(tape, in, w, nullptr);
  // y = x + (x + x): the gradient of x is 3 in every element.
  Tensor y = Add(tape, x, Add(tape, x, x));
  const Tensor roots[] = {y};
  tape.Backward(roots);
  const float* gradient = resident.Gradient(w).f32();
  for (int o = 0; o < 2; ++o) {
    for (int i = 0; i < 2; ++i) CHECK(gradient[2 * o + i] == Approx(3.0f * in.view().f32()[i]));
  }
}

TEST_CASE("units are acquired and released around both passes, and again for recomputation only once") {
  Bench b;
  for (RecomputePolicy policy :
       {RecomputePolicy::kNone, RecomputePolicy::kSelective, RecomputePolicy::kFull}) {
    Parameter w0 = Bench::Weight({2, 2}), w1 = Bench::Weight({2, 2});
    ResidentParameters resident(b.executor, {&w0, &w1}, DType::kF32);
    Bench::Fill(w0.data, 0.1f);
    Bench::Fill(w1.data, 0.2f);
    Recorder recorder(resident);
    TapeOptions options;
    options.recompute = policy;
    Tape tape(b.executor, recorder, options);
    Unit u0{"A", {&w0}, {}}, u1{"B", {&w1}, {}};
    Tensor x = tape.Empty({1, 2});
    Bench::Fill(x.view(), 1);
    Tensor h = tape.RunUnit(u0, x, [&](const Tensor& in) { return Linear(tape, in, w0, nullptr); });
    Tensor y = tape.RunUnit(u1, h, [&](const Tensor& in) { return Linear(tape, in, w1, nullptr); });
    const Tensor roots[] = {y};
    tape.Backward(roots);
    CHECK(recorder.log == std::vector<std::string>{"+Af", "-Af", "+Bf", "-Bf", "+Bb", "-Bb", "+Ab", "-Ab"});
  }
}

// A unit's parameters are there while it is acquired, and NaN otherwise.
class Forgetful : public ParamResidency {
 public:
  explicit Forgetful(ParamResidency& inner) : inner_(inner) {}
  void Acquire(Unit& unit, Phase) override {
    for (Parameter* p : unit.parameters) {
      const auto held = held_.find(p);
      if (held != held_.end()) std::copy(held->second.begin(), held->second.end(), p->data.f32());
    }
  }
  void Release(Unit& unit, Phase) override {
    for (Parameter* p : unit.parameters) {
      float* const data = p->data.f32();
      const int64_t n = p->data.num_elements();
      held_[p].assign(data, data + n);
      std::fill(data, data + n, std::numeric_limits<float>::quiet_NaN());
    }
  }
  TensorView Gradient(Parameter& parameter) override { return inner_.Gradient(parameter); }

 private:
  ParamResidency& inner_;
  std::map<Parameter*, std::vector<float>> held_;
};

TEST_CASE("what a unit gives to the next is not made again from the first one's parameters") {
  std::vector<std::vector<float>> gradients;
  for (const RecomputePolicy policy :
       {RecomputePolicy::kNone, RecomputePolicy::kSelective, RecomputePolicy::kFull}) {
    Bench b;
    Parameter gain = Bench::Weight({3}), weight = Bench::Weight({2, 3});
    ResidentParameters resident(b.executor, {&gain, &weight}, DType::kF32);
    Bench::Fill(gain.data, 1);
    Bench::Fill(weight.data, 0.5f);
    Forgetful forgetful(resident);
    TapeOptions options;
    options.recompute = policy;
    Tape tape(b.executor, forgetful, options);
    Unit first{"norm", {&gain}, {}}, second{"linear", {&weight}, {}};
    for (Unit* unit : {&first, &second}) forgetful.Release(*unit, Phase::kForward);
    Tensor x = tape.Empty({4, 3});
    Bench::Fill(x.view(), -1);
    x = tape.RunUnit(first, x, [&](const Tensor& in) { return RmsNorm(tape, in, gain, 1e-5f); });
    x = tape.RunUnit(second, x, [&](const Tensor& in) { return Linear(tape, in, weight, nullptr); });
    tape.Backward(std::span(&x, 1));
    std::vector<float>& all = gradients.emplace_back();
    for (Parameter* p : {&gain, &weight}) {
      const TensorView gradient = resident.Gradient(*p);
      all.insert(all.end(), gradient.f32(), gradient.f32() + gradient.num_elements());
    }
  }
  CHECK(std::none_of(gradients[0].begin(), gradients[0].end(), [](float g) { return std::isnan(g); }));
  CHECK(gradients[1] == gradients[0]);
  CHECK(gradients[2] == gradients[0]);
}

TEST_CASE("recomputation runs the unit twice and takes stashed collectives instead of communicating") {
  Bench b;
  for (bool stash : {false, true}) {
    Parameter w = Bench::Weight({2, 2});
    ResidentParameters resident(b.executor, {&w}, DType::kF32);
    Bench::Fill(w.data, 0.1f);
    TapeOptions options;
    options.recompute = RecomputePolicy::kFull;
    options.stash_collectives = stash;
    Tape tape(b.executor, resident, options);
    Unit unit{"U", {&w}, {}};
    int runs = 0, communications = 0;
    Tensor x = tape.Empty({1, 2});
    Bench::Fill(x.view(), 1);
    Tensor y = tape.RunUnit(unit, x, [&](const Tensor& in) {
      ++runs;
      Tensor h = Linear(tape, in, w, nullptr);
      return tape.StashOrReplay("all_reduce", h.shape(), [&] {
        ++communications;
        return h;
      });
    });
    const Tensor roots[] = {y};
    tape.Backward(roots);
    CHECK(runs == 2);
    CHECK(communications == (stash ? 1 : 2));
  }
}

// Keeps copies in the host's memory, and overwrites what it gives up.
class CopyStore : public ActivationStore {
 public:
  explicit CopyStore(Device& device) : device_(device) {}
  int64_t Put(Tensor tensor) override {
    const float* data = tensor.view().f32();
    copies_.push_back({tensor.shape(), {data, data + tensor.view().num_elements()}});
    if (tensor.Unique()) Bench::Fill(tensor.view(), -100);
    return std::ssize(copies_) - 1;
  }
  Tensor Take(int64_t ticket) override {
    CHECK(ticket == std::ssize(copies_) - 1);
    const auto [shape, values] = std::move(copies_.back());
    copies_.pop_back();
    Tensor tensor = Tensor::Empty(device_.allocator(), shape, DType::kF32, MemoryTag::kActivations);
    std::copy(values.begin(), values.end(), tensor.view().f32());
    return tensor;
  }
  void Clear() override { copies_.clear(); }
  size_t held() const { return copies_.size(); }

 private:
  Device& device_;
  std::vector<std::pair<Shape, std::vector<float>>> copies_;
};

TEST_CASE("inputs that a store keeps give the gradients of those that stay") {
  Bench b;
  CopyStore store(*b.device);
  std::vector<std::vector<float>> gradients[2];
  for (bool away : {false, true}) {
    Parameter w0 = Bench::Weight({2, 2}), w1 = Bench::Weight({2, 2}), w2 = Bench::Weight({2, 2});
    ResidentParameters resident(b.executor, {&w0, &w1, &w2}, DType::kF32);
    Bench::Fill(w0.data, 0.1f);
    Bench::Fill(w1.data, 0.2f);
    Bench::Fill(w2.data, 0.3f);
    TapeOptions options;
    options.recompute = RecomputePolicy::kFull;
    if (away) options.activation_store = &store;
    Tape tape(b.executor, resident, options);
    Unit u0{"A", {&w0}, {}}, u1{"B", {&w1}, {}}, u2{"C", {&w2}, {}};
    Tensor x = tape.Empty({3, 2});
    Bench::Fill(x.view(), 1);
    const Tensor h = tape.RunUnit(u0, x, [&](const Tensor& in) { return Linear(tape, in, w0, nullptr); });
    // `h` is an input of two units, twice of one, and of an operation outside of any.
    const Tape::UnitForward pair = [&](std::span<const Tensor> in) {
      CHECK_FALSE(in[1].defined());
      return std::vector<Tensor>{Add(tape, Linear(tape, in[0], w1, nullptr), in[2])};
    };
    const Tensor y = tape.RunUnit(u1, {h, Tensor(), h}, pair)[0];
    const Tensor z = tape.RunUnit(u2, {h, y}, [&](std::span<const Tensor> in) {
      return std::vector{Add(tape, in[0], Linear(tape, in[1], w2, nullptr))};
    })[0];
    CHECK(store.held() == (away ? 5 : 0));
    const Tensor roots[] = {Add(tape, z, h)};
    tape.Backward(roots);
    CHECK(store.held() == 0);
    for (Parameter* w : {&w0, &w1, &w2}) {
      const float* g = resident.Gradient(*w).f32();
      gradients[away].emplace_back(g, g + 4);
    }
  }
  CHECK(gradients[0] == gradients[1]);
}

TEST_CASE("a pass that ends before backward leaves its store empty") {
  Bench b;
  CopyStore store(*b.device);
  Parameter w = Bench::Weight({2, 2});
  ResidentParameters resident(b.executor, {&w}, DType::kF32);
  Bench::Fill(w.data, 0.1f);
  TapeOptions options;
  options.recompute = RecomputePolicy::kFull;
  options.activation_store = &store;
  {
    Tape tape(b.executor, resident, options);
    Unit unit{"U", {&w}, {}};
    Tensor x = tape.Empty({1, 2});
    Bench::Fill(x.view(), 1);
    tape.RunUnit(unit, x, [&](const Tensor& in) { return Linear(tape, in, w, nullptr); });
    CHECK(store.held() == 1);
  }
  CHECK(store.held() == 0);
}

TEST_CASE("frozen parameters get no gradient, and nothing is recorded below the first trained one") {
  Bench b;
  Parameter frozen = Bench::Weight({2, 2}), trained = Bench::Weight({2, 2});
  frozen.requires_grad = false;
  ResidentParameters resident(b.executor, {&frozen, &trained}, DType::kF32);
  Bench::Fill(frozen.data, 0.3f);
  Bench::Fill(trained.data, 0.1f);
  Recorder recorder(resident);
  Tape tape(b.executor, recorder, {});
  Unit u0{"frozen", {&frozen}, {}}, u1{"trained", {&trained}, {}};
  Tensor x = tape.Empty({1, 2});
  Bench::Fill(x.view(), 1);
  Tensor h = tape.RunUnit(u0, x, [&](const Tensor& in) { return Linear(tape, in, frozen, nullptr); });
  Tensor y = tape.RunUnit(u1, h, [&](const Tensor& in) { return Linear(tape, in, trained, nullptr); });
  const Tensor roots[] = {y};
  tape.Backward(roots);
  CHECK(trained.gradient_defined);
  CHECK_FALSE(frozen.gradient_defined);
  CHECK(recorder.log ==
        std::vector<std::string>{"+frozenf", "-frozenf", "+trainedf", "-trainedf", "+trainedb", "-trainedb"});
}

TEST_CASE("gathered and scattered rows carry gradients to where they came from") {
  Bench b;
  Parameter w = Bench::Weight({2, 2});
  ResidentParameters resident(b.executor, {&w}, DType::kF32);
  Bench::Fill(w.data, 0.5f);
  Tape tape(b.executor, resident, {});
  Tensor in = tape.Empty({3, 2});
  Bench::Fill(in.view(), 1);
  Tensor x = Linear(tape, in, w, nullptr);
  int32_t kept[] = {0, 2};
  Tensor index = tape.Upload(TensorView(kept, DType::kI32, {2}));
  Tensor part = GatherRows(tape, x, index);
  Tensor doubled = Add(tape, part, part);
  Tensor y = ScatterRows(tape, x, doubled, index);
  const Tensor roots[] = {y};
  tape.Backward(roots);
  // Rows 0 and 2 pass through the doubling (gradient 2), row 1 by itself (gradient 1).
  const float weight[] = {2, 1, 2};
  for (int o = 0; o < 2; ++o) {
    for (int i = 0; i < 2; ++i) {
      float expected = 0;
      for (int t = 0; t < 3; ++t) expected += weight[t] * in.view().f32()[2 * t + i];
      CHECK(resident.Gradient(w).f32()[2 * o + i] == Approx(expected));
    }
  }
}

TEST_CASE("backward numbers rows as the operation did that it belongs to") {
  Bench b;
  Parameter p = Bench::Weight({1});
  ResidentParameters resident(b.executor, {&p}, DType::kF32);
  TapeOptions options;
  options.row_offset = 10;
  Tape tape(b.executor, resident, options);
  std::vector<int64_t> seen;
  auto record = [&](const Tensor& x) {
    Tensor y = x.Detached();
    Parameter* const parameters[] = {&p};
    tape.Record("record", {x}, parameters, {&y}, [&](Backprop& bp) {
      seen.push_back(tape.options().row_offset);
      bp.GiveDin(0, bp.TakeDout());
    });
    return y;
  };
  Tensor x = tape.Empty({1, 1});
  Bench::Fill(x.view(), 1);
  x = record(x);
  x = tape.WithRowOffset(4, [&] { return record(x); });
  CHECK(tape.options().row_offset == 10);
  const Tensor roots[] = {record(x)};
  tape.Backward(roots);
  CHECK(seen == std::vector<int64_t>{10, 4, 10});
}

}  // namespace
}  // namespace strata
