// Product: matrix products by this program's own kernels, which matmul and grouped_matmul share.
//
// A product is cut into tiles of c, a block of threads each. Ragged groups are the same tiles, found by a
// search: any number of groups is one launch. Two families of kernels make the sums: tensor cores where both
// operands have the same type of 16 bits (gemm_mma.cc), fp32 multiply-adds for everything else (gemm_fma.cc).
// One epilogue (gemm_epilogue.h) ends both.
//
// Ownership: pointers are to the device's memory, of arguments and of scratch. Threading: the rank's thread.
#pragma once

#include "kernels/cuda/queue.h"

namespace strata::cuda {

/// What becomes of a sum: MatmulArgs in ops.h. All matrices have rows of `n` elements, of type `type`.
struct Epilogue {
  void* c = nullptr;
  const void* bias = nullptr;  // of `bias_type`; the rest is null where not given
  void* pre_activation = nullptr;
  const void* residual = nullptr;
  int64_t n = 0;
  float alpha = 1.0f;
  DType type = DType::kF32, bias_type = DType::kF32;
  Activation activation = Activation::kNone;
  bool activation_grad = false, accumulate = false;
  bool packs = false;  // whether 16 bytes of a row can be loaded and stored as one
};

/// An operand as [x, k], x counting rows of a or columns of b: element (x, k) is data[x·pitch + k] if its
/// memory runs along k, else data[k·pitch + x].
struct Operand {
  const void* data = nullptr;
  DType type = DType::kF32;
  bool along_k = false;
  int64_t pitch = 0;
  int64_t group_stride = 0;  // elements from a group's matrix to the next one's
};

enum class Ragged : uint8_t {
  kNone,
  kRows,   // offsets cut the rows of a and c; each group has a matrix b and a row of bias
  kTerms,  // offsets cut k; each group has a matrix c. Neither operand lies along k
};

struct Product {
  Operand a{}, b{};
  Epilogue epilogue{};
  int64_t m = 0, n = 0, k = 0;

  Ragged ragged = Ragged::kNone;
  int groups = 1;
  const int32_t* offsets = nullptr;  // [groups + 1], on the device, if ragged
  const int32_t* first_tile =
      nullptr;  // [groups + 1], on the device, if kRows: the first row of tiles of each

  // Filled by RunProduct.
  int64_t tile_rows = 0;    // rows of tiles, of all groups together if kRows
  int64_t split_terms = 0;  // terms of a block: k, or a part of it; parts are blockIdx.y
};

/// c = epilogue(a · b) on the queue's stream. `offsets` are in host memory and needed if ragged.
void RunProduct(Queue& queue, Product product, const int32_t* offsets = nullptr);

/// c = epilogue(Σ parts), the parts [parts, m, n] being summed in their order.
void FinishParts(const Queue& queue, Epilogue epilogue, const float* sums, int64_t parts, int64_t m);

/// `epilogue.packs` as the pointers and `n` allow it.
void ChoosePacks(Epilogue& epilogue);

namespace internal {

/// Both families have square tiles of these two sizes, the large one where a block can have 80 KiB of shared
/// memory.
inline constexpr int kLargeTile = 128, kSmallTile = 64;
inline constexpr bool kHasLargeTile = simt::kMostSharedBytes >= 80 * 1024;

/// Start the kernel of each family: `tiles` blocks, as many for each of `parts`.
void RunMma(const Queue& queue, const Product& product, int tile, int64_t tiles, int64_t parts);
void RunFma(const Queue& queue, const Product& product, int tile, int64_t tiles, int64_t parts);

}  // namespace internal

}  // namespace strata::cuda
