#include "moe/routing.h"

#include <algorithm>
#include <cstring>

namespace strata {
namespace {

constexpr float kJitter = 0.01f;

TensorView ViewOf(const Tensor& tensor) { return tensor.defined() ? tensor.view() : TensorView(); }

// What the route kernel counts, in one piece of memory so that one copy brings it to the host: load, first
// load and kept of each expert, int32; then its means, fp32.
class CountsOnDevice {
 public:
  CountsOnDevice(const Tape& tape, int64_t experts)
      : experts_(experts), memory_(tape.Empty({4 * experts + 2, 1}, DType::kI32)) {}

  TensorView load() const { return memory_.view().Slice(0, experts_); }
  TensorView first_load() const { return memory_.view().Slice(experts_, experts_); }
  Tensor kept() const { return memory_.Rows(2 * experts_, experts_); }
  TensorView means() const {
    const TensorView words = memory_.view().Slice(3 * experts_, experts_ + 2);
    return {words.data, DType::kF32, words.shape};
  }

  // `expected` is what kept shall read where nothing is computed (a dry run).
  RoutingCounts Read(const Tape& tape, const std::vector<int32_t>& expected) const {
    std::vector<int32_t> words(static_cast<size_t>(4 * experts_ + 2));
    std::copy(expected.begin(), expected.end(), words.begin() + 2 * experts_);
    Device& device = tape.executor().device();
    device.Copy(words.data(), memory_.view().data, words.size() * sizeof(int32_t), device.compute_stream());
    device.Synchronize(device.compute_stream());
    RoutingCounts counts;
    const auto* const at = words.data();
    counts.load.assign(at, at + experts_);
    counts.first_load.assign(at + experts_, at + 2 * experts_);
    counts.kept.assign(at + 2 * experts_, at + 3 * experts_);
    std::vector<float> means(static_cast<size_t>(experts_ + 2));
    std::memcpy(means.data(), at + 3 * experts_, means.size() * sizeof(float));
    counts.probability.assign(means.begin(), means.end() - 2);
    counts.squared_logsumexp = double{means[means.size() - 2]};
    counts.tokens = static_cast<int64_t>(means.back());
    return counts;
  }

 private:
  int64_t experts_;
  Tensor memory_;
};

// Rows of each expert if the choices were spread evenly: what a dry run, which routes nothing, goes on with.
std::vector<int32_t> EvenRows(int64_t choices, int64_t experts, double capacity_factor) {
  if (capacity_factor > 0 && capacity_factor < 1) {
    choices = static_cast<int64_t>(static_cast<double>(choices) * capacity_factor);
  }
  std::vector<int32_t> rows;
  for (int64_t e = 0; e < experts; ++e) {
    rows.push_back(static_cast<int32_t>((e + 1) * choices / experts - e * choices / experts));
  }
  return rows;
}

}  // namespace

// What backward needs of a pass.
struct Router::Record {
  std::shared_ptr<const MoePass> pass;
  SavedTensor x;
  Tensor mask, logits, probabilities, expert, row, weight;

