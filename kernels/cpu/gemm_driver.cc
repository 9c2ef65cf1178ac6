#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "kernels/cpu/gemm.h"
#include "runtime/base/error.h"

namespace strata {
namespace {

// Words along k that the micro-kernel sums in registers at a time. It decides the bits of the result, so it
// is the same on every machine. Long, so that loading and storing the sums costs nothing beside it; shorter
// than what makes the panels of a pass outgrow the second cache.
constexpr int64_t kPassWords = 768;
// Words of the shared operand that are packed at a time.
constexpr int64_t kSharedWords = int64_t{4} << 20;
// Vectors in a tile, at most: enough that the shared panels, which come from the third cache or memory, are
// used often; and tiles for each thread, at least: enough that threads finish together.
constexpr int64_t kTile = 128;
constexpr int64_t kTilesPerThread = 4;
// Steps of the micro-kernel for each line of the next tile that is asked for: an even flow that leaves memory
// to others.
constexpr int64_t kWordsPerLine = 8;
// Rows up to which b is read where it lies: it is used so little that packing it would be much of the work.
constexpr int64_t kFewRows = 16;
// Multiplications below which waking other threads takes longer than working alone.
constexpr int64_t kWorthThreads = int64_t{1} << 18;

constexpr int64_t DivideUp(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t RoundUp(int64_t a, int64_t b) { return DivideUp(a, b) * b; }

// The length, a multiple of `unit`, of the pieces when n is cut into the fewest equal ones of about `limit`
// at most.
int64_t EqualPieces(int64_t n, int64_t limit, int64_t unit) {
  const int64_t pieces = std::max<int64_t>(1, DivideUp(n, std::max(limit, unit)));
  return std::max(unit, RoundUp(DivideUp(n, pieces), unit));
}

GemmRange Cut(int64_t begin, int64_t length, int64_t end) { return {begin, std::min(begin + length, end)}; }

int64_t SecondCacheBytes() {
  const long bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
  return bytes > 0 ? bytes : 512 << 10;
}

// A piece of packing: vectors, and elements of each. Where vectors lie side by side it is wide, so as to read
// long runs.
struct PackPiece {
  int64_t vectors, elements;
  PackPiece(const GemmOperand& x, int width, const GemmBlocking& blocking, int elements_per_word)
      : vectors(x.k_contiguous ? 2 * width : RoundUp(256, width)),
        elements(x.k_contiguous ? blocking.k_pass : 128 * elements_per_word) {}
};

// Calls body(thread, piece) for every piece, on the threads of `pool` (null: here).
template <typename Body>
void ForEachPiece(ThreadPool* pool, int64_t pieces, const Body& body) {
  if (pool == nullptr || pieces <= 1) {
    for (int64_t piece = 0; piece < pieces; ++piece) body(0, piece);
    return;
  }
  std::atomic<int64_t> next{0};
  pool->Run([&](int thread) {
    for (int64_t piece; (piece = next.fetch_add(1, std::memory_order_relaxed)) < pieces;) body(thread, piece);
  });
}

}  // namespace

GemmProblem::GemmProblem(const MatmulArgs& matmul) : args(matmul) {
  for (const TensorView* view : {&args.a, &args.b, &args.c}) {
    STRATA_CHECK(view->shape.rank() == 2 && IsFloating(view->dtype))
        << "matmul of " << Name(view->dtype) << " " << view->shape.ToString();
  }
  m = args.c.shape[0];
  n = args.c.shape[1];
  k = args.a.shape[args.trans_a ? 0 : 1];
  a = {args.a.data, args.a.dtype, m, args.a.shape[1], !args.trans_a};
  b = {args.b.data, args.b.dtype, n, args.b.shape[1], args.trans_b};
  STRATA_CHECK(args.a.shape == (args.trans_a ? Shape{k, m} : Shape{m, k}) &&
               args.b.shape == (args.trans_b ? Shape{n, k} : Shape{k, n}))
      << "matmul of " << args.a.shape.ToString() << (args.trans_a ? "ᵀ" : "") << " and "
      << args.b.shape.ToString() << (args.trans_b ? "ᵀ" : "") << " into " << args.c.shape.ToString();
  STRATA_CHECK(!args.bias.defined() || args.bias.num_elements() == n)
      << "bias " << args.bias.shape.ToString() << " of a product " << args.c.shape.ToString();
  for (const TensorView* view : {&args.pre_activation, &args.residual}) {
    STRATA_CHECK(!view->defined() || (view->dtype == args.c.dtype && view->num_elements() == m * n))
        << Name(view->dtype) << " " << view->shape.ToString() << " beside a product " << Name(args.c.dtype)
        << " " << args.c.shape.ToString();
  }
  STRATA_CHECK(!args.activation_grad || args.pre_activation.defined())
      << "activation_grad without pre_activation";
}

GemmBlocking::GemmBlocking(const GemmProblem& problem, const GemmKernels& kernels, int num_threads) {
  share_a = problem.m <= problem.n;
  shared_width = share_a ? kernels.mr : kernels.nr;
  streamed_width = share_a ? kernels.nr : kernels.mr;
  const int64_t shared = std::min(problem.m, problem.n), streamed = std::max(problem.m, problem.n);
  const int64_t streamed_panels = DivideUp(streamed, streamed_width);
  // A part of the cache for a tile: the source of the next, and shared panels, pass through it too.
  const int64_t tile_words = SecondCacheBytes() * 3 / 8 / static_cast<int64_t>(sizeof(float));
  const int unit = kernels.elements_per_word;

  k_pass = EqualPieces(problem.k, kPassWords * unit, unit);
  k_block = EqualPieces(problem.k, tile_words / kTile * unit, k_pass);
  const int64_t words = k_block / unit;
  shared_block = EqualPieces(shared, kSharedWords / words, shared_width);
  const int64_t tile_panels = std::max<int64_t>(1, std::min(kTile, tile_words / words) / streamed_width);
  const int64_t wanted = std::max(DivideUp(streamed_panels, tile_panels), kTilesPerThread * num_threads);
  num_tiles = std::min(streamed_panels, RoundUp(wanted, num_threads));
  tile = DivideUp(streamed_panels, num_tiles) * streamed_width;

  constexpr int64_t kLine = 16;
  shared_memory = RoundUp(shared_block * words, kLine);
  sums_memory = problem.k <= k_block ? 0 : RoundUp(shared_block * streamed_panels * streamed_width, kLine);
  thread_memory = RoundUp(tile * (words + shared_width), kLine);
}

GemmBlock::GemmBlock(const GemmProblem& problem, const GemmKernels& kernels, const GemmBlocking& blocking,
                     GemmRange shared, GemmRange k, float* shared_memory, float* sums_memory)
    : problem_(problem),
      kernels_(kernels),
      blocking_(blocking),
      shared_operand_(blocking.share_a ? problem.a : problem.b),
      streamed_operand_(blocking.share_a ? problem.b : problem.a),
      shared_(shared),
      k_(k),
      shared_memory_(shared_memory),
      sums_memory_(sums_memory) {}

int64_t GemmBlock::Words(int64_t elements) const { return DivideUp(elements, kernels_.elements_per_word); }

int64_t GemmBlock::num_pack_pieces() const {
  const PackPiece piece(shared_operand_, blocking_.shared_width, blocking_, kernels_.elements_per_word);
  return DivideUp(shared_.size(), piece.vectors) * DivideUp(k_.size(), piece.elements);
}

void GemmBlock::Pack(int64_t index) const {
  const PackPiece piece(shared_operand_, blocking_.shared_width, blocking_, kernels_.elements_per_word);
  const int64_t pieces_of_k = DivideUp(k_.size(), piece.elements);
  const GemmRange vectors =
      Cut(shared_.begin + index / pieces_of_k * piece.vectors, piece.vectors, shared_.end);
  const GemmRange k = Cut(k_.begin + index % pieces_of_k * piece.elements, piece.elements, k_.end);
  const int64_t words = Words(k_.size());
  float* const panels = shared_memory_ + (vectors.begin - shared_.begin) * words +
                        Words(k.begin - k_.begin) * blocking_.shared_width;
  kernels_.pack(shared_operand_, blocking_.shared_width, vectors.begin, vectors.end, k.begin, k.end, panels,
                words * blocking_.shared_width);
}

GemmRange GemmBlock::Tile(int64_t tile) const {
  const int64_t panels = DivideUp(streamed_operand_.extent, blocking_.streamed_width);
  const auto begin = [&](int64_t t) {
    return std::min(t * panels / blocking_.num_tiles * blocking_.streamed_width, streamed_operand_.extent);
  };
  return {begin(tile), begin(tile + 1)};
}

// What packing the tile will read.
LineWalk GemmBlock::SourceOfTile(int64_t tile) const {
  if (tile >= blocking_.num_tiles) return {};
  const GemmRange vectors = Tile(tile);
  const GemmOperand& x = streamed_operand_;
  const int64_t element = SizeOf(x.dtype);
  const GemmRange &outer = x.k_contiguous ? vectors : k_, &inner = x.k_contiguous ? k_ : vectors;
  LineWalk walk;
  walk.at = static_cast<const char*>(x.data) + (outer.begin * x.stride + inner.begin) * element;
  walk.run = inner.size() * element;
  walk.run_end = walk.at + walk.run;
  walk.stride = x.stride * element;
  walk.lines = outer.size() * DivideUp(walk.run, 64);
  return walk;
}

void GemmBlock::Multiply(int64_t tile, int64_t upcoming, float* thread_memory) const {
  const GemmRange streamed = Tile(tile);
  const int64_t words = Words(k_.size());
  kernels_.pack(streamed_operand_, blocking_.streamed_width, streamed.begin, streamed.end, k_.begin, k_.end,
                thread_memory, words * blocking_.streamed_width);
  float* const tile_sums = thread_memory + blocking_.tile * words;

  // What packing the next tile will read is asked for late, or the shared panels that stream by would push it
  // out of the cache again; but at an even rate, which leaves room for the loads of the product.
  LineWalk source = SourceOfTile(upcoming);
  const int64_t lines = std::max<int64_t>(1, Words(blocking_.k_pass) / (kWordsPerLine * kernels_.mr));
  const int64_t micro_tiles = DivideUp(streamed.size(), blocking_.streamed_width) *
                              std::max<int64_t>(1, DivideUp(k_.size(), blocking_.k_pass));
  const int64_t late = DivideUp(source.lines, lines * kernels_.mr * micro_tiles);
  GemmPrefetch prefetch;
  prefetch.source = &source;
  const int64_t panels = DivideUp(shared_.size(), blocking_.shared_width);
  for (int64_t p = 0; p < panels; ++p) {
    prefetch.source_lines = panels - p <= late ? lines : 0;
    MultiplyPanel(shared_.begin + p * blocking_.shared_width, streamed, thread_memory, tile_sums, prefetch);
  }
}

// One panel of the shared operand by all of the tile. The panel after it is fetched meanwhile, a share of it
// by each micro-tile.
void GemmBlock::MultiplyPanel(int64_t shared, GemmRange streamed, const float* streamed_panels,
                              float* tile_sums, GemmPrefetch prefetch) const {
  const int shared_width = blocking_.shared_width, streamed_width = blocking_.streamed_width;
  const int64_t words = Words(k_.size());
  const int64_t micro_tile = kernels_.mr * kernels_.nr;
  const int64_t panels = DivideUp(streamed.size(), streamed_width);
  const float* const shared_panel = shared_memory_ + (shared - shared_.begin) * words;
  prefetch.panel = reinterpret_cast<const char*>(shared_panel + words * shared_width);
  prefetch.panel_step = DivideUp(shared_width * sizeof(float), panels);
  float* sums = tile_sums;
  if (sums_memory_ != nullptr) {
    const int64_t all_panels = DivideUp(streamed_operand_.extent, streamed_width);
    sums =
        sums_memory_ +
        ((shared - shared_.begin) / shared_width * all_panels + streamed.begin / streamed_width) * micro_tile;
  }

  int64_t l = k_.begin;
  do {
    const GemmRange k = Cut(l, blocking_.k_pass, k_.end);
    const int64_t word = Words(k.begin - k_.begin);
    const float* const shared_words = shared_panel + word * shared_width;
    for (int64_t p = 0; p < panels; ++p) {
      const int64_t vector = streamed.begin + p * streamed_width;
      const float* const streamed_words = streamed_panels + (p * words + word) * streamed_width;
      if (blocking_.share_a) {
        MultiplyMicroTile(shared, vector, k, shared_words, streamed_words, sums + p * micro_tile, prefetch);
      } else {
        MultiplyMicroTile(vector, shared, k, streamed_words, shared_words, sums + p * micro_tile, prefetch);
      }
      prefetch.panel += Words(k.size()) * prefetch.panel_step;
    }
    l = k.end;
  } while (l < k_.end);
}

void GemmBlock::MultiplyMicroTile(int64_t row, int64_t col, GemmRange k, const float* a, const float* b,
                                  float* sums, GemmPrefetch prefetch) const {
  const int rows = static_cast<int>(std::min<int64_t>(kernels_.mr, problem_.m - row));
  const int cols = static_cast<int>(std::min<int64_t>(kernels_.nr, problem_.n - col));
  const bool last = k.end == problem_.k;
  const int64_t element = SizeOf(problem_.args.c.dtype);
  prefetch.c = static_cast<const char*>(problem_.args.c.data) + (row * problem_.n + col) * element;
  prefetch.c_stride = last ? problem_.n * element : 0;
  kernels_.multiply(rows, cols, Words(k.size()), a, b, k.begin != 0, sums, prefetch);
  if (last) kernels_.finish(problem_, row, col, rows, cols, sums);
}

namespace {

// A product of few rows: op(b) streams by once.
void MultiplyFewRows(const KernelContext& context, ThreadPool* pool, const GemmProblem& problem,
                     const GemmKernels& kernels) {
  const Buffer rows = context.scratch->Allocate(std::max<int64_t>(1, problem.m * problem.k) * sizeof(float),
                                                MemoryTag::kBuffers);
  float* const a = static_cast<float*>(rows.data());
  kernels.widen_rows(problem, a);
  ForEachPiece(pool, DivideUp(problem.n, kernels.nr), [&](int, int64_t piece) {
    constexpr int kMaxNr = 32;
    alignas(64) float sums[kFewRows * kMaxNr];
    const int64_t col = piece * kernels.nr;
    const int cols = static_cast<int>(std::min<int64_t>(kernels.nr, problem.n - col));
    kernels.dot_rows(problem, a, col, cols, sums);
    kernels.finish(problem, 0, col, static_cast<int>(problem.m), cols, sums);
  });
}

}  // namespace

void RunGemm(const KernelContext& context, const MatmulArgs& args, const GemmKernels& kernels) {
  const GemmProblem problem(args);
  if (problem.m == 0 || problem.n == 0) return;
  ThreadPool* const pool = problem.m * problem.n * problem.k < kWorthThreads ? nullptr : context.pool;
  if (problem.m <= kFewRows && problem.a.k_contiguous && problem.b.k_contiguous) {
    MultiplyFewRows(context, pool, problem, kernels);
    return;
  }

  const int num_threads = pool == nullptr ? 1 : pool->num_threads();
  const GemmBlocking blocking(problem, kernels, num_threads);
  const int64_t floats = blocking.shared_memory + blocking.sums_memory + blocking.thread_memory * num_threads;
  const Buffer buffer = context.scratch->Allocate(floats * sizeof(float), MemoryTag::kBuffers);
  float* const shared = static_cast<float*>(buffer.data());
  float* const sums = blocking.sums_memory == 0 ? nullptr : shared + blocking.shared_memory;
  float* const threads = shared + blocking.shared_memory + blocking.sums_memory;

  const int64_t extent = std::min(problem.m, problem.n);
  for (int64_t i = 0; i < extent; i += blocking.shared_block) {
    int64_t l = 0;
    do {
      const GemmRange k = Cut(l, blocking.k_block, problem.k);
      const GemmBlock block(problem, kernels, blocking, Cut(i, blocking.shared_block, extent), k, shared,
                            sums);
      ForEachPiece(pool, block.num_pack_pieces(), [&](int, int64_t piece) { block.Pack(piece); });
      ForEachPiece(pool, block.num_tiles(), [&](int thread, int64_t tile) {
        block.Multiply(tile, tile + num_threads, threads + thread * blocking.thread_memory);
      });
      l = k.end;
    } while (l < problem.k);
  }
}

}  // namespace strata
