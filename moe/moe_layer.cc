#include "moe/moe_layer.h"

#include <utility>

namespace strata {
namespace {

// w₀ · a + w₁ · b, w = softmax(x · coefficientᵀ) of each row, in fp32.
Tensor Mix(Tape& tape, const Tensor& x, Parameter& coefficient, const Tensor& a, const Tensor& b) {
  const Executor& run = tape.executor();
  const Tensor logits = tape.Empty({x.view().rows(), 2}, DType::kF32);
  MatmulArgs product;
  product.a = x.view();
  product.b = coefficient.data;
  product.c = logits.view();
  product.trans_b = true;
  run.matmul(product);
  Tensor y = tape.Empty(a.shape());
  run.mix_rows({.a = a.view(), .b = b.view(), .logits = logits.view(), .out = y.view()});
  Parameter* const parameters[] = {&coefficient};
  tape.Record("mix", {x, a, b}, parameters, {&y},
              [&tape, saved_x = tape.Save(x), a = a.Detached(), b = b.Detached(), logits,
               coefficient = &coefficient](Backprop& bp) {
                const Executor& run = tape.executor();
                const Tensor dlogits = tape.Empty(logits.shape(), DType::kF32);
                Tensor da = tape.Empty(a.shape()), db = tape.Empty(b.shape());
                run.mix_rows_backward({.dout = bp.dout().view(),
                                       .a = a.view(),
                                       .b = b.view(),
                                       .logits = logits.view(),
                                       .da = da.view(),
                                       .db = db.view(),
                                       .dlogits = dlogits.view()});
                bp.GiveDin(1, std::move(da));
                bp.GiveDin(2, std::move(db));
                if (coefficient->requires_grad) {
                  const Tensor x = saved_x.Get();
                  const GradTarget dcoefficient = tape.WeightGrad(*coefficient);
                  MatmulArgs product;
                  product.a = dlogits.view();
                  product.b = x.view();
                  product.c = dcoefficient.view;
                  product.trans_a = true;
                  product.accumulate = dcoefficient.accumulate;
                  run.matmul(product);
                }
                if (!bp.Needs(0)) return;
                const GradTarget dx = bp.Din(0);
                MatmulArgs product;
                product.a = dlogits.view();
                product.b = coefficient->data;
                product.c = dx.view;
                product.accumulate = dx.accumulate;
                run.matmul(product);
              });
  return y;
}

// What mixes the experts with the dense MLP.
class Coefficient : public Module {
 public:
  Coefficient(int64_t hidden_size, Initializer init)
      : weight(Declare("weight", {2, hidden_size}, {init, true, {}, {}})) {}
  Parameter& weight;
};

}  // namespace

struct MoeLayer::Residual {
  Residual(const MlpShape& shape, const TensorGroup& tensor)
      : in(tensor, shape.hidden_size, std::vector<int64_t>(shape.gated ? 2 : 1, shape.ffn_hidden_size),
           shape.bias, shape.init_in),
        out(tensor, shape.ffn_hidden_size, shape.hidden_size, shape.bias, shape.init_out),
        coefficient(shape.hidden_size, shape.init_in) {}
  ColumnParallelLinear in;
  RowParallelLinear out;
  Coefficient coefficient;
};

MoeLayer::MoeLayer(const MoeConfig& config, const MlpShape& shape, int64_t layer, const ProcessMesh* mesh)
    : shape_(shape),
      ranks_(mesh, config.drop_duplicates),
      gate_(config, layer, shape.hidden_size, shape.init_in),
      experts_(shape, config.NumExperts(layer), ranks_,
               config.expert_tensor_parallel ? TensorGroup(mesh) : TensorGroup()) {
  Register("gate", gate_);
  Register("experts", experts_);
  if (!config.residual) return;
  residual_ = std::make_unique<Residual>(shape, TensorGroup(mesh));
  Register("mlp.in", residual_->in);
  Register("mlp.out", residual_->out);
  Register("coefficient", residual_->coefficient);
}

MoeLayer::~MoeLayer() = default;

Tensor MoeLayer::Forward(Tape& tape, const Tensor& x, const Tensor& mask,
                         const std::shared_ptr<MoePass>& pass) const {
  const Routed routed = gate_.Forward(tape, x, mask, pass);
  const auto exchange = std::make_shared<const ExpertExchange>(tape, ranks_, routed);
  const Tensor rows = Dispatch(tape, x, routed, exchange);
  Tensor y = CombineRows(tape, experts_.Forward(tape, rows, exchange), routed);
  if (!residual_) return y;
  const Tensor inner = shape_.gated ? Swiglu(tape, residual_->in.Forward(tape, x))
                                    : residual_->in.Forward(tape, x, shape_.activation);
  return Mix(tape, x, residual_->coefficient.weight, y, residual_->out.Forward(tape, inner));
}

}  // namespace strata
