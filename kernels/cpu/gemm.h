// The matrix product on the CPU, cut in two: blocking and threads, the same for every instruction set
// (gemm_driver.cc), call what must be fast on each, that is packing, micro-kernel and epilogue (gemm.cc),
// through the functions of GemmKernels.
//
// The method is that of Goto and van de Geijn ("Anatomy of High-Performance Matrix Multiplication", 2008) as
// BLIS arranges it (Van Zee and van de Geijn, 2015):
// - Operands are copied into panels: `mr` rows of op(a), or `nr` columns of op(b), side by side, step after
// step along
//   k. That copy does all transposing and converting of types.
// - The micro-kernel multiplies a panel of a by a panel of b and keeps the mr × nr sums in registers.
// - Blocks are sized so that a panel that is used again is found in a cache.
// A word is what a panel holds for one vector and step: a float, or two neighbours along k as bf16.
//
// Every element of c is summed in the order of k, in passes whose length depends on k alone, by one thread at
// a time: its bits depend on neither the number of threads nor the sizes of caches.
//
// Ownership: views only. Threading: the functions of GemmKernels are pure; threads share a GemmBlock, each
// working on pieces of its own.
#pragma once

#include <cstdint>

#include "kernels/ops.h"

namespace strata {

/// op(a) or op(b) as the product sees it: `extent` vectors along k (rows of op(a), columns of op(b)).
/// Element l of vector i is data[i · stride + l] when `k_contiguous`, data[l · stride + i] otherwise.
struct GemmOperand {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t extent = 0;
  int64_t stride = 0;
  bool k_contiguous = true;
};

/// A product with its shapes resolved; `args` has c and the epilogue.
struct GemmProblem {
  int64_t m = 0, n = 0, k = 0;
  GemmOperand a, b;
  MatmulArgs args;

  /// Aborts when the shapes or types of `matmul` contradict each other.
  explicit GemmProblem(const MatmulArgs& matmul);
};

/// A walk over the cache lines of a region: runs of `run` bytes that begin `stride` bytes after each other.
struct LineWalk {
  const char* at = nullptr;       // the next line
  const char* run_end = nullptr;  // of the run it is in
  int64_t run = 0, stride = 0;
  int64_t lines = 0;  // left
};

/// Memory that the micro-kernel asks for while it multiplies, because it will be wanted soon.
struct GemmPrefetch {
  const char* c = nullptr;  // two lines for each row, `c_stride` bytes apart, to the first cache
  int64_t c_stride = 0;
  const char* panel = nullptr;  // to the second cache, `panel_step` bytes for each word
  int64_t panel_step = 0;
  LineWalk* source = nullptr;  // to the second cache, `source_lines` for each row
  int64_t source_lines = 0;
};

/// Rows, at most, of a product that multiply_direct takes, columns that it takes at a time, and floats that
/// it works in.
inline constexpr int64_t kDirectRows = 128, kDirectCols = 256, kDirectMemory = kDirectRows * kDirectCols;

/// What gemm.cc gives for one instruction set and one kind of word.
struct GemmKernels {
  int mr, nr;
  int elements_per_word;

  /// Copies vectors [first, last) of `x`, elements [k_begin, k_end), into panels of `width` vectors that
  /// begin `panel_stride` words after each other. What a last panel has beyond `last` is of no account, but
  /// finite where the operand is; what a last word has beyond `k_end` is zero.
  void (*pack)(const GemmOperand& x, int width, int64_t first, int64_t last, int64_t k_begin, int64_t k_end,
               float* panels, int64_t panel_stride);

  /// sums[i · nr + j] (+)= Σ_w a[w · mr + i] · b[w · nr + j] for i < rows, j < cols; adds when `add`.
  void (*multiply)(int rows, int cols, int64_t words, const float* a, const float* b, bool add, float* sums,
                   const GemmPrefetch& prefetch);

  /// c[row + i, col + j] = epilogue(sums[i · nr + j]) for i < rows, j < cols.
  void (*finish)(const GemmProblem& problem, int64_t row, int64_t col, int rows, int cols, const float* sums);