  TensorView Mask() const {
    return mask.defined() ? mask.view().Reshaped({logits.shape()[0]}) : TensorView();
  }
};

Router::Router(const MoeConfig& config, int64_t layer, int64_t hidden_size, Initializer init)
    : config_(config),
      layer_(layer),
      weight_(Declare("weight", {config.NumExperts(layer), hidden_size}, {init, true, {}, {}})) {}

bool Router::Jitters(const Tape& tape) const {
  return config_.noisy_gate == MoeConfig::NoisyGate::kJitter && tape.options().training;
}

JitterArgs Router::Jitter(const Tape& tape) const {
  JitterArgs args;
  args.amplitude = kJitter;
  args.random = tape.random(Purpose("moe.jitter", static_cast<uint32_t>(layer_)));
  args.index.row_offset = tape.options().row_offset;
  return args;
}

Tensor Router::Input(const Tape& tape, const Tensor& x) const {
  if (!Jitters(tape)) return x;
  Tensor jittered = tape.Empty(x.shape(), DType::kF32);
  JitterArgs args = Jitter(tape);
  args.x = x.view();
  args.y = jittered.view();
  tape.executor().jitter(args);
  return jittered;
}

RouteArgs Router::Options(const Tape& tape) const {
  const bool training = tape.options().training;
  RouteArgs args;
  args.top_k = static_cast<int>(config_.top_k);
  args.noisy_first = training && config_.noisy_gate == MoeConfig::NoisyGate::kRsample;
  args.noisy_second = training && config_.sample_second_choice;
  args.random_selection = training && config_.random_token_selection;
  args.random = tape.random(Purpose("moe.route", static_cast<uint32_t>(layer_)));
  args.token_offset = tape.options().row_offset;
  args.capacity_factor = config_.CapacityFactor(training);
  args.min_capacity = config_.min_capacity;
  return args;
}

Routed Router::Forward(Tape& tape, const Tensor& x, const Tensor& mask,
                       const std::shared_ptr<MoePass>& pass) const {
  const Executor& run = tape.executor();
  const int64_t n = x.view().rows(), experts = weight_.shape[0], k = config_.top_k;
  const CountsOnDevice counts(tape, experts);
  Record record{pass,
                tape.Save(x),
                mask,
                tape.Empty({n, experts}, DType::kF32),
                tape.Empty({n, experts}, DType::kF32),
                tape.Empty({n, k}, DType::kI32),
                tape.Empty({n, k}, DType::kI32),
                tape.Empty({n, k}, DType::kF32)};
  Routed routed{record.weight.Detached(),         record.expert, record.row,
                tape.Empty({n * k}, DType::kI32), counts.kept(), {}};
  {
    const Tensor input = Input(tape, x);
    MatmulArgs product;
    product.a = input.view();
    product.b = weight_.data;
    product.c = record.logits.view();
    product.trans_b = true;
    run.matmul(product);
  }
  RouteArgs args = Options(tape);
  args.logits = record.logits.view();
  args.mask = record.Mask();
  args.probabilities = record.probabilities.view();
  args.expert = record.expert.view();
  args.row = record.row.view();
  args.weight = record.weight.view();
  args.token = routed.token.view();
  args.load = counts.load();
  args.first_load = counts.first_load();
  args.kept = counts.kept().view();
  args.means = counts.means();
  run.route(args);
  const RoutingCounts counted = counts.Read(tape, EvenRows(n * k, experts, args.capacity_factor));
  routed.rows.assign(counted.kept.begin(), counted.kept.end());
  pass->Count(layer_, counted);

  Parameter* const parameters[] = {&weight_};
  tape.Record("route", {x}, parameters, {&routed.weight},
              [this, &tape, record = std::move(record)](Backprop& bp) { Backward(tape, bp, record); });
  return routed;
}

void Router::Backward(Tape& tape, Backprop& bp, const Record& record) const {
  const Executor& run = tape.executor();
  const Tensor dlogits = tape.Empty(record.logits.shape(), DType::kF32);
  std::vector<float> balance = record.pass->BalanceGradient(layer_);
  Tensor balance_there;
  if (!balance.empty()) {
    balance_there = tape.Upload({balance.data(), DType::kF32, {static_cast<int64_t>(balance.size())}});
  }
  run.route_backward({.logits = record.logits.view(),
                      .mask = record.Mask(),
                      .probabilities = record.probabilities.view(),
                      .expert = record.expert.view(),
                      .row = record.row.view(),
                      .weight = record.weight.view(),
                      .dweight = bp.dout().view(),
                      .balance = ViewOf(balance_there),
                      .dlogits = dlogits.view(),
                      .top_k = static_cast<int>(config_.top_k),
                      .renormalize = false,
                      .z_scale = record.pass->z_scale()});
  const Tensor input = Input(tape, record.x.Get());
  const GradTarget dx = bp.Needs(0) ? bp.Din(0) : GradTarget();
  if (!bp.Needs(0) || !Jitters(tape)) {
    return LinearBackward(tape, dlogits.view(), input.view(), weight_, nullptr, dx);
  }
  const Tensor dinput = tape.Empty(dx.view.shape, DType::kF32);
  LinearBackward(tape, dlogits.view(), input.view(), weight_, nullptr, {dinput.view(), false});
  JitterArgs jitter = Jitter(tape);
  jitter.x = dinput.view();
  jitter.y = dx.view;
  jitter.accumulate = dx.accumulate;
  run.jitter(jitter);
}

Tensor CombineRows(Tape& tape, const Tensor& rows, const Routed& routed) {
  Tensor out = tape.Empty({routed.row.shape()[0], rows.view().cols()});
  tape.executor().combine_rows(
      {.x = rows.view(), .row = routed.row.view(), .weight = routed.weight.view(), .out = out.view()});
  tape.Record(
      "combine_rows", {rows, routed.weight}, {}, {&out},
      [&tape, rows = rows.Detached(), row = routed.row, weight = routed.weight.Detached()](Backprop& bp) {
        Tensor drows = tape.Empty(rows.shape());
        Tensor dweight = tape.Empty(weight.shape(), DType::kF32);
        tape.executor().combine_rows_backward({.dout = bp.dout().view(),
                                               .x = rows.view(),
                                               .row = row.view(),
                                               .weight = weight.view(),
                                               .dx = drows.view(),
                                               .dweight = dweight.view()});
        bp.GiveDin(0, std::move(drows));
        bp.GiveDin(1, std::move(dweight));
      });
  return out;
}

}  // namespace strata
