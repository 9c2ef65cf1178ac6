// Matrix products: large ones to the library, where it is there, else to the kernels of gemm.h, which say
// what bounds them.
#include "kernels/cuda/cublas.h"
#include "kernels/cuda/gemm.h"
#include "kernels/cuda/kernels.h"

namespace strata::cuda {
namespace {

// From here on the library is worth its few microseconds.
constexpr int64_t kLargeProduct = int64_t{1} << 22;

Product ProductOf(const MatmulArgs& args) {
  const int64_t m = args.c.shape[0], n = args.c.shape[1], k = args.a.shape[args.trans_a ? 0 : 1];
  Product product{.m = m, .n = n, .k = k};
  product.a = {
      .data = args.a.data, .type = args.a.dtype, .along_k = !args.trans_a, .pitch = args.trans_a ? m : k};
  product.b = {
      .data = args.b.data, .type = args.b.dtype, .along_k = args.trans_b, .pitch = args.trans_b ? k : n};
  product.epilogue = {.c = args.c.data,
                      .bias = args.bias.data,
                      .pre_activation = args.pre_activation.data,
                      .residual = args.residual.data,
                      .n = n,
                      .alpha = args.alpha,
                      .type = args.c.dtype,
                      .bias_type = args.bias.dtype,
                      .activation = args.activation,
                      .activation_grad = args.activation_grad,
                      .accumulate = args.accumulate};
  return product;
}

// The matrix from `elements` of it on; null stays null.
template <typename V>
V* Skip(V* matrix, int64_t elements, DType type) {
  using Byte = std::conditional_t<std::is_const_v<V>, const char, char>;
  return matrix == nullptr ? matrix
                           : static_cast<Byte*>(matrix) + elements * static_cast<int64_t>(SizeOf(type));
}

// The product without its first rows.
void DropRows(Product& product, int64_t rows) {
  Operand& a = product.a;
  Epilogue& epilogue = product.epilogue;
  a.data = Skip(a.data, rows * (a.along_k ? a.pitch : 1), a.type);
  epilogue.c = Skip(epilogue.c, rows * product.n, epilogue.type);
  epilogue.pre_activation = Skip(epilogue.pre_activation, rows * product.n, epilogue.type);
  epilogue.residual = Skip(epilogue.residual, rows * product.n, epilogue.type);
  product.m -= rows;
}

// act(z) from the library's z, which is what activation_forward makes of z. Says whether the library made z.
bool ThroughPreActivation(Queue& queue, const MatmulArgs& args, const Product& product) {
  if (args.activation_grad || args.accumulate || args.residual.defined()) return false;
  const TensorView& z = args.pre_activation.defined() ? args.pre_activation : args.c;
  Product plain = product;
  plain.epilogue.c = z.data;
  plain.epilogue.pre_activation = nullptr;
  plain.epilogue.activation = Activation::kNone;
  if (!RunLibrary(queue, plain)) return false;
  activation_forward(queue.context(), {args.activation, z, args.c});
  return true;
}

// Any epilogue of ours, on the library's sums in fp32: some rows at a time, so that the L2 cache holds the
// sums. Takes the rows that it made from the product.
void ThroughSums(Queue& queue, Product& product) {
  constexpr int64_t kBytes = int64_t{16} << 20, kRows = 256;
  const int64_t row_bytes = product.n * static_cast<int64_t>(sizeof(float));
  const int64_t chunk = std::min(product.m, std::max(kRows, kBytes / row_bytes / kRows * kRows));
  float* const sums = queue.Scratch<float>(chunk * product.n);
  while (product.m > 0) {
    Product part = product;
    part.m = std::min(chunk, product.m);
    part.epilogue = {.c = sums, .n = product.n};
    if (!RunLibrary(queue, part)) return;
    FinishParts(queue, product.epilogue, sums, 1, part.m);
    DropRows(product, part.m);
  }
}

}  // namespace

void matmul(const KernelContext& context, const MatmulArgs& args) {
  Queue queue(context, "matmul", {args.a, args.b, args.c});
  Product product = ProductOf(args);
  if (HasLibrary() && product.m * product.n * product.k >= kLargeProduct) {
    if (RunLibrary(queue, product) || ThroughPreActivation(queue, args, product)) return;
    ThroughSums(queue, product);
  }
  RunProduct(queue, product);
}

}  // namespace strata::cuda