  /// rows[i · k + l] = op(a)[i, l], a being contiguous along k.
  void (*widen_rows)(const GemmProblem& problem, float* rows);
  /// sums[i · nr + j] = Σ_l rows[i · k + l] · op(b)[l, col + j] for i < m, j < cols, b being contiguous along
  /// k.
  void (*dot_rows)(const GemmProblem& problem, const float* rows, int64_t col, int cols, float* sums);
  /// `finish` without an epilogue, c being fp32, past the caches.
  void (*stream)(const GemmProblem& problem, int64_t row, int64_t col, int rows, int cols, const float* sums);
  /// c[:, col … col + cols) of a product of few rows, of which b, fp32, is read where it lies: it is used so
  /// little that packing it would be much of the work. `a` is packed, `nr` wide, all of k. `next` is where
  /// the columns begin that will probably be wanted next, of a matrix like b, or null. Null where words are
  /// not floats.
  void (*multiply_direct)(const GemmProblem& problem, const float* a, int64_t col, int cols,
                          const float* next, float* memory);
  /// c[i · stride + j] = Σ_w a[w · mr + i] · b[w · nr + j] for i < rows, j < cols, past the caches.
  void (*multiply_stream)(int rows, int cols, int64_t words, const float* a, const float* b, float* c,
                          int64_t stride);
};

struct GemmRange {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
};

/// How a product is cut. One operand, that of fewer vectors, is shared: a block of it is packed by all
/// threads together. The other is streamed: a thread packs a tile of it for itself, when it wants it, and
/// multiplies it by the whole shared block. Of all this `k_pass` alone has a say in the result.
struct GemmBlocking {
  bool share_a;                      // else b is shared
  int shared_width, streamed_width;  // of panels: mr and nr, or nr and mr
  int64_t k_pass;                    // elements that the micro-kernel sums before it adds to what is there
  int64_t k_block;                   // elements that are packed at a time, whole passes
  int64_t shared_block;              // vectors of the shared operand that are packed at a time
  int64_t num_tiles;                 // into which the streamed operand is cut, alike but for a panel
  int64_t tile;                      // vectors of the largest

  // Memory in floats, multiples of a cache line: for the shared panels, for the sums between blocks along k
  // (0 when there is one block), and for each thread.
  int64_t shared_memory, sums_memory, thread_memory;

  GemmBlocking(const GemmProblem& problem, const GemmKernels& kernels, int num_threads);
};

/// Part of a product: a block of the shared operand's vectors and of k, and all of the streamed operand. Work
/// on it comes in two rounds of pieces: all of packing, then all tiles. Pieces of a round may run on any
/// thread, and so may those of several blocks: a grouped product (experts with ragged rows) is a list of
/// blocks that share the rounds.
///
/// When k takes several blocks they run one after another, their sums being kept in between.
class GemmBlock {
 public:
  /// Refers to its arguments.
  GemmBlock(const GemmProblem& problem, const GemmKernels& kernels, const GemmBlocking& blocking,
            GemmRange shared, GemmRange k, float* shared_memory, float* sums_memory);

  int64_t num_pack_pieces() const;
  void Pack(int64_t piece) const;
  int64_t num_tiles() const { return blocking_.num_tiles; }
  /// `upcoming` is the tile that the thread will probably be given next.
  void Multiply(int64_t tile, int64_t upcoming, float* thread_memory) const;

 private:
  int64_t Words(int64_t elements) const;
  GemmRange Tile(int64_t tile) const;
  LineWalk SourceOfTile(int64_t tile) const;
  void MultiplyPanel(int64_t shared, GemmRange streamed, const float* streamed_panels, float* tile_sums,
                     GemmPrefetch prefetch) const;
  void MultiplyMicroTile(int64_t row, int64_t col, GemmRange k, const float* a, const float* b, float* sums,
                         GemmPrefetch prefetch) const;

  const GemmProblem& problem_;
  const GemmKernels& kernels_;
  const GemmBlocking& blocking_;
  const GemmOperand &shared_operand_, &streamed_operand_;
  const GemmRange shared_, k_;
  float* const shared_memory_;
  float* const sums_memory_;
};

/// c of `args` (ops.h), on the threads of `context`.
void RunGemm(const KernelContext& context, const MatmulArgs& args, const GemmKernels& kernels);

}  // namespace strata
