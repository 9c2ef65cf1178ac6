// Products of ragged groups, by the kernels of gemm.h, which say what bounds them: one launch, whatever the
// number of groups. A group's last tile of rows may be short: with r rows a group, tiles of t do r / (t·⌈r /
// t⌉) of the work of an even product.
#include "kernels/cuda/gemm.h"
#include "kernels/cuda/kernels.h"

namespace strata::cuda {

void grouped_matmul(const KernelContext& context, const GroupedMatmulArgs& args) {
  using Kind = GroupedMatmulArgs::Kind;
  Queue queue(context, "grouped_matmul", {args.a, args.b, args.c});
  const bool weight = args.kind == Kind::kWeight, forward = args.kind == Kind::kForward;
  const TensorView& stack = weight ? args.c : args.b;  // [G, N, K]
  const int64_t stack_n = stack.shape[1], stack_k = stack.shape[2], rows = args.a.shape[0];

  Product product;
  product.ragged = weight ? Ragged::kTerms : Ragged::kRows;
  product.groups = static_cast<int>(stack.shape[0]);
  product.m = weight ? stack_n : rows;
  product.n = forward ? stack_n : stack_k;
  product.k = weight ? rows : forward ? stack_k : stack_n;
  product.a = {.data = args.a.data, .type = args.a.dtype, .along_k = !weight, .pitch = args.a.shape[1]};
  product.b = {.data = args.b.data,
               .type = args.b.dtype,
               .along_k = forward,
               .pitch = stack_k,
               .group_stride = weight ? 0 : stack_n * stack_k};
  product.epilogue = {.c = args.c.data,
                      .bias = args.bias.data,
                      .pre_activation = args.pre_activation.data,
                      .n = product.n,
                      .type = args.c.dtype,
                      .bias_type = args.bias.dtype,
                      .activation = args.activation,
                      .activation_grad = args.activation_grad,
                      .accumulate = args.accumulate};
  RunProduct(queue, product, args.offsets.as<int32_t>());
}

}  // namespace strata::cuda
