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
                const Tensor x = saved_x.Get();
                LinearBackward(tape, dlogits.view(), x.view(), *coefficient, nullptr,
                               bp.Needs(0) ? bp.Din(0) : GradTarget());
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
  ParallelMlp mlp;
  Coefficient coefficient;
};

MoeLayer::MoeLayer(const MoeConfig& config, const MlpShape& shape, int64_t layer, const ProcessMesh* mesh)
    : ranks_(mesh, config.drop_duplicates),
      gate_(config, layer, shape.hidden_size, shape.init_in),
      experts_(shape, config.NumExperts(layer), ranks_,
               config.expert_tensor_parallel ? TensorGroup(mesh) : TensorGroup()) {
  Register("gate", gate_);
  Register("experts", experts_);
  if (!config.residual) return;
  residual_.reset(
      new Residual{ParallelMlp(TensorGroup(mesh), shape), Coefficient(shape.hidden_size, shape.init_in)});
  Register("mlp", residual_->mlp);
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
  return Mix(tape, x, residual_->coefficient.weight, y, residual_->mlp.Forward(tape, x));
}

}  // namespace strata
