#include "moe/experts.h"

#include <utility>

namespace strata {
namespace {

using Kind = GroupedMatmulArgs::Kind;

// Adds up the gradients of y = x · wᵀ + b over groups of rows, given dy.
void AddWeightGradients(Tape& tape, const TensorView& dy, const TensorView& x, const TensorView& offsets,
                        Parameter& weight, Parameter* bias) {
  if (bias && bias->requires_grad) {
    const GradTarget db = tape.WeightGrad(*bias);
    tape.executor().grouped_column_sum(
        {.x = dy, .offsets = offsets, .sum = db.view, .accumulate = db.accumulate});
  }
  if (!weight.requires_grad) return;
  const GradTarget dw = tape.WeightGrad(weight);
  GroupedMatmulArgs product;
  product.kind = Kind::kWeight;
  product.a = dy;
  product.b = x;
  product.c = dw.view;
  product.offsets = offsets;
  product.accumulate = dw.accumulate;
  tape.executor().grouped_matmul(product);
}

}  // namespace

Experts::Experts(const MlpShape& shape, int64_t num_experts, const ExpertRanks& ranks,
                 const TensorGroup& tensor)
    : shape_(shape), tensor_(tensor) {
  const int64_t here = num_experts / ranks.size(), ffn = shape.ffn_hidden_size;
  const Placement::Segment experts{ranks.rank() * here, here}, share = tensor_.ShareOf(ffn);
  // `ffn_dim` is the dimension that expert tensor parallelism cuts, `stacked` times over; −1: none.
  auto declare = [&](const char* name, const Shape& global, int ffn_dim, int64_t stacked, Initializer init,
                     bool decay) {
    Shape local = global;
    Placement placement;
    if (!ranks.alone()) {
      local[0] = here;
      placement.cuts.push_back({0, {experts}});
      placement.over_expert = true;
    }
    if (!tensor_.alone() && ffn_dim >= 0) {
      local[ffn_dim] = stacked * share.count;
      Placement::Cut cut{ffn_dim, {}};
      for (int64_t i = 0; i < stacked; ++i) cut.segments.push_back({i * ffn + share.begin, share.count});
      placement.cuts.push_back(std::move(cut));
      placement.over_tensor = true;
    }
    return &Declare(name, local, {init, decay, std::move(placement), global});
  };
  const int64_t stacked = shape.gated ? 2 : 1, hidden = shape.hidden_size;
  const Initializer zero = Initializer::Constant(0);
  in_weight_ = declare("in.weight", {num_experts, stacked * ffn, hidden}, 1, stacked, shape.init_in, true);
  if (shape.bias) in_bias_ = declare("in.bias", {num_experts, stacked * ffn}, 1, stacked, zero, false);
  out_weight_ = declare("out.weight", {num_experts, hidden, ffn}, 2, 1, shape.init_out, true);
  if (shape.bias) out_bias_ = declare("out.bias", {num_experts, hidden}, -1, 1, zero, false);
}

Experts::Inner Experts::Activated(Tape& tape, const Tensor& x, const TensorView& offsets) const {
  const Executor& run = tape.executor();
  const int64_t rows = x.view().rows(), width = in_weight_->shape[1];
  const bool fused = !shape_.gated && shape_.activation != Activation::kNone;
  Inner inner;
  Tensor product = tape.Empty({rows, width});
  if (fused && tape.recording()) inner.before = tape.Empty({rows, width});
  GroupedMatmulArgs args;
  args.a = x.view();
  args.b = in_weight_->data;
  args.c = product.view();
  args.offsets = offsets;
  if (in_bias_) args.bias = in_bias_->data;
  if (fused) args.activation = shape_.activation;
  if (inner.before.defined()) args.pre_activation = inner.before.view();
  run.grouped_matmul(args);
  if (!shape_.gated) {
    inner.after = std::move(product);
    if (!inner.before.defined()) return inner;
  } else {
    inner.before = std::move(product);
  }
  auto activate = [&tape, before = inner.before, shape = Shape{rows, out_weight_->shape[2]},
                   gated = shape_.gated, activation = shape_.activation] {
    Tensor after = tape.Empty(shape);
    if (gated) {
      tape.executor().swiglu_forward({.gate_up = before.view(), .y = after.view()});
    } else {
      tape.executor().activation_forward({.activation = activation, .x = before.view(), .y = after.view()});
    }
    return after;
  };
  if (!inner.after.defined()) inner.after = activate();
  tape.SetRecipe(inner.after, activate);
  return inner;
}

Tensor Experts::Outputs(const Tape& tape, const Tensor& inner, const ExpertExchange& exchange) const {
  const Tensor y = tape.Empty({inner.view().rows(), shape_.hidden_size});
  GroupedMatmulArgs args;
  args.a = inner.view();
  args.b = out_weight_->data;
  args.c = y.view();
  args.offsets = exchange.offsets();
  if (out_bias_ && tensor_.rank() == 0) args.bias = out_bias_->data;
  tape.executor().grouped_matmul(args);
  if (!tensor_.alone()) tensor_.ranks().AllReduce(y.view());
  return exchange.Return(tape, y);
}

Tensor Experts::InnerGradient(const Tape& tape, const TensorView& dy, const Inner& inner,
                              const TensorView& offsets) const {
  const Executor& run = tape.executor();
  Tensor d = tape.Empty({dy.rows(), out_weight_->shape[2]});
  GroupedMatmulArgs args;
  args.kind = Kind::kInput;
  args.a = dy;
  args.b = out_weight_->data;
  args.c = d.view();
  args.offsets = offsets;
  if (!shape_.gated && shape_.activation != Activation::kNone) {
    args.activation = shape_.activation;
    args.activation_grad = true;
    args.pre_activation = inner.before.view();
  }
  run.grouped_matmul(args);
  if (!shape_.gated) return d;
  Tensor dbefore = tape.Empty(inner.before.shape());
  run.swiglu_backward({.dy = d.view(), .gate_up = inner.before.view(), .d_gate_up = dbefore.view()});
  return dbefore;
}

Tensor Experts::Forward(Tape& tape, const Tensor& rows,
                        const std::shared_ptr<const ExpertExchange>& exchange) const {
  const Tensor x = CopyToTensor(tape, tensor_, rows);
  Inner inner = Activated(tape, x, exchange->offsets());
  auto outputs = [&] { return Outputs(tape, inner.after, *exchange); };
  // When recomputation finds the outputs stashed, the product is not made again either.
  Tensor y = exchange->alone() && tensor_.alone()
                 ? outputs()
                 : tape.StashOrReplay("experts", {exchange->token_rows(), shape_.hidden_size}, outputs);
  Parameter* const parameters[] = {in_weight_, in_bias_, out_weight_, out_bias_};
  tape.Record("experts", {x}, parameters, {&y},
              [this, &tape, exchange, before = inner.before, saved_x = tape.Save(x),
               saved_after = tape.Save(inner.after)](Backprop& bp) {
                const TensorView offsets = exchange->offsets();
                Tensor dbefore;
                {
                  const Tensor dy = exchange->Send(tape, bp.TakeDout());
                  const Inner inner{before, saved_after.Get()};
                  AddWeightGradients(tape, dy.view(), inner.after.view(), offsets, *out_weight_, out_bias_);
                  dbefore = InnerGradient(tape, dy.view(), inner, offsets);
                }
                AddWeightGradients(tape, dbefore.view(), saved_x.Get().view(), offsets, *in_weight_,
                                   in_bias_);
                if (!bp.Needs(0)) return;
                const GradTarget dx = bp.Din(0);
                GroupedMatmulArgs product;
                product.kind = Kind::kInput;
                product.a = dbefore.view();
                product.b = in_weight_->data;
                product.c = dx.view;
                product.offsets = offsets;
                product.accumulate = dx.accumulate;
                tape.executor().grouped_matmul(product);
              });
  return y;
}

}  // namespace strata
