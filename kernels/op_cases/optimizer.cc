#include "kernels/op_cases/rows.h"

namespace strata::op_cases {

OpCase AdamW(int64_t n, std::optional<DType> param_out, bool decoupled, float grad_scale) {
  const std::string name = StrCat(n, param_out ? StrCat(" ", Name(*param_out)) : "",
                                  decoupled ? " decoupled" : " L2", If(grad_scale != 1, "scaled"));
  return {"adamw", name, [=](CaseTensors& tensors) {
            AdamWArgs args;
            args.param = tensors.Updated("param", kF32, {n}, {.floor = 1});
            args.grad = tensors.Random(kF32, {n});
            args.m = tensors.Updated("m", kF32, {n}, {.floor = 0.1}, 0.1);
            args.v = tensors.Updated("v", kF32, {n}, {.floor = 0.1}, 0.01, 0.1);
            if (param_out) args.param_out = tensors.Result("param_out", *param_out, {n}, {.floor = 1});
            args.lr = 0.3f;
            args.weight_decay = 0.1f;
            args.eps = 0.02f;
            args.bias_correction1 = 0.271f;
            args.bias_correction2 = 0.002997f;
            args.grad_scale = grad_scale;
            args.decoupled = decoupled;
            return Bind(&KernelTable::adamw, args);
          }};
}

namespace {

OpCase Sgd(int64_t n, std::optional<DType> param_out, float momentum, float grad_scale) {
  const std::string name = StrCat(n, param_out ? StrCat(" ", Name(*param_out)) : "",
                                  If(momentum != 0, "momentum"), If(grad_scale != 1, "scaled"));
  return {"sgd", name, [=](CaseTensors& tensors) {
            SgdArgs args;
            args.param = tensors.Updated("param", kF32, {n}, {.floor = 1});
            args.grad = tensors.Random(kF32, {n});
            args.momentum = tensors.Updated("momentum", kF32, {n}, {.floor = 1});
            if (param_out) args.param_out = tensors.Result("param_out", *param_out, {n}, {.floor = 1});
            args.lr = 0.3f;
            args.momentum_factor = momentum;
            args.weight_decay = 0.1f;
            args.grad_scale = grad_scale;
            return Bind(&KernelTable::sgd, args);
          }};
}

OpCase Lion(int64_t n, std::optional<DType> param_out, float grad_scale) {
  const std::string name =
      StrCat(n, param_out ? StrCat(" ", Name(*param_out)) : "", If(grad_scale != 1, "scaled"));
  return {"lion", name, [=](CaseTensors& tensors) {
            LionArgs args;
            args.param = tensors.Updated("param", kF32, {n}, {.floor = 1});
            args.grad = tensors.Random(kF32, {n});
            args.m = tensors.Updated("m", kF32, {n}, {.floor = 1});
            if (param_out) args.param_out = tensors.Result("param_out", *param_out, {n}, {.floor = 1});
            args.lr = 0.3f;
            args.weight_decay = 0.1f;
            args.grad_scale = grad_scale;
            return Bind(&KernelTable::lion, args);
          }};
}

// No gradient and no momentum: the sign of 0 is 0, and only decay moves a parameter.
OpCase OptimizerAtRest(const std::string& op, float weight_decay) {
  return {op, StrCat("zero gradient, weight decay ", weight_decay), [=](CaseTensors& tensors) {
            constexpr int64_t kSize = 37;
            const std::vector<double> zeros(kSize);
            const Accuracy accuracy{.terms = weight_decay == 0 ? 0.0 : 1.0};
            const TensorView param = tensors.Updated("param", kF32, {kSize}, accuracy);
            const TensorView grad = tensors.Given(kF32, {kSize}, zeros);
            const TensorView m = tensors.Updated("m", kF32, {kSize}, {}, 0);
            const TensorView v = tensors.Updated("v", kF32, {kSize}, {}, 0);
            if (op == "lion") {
              return Bind(&KernelTable::lion, LionArgs{.param = param,
                                                       .grad = grad,
                                                       .m = m,
                                                       .param_out = {},
                                                       .lr = 0.5f,
                                                       .weight_decay = weight_decay});
            }
            return Bind(&KernelTable::adamw, AdamWArgs{.param = param,
                                                       .grad = grad,
                                                       .m = m,
                                                       .v = v,
                                                       .param_out = {},
                                                       .lr = 0.5f,
                                                       .weight_decay = weight_decay});
          }};
}

}  // namespace

void AddOptimizers(std::vector<OpCase>& cases) {
  for (int64_t n : {0, 1, 13, 257, 70001}) {
    for (std::optional<DType> out : {std::optional<DType>(), {kBF16}, {kF16}}) {
      for (float grad_scale : {1.0f, 0.37f}) {
        cases.push_back(AdamW(n, out, true, grad_scale));
        cases.push_back(AdamW(n, out, false, grad_scale));
        cases.push_back(Sgd(n, out, 0, grad_scale));
        cases.push_back(Sgd(n, out, 0.9f, grad_scale));
        cases.push_back(Lion(n, out, grad_scale));
      }
    }
  }
  for (float weight_decay : {0.0f, 0.1f}) {
    cases.push_back(OptimizerAtRest("adamw", weight_decay));
    cases.push_back(OptimizerAtRest("lion", weight_decay));
  }
}

}  // namespace strata::op_cases
