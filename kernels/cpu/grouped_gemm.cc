#include "kernels/cpu/grouped_gemm.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "runtime/base/error.h"

namespace strata {
namespace {

using Kind = GroupedMatmulArgs::Kind;

// Floats of packed operands and sums that groups of one batch hold together.
constexpr int64_t kBatchFloats = int64_t{4} << 20;
// Floats of weight gradients from which on they are written past the caches: they are next read when the step
// is over.
constexpr int64_t kStreamFloats = int64_t{4} << 20;
// Steps along k up to which a product is mostly the writing of its result.
constexpr int64_t kOuterSteps = 128;
// Panels of rows in a tile of such a product, and panels in a piece of packing.
constexpr int kOuterPanels = 4;
constexpr int64_t kPackVectors = 2;
// Multiplications below which waking other threads takes longer than working alone.
constexpr int64_t kWorthThreads = int64_t{1} << 18;

// The product of group g.
MatmulArgs Product(const GroupedMatmulArgs& args, int64_t g) {
  const int32_t* offsets = args.offsets.as<int32_t>();
  const int64_t begin = offsets[g], rows = offsets[g + 1] - begin;
  const TensorView& stack = args.kind == Kind::kWeight ? args.c : args.b;
  const int64_t n = stack.shape[1], k = stack.shape[2];
  const TensorView matrix = stack.Slice(g * n * k, n * k).Reshaped({n, k});
  MatmulArgs product;
  product.a = args.a.Rows(begin, rows);
  product.accumulate = args.accumulate;
  if (args.kind == Kind::kWeight) {
    product.b = args.b.Rows(begin, rows);
    product.c = matrix;
    product.trans_a = true;
    return product;
  }
  product.b = matrix;
  product.c = args.c.Rows(begin, rows);
  product.trans_b = args.kind == Kind::kForward;
  if (args.bias.defined()) product.bias = args.bias.Slice(g * product.c.cols(), product.c.cols());
  product.activation = args.activation;
  product.activation_grad = args.activation_grad;
  if (args.pre_activation.defined()) product.pre_activation = args.pre_activation.Rows(begin, rows);
  return product;
}

int64_t Pieces(int64_t n, int64_t length) { return (n + length - 1) / length; }
GemmRange Cut(int64_t begin, int64_t length, int64_t end) { return {begin, std::min(begin + length, end)}; }

// A group: its steps, each a round of packing and a round of tiles.
class Group {
 public:
  Group(const MatmulArgs& product, const GemmKernels& kernels)
      : problem_(product),
        streams_(kernels.finish == kernels.stream),
        kernels_(&kernels),
        blocking_(problem_, kernels, 1),
        way_(BestWay(problem_, kernels)) {
    steps_of_k_ = std::max<int64_t>(1, Pieces(problem_.k, blocking_.k_block));
    steps_ = way_ != Way::kBlocks
                 ? 1
                 : Pieces(std::min(problem_.m, problem_.n), blocking_.shared_block) * steps_of_k_;
  }

  bool empty() const { return problem_.m == 0 || problem_.n == 0; }
  int64_t work() const { return problem_.m * problem_.n * problem_.k; }
  int64_t steps() const { return steps_; }
  /// Floats that a batch holds for it, and that a thread works in.
  int64_t memory() const {
    if (way_ == Way::kBlocks) return blocking_.shared_memory + blocking_.sums_memory;
    return PackedRows().floats + (way_ == Way::kOuter ? PackedColumns().floats : 0);
  }
  int64_t thread_memory() const {
    if (way_ == Way::kBlocks) return blocking_.thread_memory;
    return way_ == Way::kDirect ? kDirectMemory : int64_t{kernels_->mr} * kernels_->nr;
  }
  void set_memory(float* memory) { memory_ = memory; }

  int64_t num_pack_pieces(int64_t step) const {
    if (step >= steps_) return 0;
    if (way_ == Way::kBlocks) return Block(step).num_pack_pieces();
    return PackedRows().pieces + (way_ == Way::kOuter ? PackedColumns().pieces : 0);
  }
  void Pack(int64_t step, int64_t piece) const {
    if (way_ == Way::kBlocks) return Block(step).Pack(piece);
    const Packed rows = PackedRows();
    if (piece < rows.pieces) {
      PackPiece(problem_.a, rows, piece, memory_);
    } else {
      PackPiece(problem_.b, PackedColumns(), piece - rows.pieces, memory_ + rows.floats);
    }
  }

  int64_t num_tiles(int64_t step) const {
    if (step >= steps_) return 0;
    if (way_ == Way::kBlocks) return blocking_.num_tiles;
    return way_ == Way::kDirect ? Pieces(problem_.n, DirectCols()) : Pieces(problem_.m, OuterRows());
  }
  /// `upcoming` as in GemmBlock; `next`: Columns() of the tile that the thread will probably be given next.
  void Multiply(int64_t step, int64_t tile, int64_t upcoming, const float* next, float* thread_memory) const {
    if (way_ == Way::kBlocks) return Block(step).Multiply(tile, upcoming, thread_memory);
    if (way_ == Way::kOuter) return MultiplyOuter(tile, thread_memory);
    const GemmRange cols = Cut(tile * DirectCols(), DirectCols(), problem_.n);
    kernels_->multiply_direct(problem_, memory_, cols.begin, static_cast<int>(cols.size()), next,
                              thread_memory);
  }
  /// Where a tile begins to read b in place; null where it does not.
  const float* Columns(int64_t tile) const {
    if (way_ != Way::kDirect) return nullptr;
    return static_cast<const float*>(problem_.b.data) +
           tile * DirectCols() * (problem_.b.k_contiguous ? problem_.b.stride : 1);
  }

 private:
  enum class Way {
    kBlocks,  // as a product alone
    kDirect,  // few rows: the weights are read where they lie
    kOuter,   // few steps along k: the result is written, in the order of memory, as fast as it can be
  };
  // The panels of a whole operand.
  struct Packed {
    int width;
    int64_t words, pieces, floats;
  };

  static Way BestWay(const GemmProblem& problem, const GemmKernels& kernels) {
    const bool direct = problem.m <= kDirectRows && problem.k > 0 && problem.a.k_contiguous &&
                        problem.b.dtype == DType::kF32 && kernels.multiply_direct != nullptr &&
                        (problem.b.k_contiguous || problem.n % 16 == 0);
    const bool outer = problem.k <= kOuterSteps && problem.k < std::min(problem.m, problem.n);
    return direct ? Way::kDirect : outer ? Way::kOuter : Way::kBlocks;
  }

  Packed Panels(const GemmOperand& x, int width) const {
    const int64_t words = Pieces(problem_.k, kernels_->elements_per_word), panels = Pieces(x.extent, width);
    constexpr int64_t kLine = 16;
    return {width, words, Pieces(x.extent, kPackVectors * width),
            Pieces(panels * width * words, kLine) * kLine};
  }
  Packed PackedRows() const { return Panels(problem_.a, way_ == Way::kDirect ? kernels_->nr : kernels_->mr); }
  Packed PackedColumns() const { return Panels(problem_.b, kernels_->nr); }
  void PackPiece(const GemmOperand& x, const Packed& packed, int64_t piece, float* panels) const {
    const GemmRange vectors = Cut(piece * kPackVectors * packed.width, kPackVectors * packed.width, x.extent);
    kernels_->pack(x, packed.width, vectors.begin, vectors.end, 0, problem_.k,
                   panels + vectors.begin * packed.words, packed.words * packed.width);
  }

  // Columns of a tile that reads b in place. Where they lie side by side, all that there is memory for: the
  // longer its runs, the faster memory gives it.
  int64_t DirectCols() const {
    if (problem_.b.k_contiguous) return kDirectCols;
    const int64_t nr = kernels_->nr, rows = Pieces(problem_.m, nr) * nr;
    return kDirectMemory / rows / nr * nr;
  }
  int64_t OuterRows() const { return int64_t{kOuterPanels} * kernels_->mr; }
  void MultiplyOuter(int64_t tile, float* sums) const {
    const int mr = kernels_->mr, nr = kernels_->nr;
    const Packed packed = PackedRows();
    const float* const columns = memory_ + packed.floats;
    const GemmRange tile_rows = Cut(tile * OuterRows(), OuterRows(), problem_.m);
    LineWalk none;
    GemmPrefetch prefetch;
    prefetch.c = reinterpret_cast<const char*>(sums);
    prefetch.source = &none;
    for (int64_t row = tile_rows.begin; row < tile_rows.end; row += mr) {
      const int rows = static_cast<int>(std::min<int64_t>(mr, tile_rows.end - row));
      for (int64_t col = 0; col < problem_.n; col += nr) {
        const int cols = static_cast<int>(std::min<int64_t>(nr, problem_.n - col));
        const float* const b = columns + col * packed.words;
        if (streams_) {
          kernels_->multiply_stream(rows, cols, packed.words, memory_ + row * packed.words, b,
                                    static_cast<float*>(problem_.args.c.data) + row * problem_.n + col,
                                    problem_.n);
          continue;
        }
        prefetch.panel = reinterpret_cast<const char*>(b + packed.words * nr);
        prefetch.panel_step = nr * static_cast<int64_t>(sizeof(float)) / 2;
        kernels_->multiply(rows, cols, packed.words, memory_ + row * packed.words, b, false, sums, prefetch);
        kernels_->finish(problem_, row, col, rows, cols, sums);
      }
    }
  }

  GemmBlock Block(int64_t step) const {
    const GemmRange shared = Cut(step / steps_of_k_ * blocking_.shared_block, blocking_.shared_block,
                                 std::min(problem_.m, problem_.n));
    const GemmRange k = Cut(step % steps_of_k_ * blocking_.k_block, blocking_.k_block, problem_.k);
    float* const sums = blocking_.sums_memory == 0 ? nullptr : memory_ + blocking_.shared_memory;
    return GemmBlock(problem_, *kernels_, blocking_, shared, k, memory_, sums);
  }

  GemmProblem problem_;
  bool streams_;
  const GemmKernels* kernels_;
  GemmBlocking blocking_;
  Way way_;
  int64_t steps_of_k_, steps_;
  float* memory_ = nullptr;
};

// Pieces of several groups in a row, dealt out to threads one by one.
class Round {
 public:
  void Add(const Group* group, int64_t pieces) {
    if (pieces == 0) return;
    groups_.push_back(group);
    ends_.push_back((ends_.empty() ? 0 : ends_.back()) + pieces);
  }
  /// Calls body(thread, group, piece, group and piece that the thread will probably be given next) for all
  /// pieces, on the threads of `pool` (null: here).
  template <typename Body>
  void Run(ThreadPool* pool, const Body& body) const {
    const int64_t pieces = ends_.empty() ? 0 : ends_.back();
    const int num_threads = pool == nullptr ? 1 : pool->num_threads();
    std::atomic<int64_t> next{0};
    const auto work = [&](int thread) {
      size_t g = 0, h = 0;
      for (int64_t piece; (piece = next.fetch_add(1, std::memory_order_relaxed)) < pieces;) {
        while (piece >= ends_[g]) ++g;
        const int64_t upcoming = std::min(piece + num_threads, pieces - 1);
        while (upcoming >= ends_[h]) ++h;
        body(thread, *groups_[g], piece - Begin(g), *groups_[h], upcoming - Begin(h));
      }
      std::atomic_thread_fence(std::memory_order_seq_cst);  // stores past the caches follow no other order
    };
    if (pool == nullptr || pieces <= 1) {
      work(0);
    } else {
      pool->Run(work);
    }
  }

 private:
  int64_t Begin(size_t g) const { return g == 0 ? 0 : ends_[g - 1]; }

  std::vector<const Group*> groups_;
  std::vector<int64_t> ends_;
};

// All steps of groups [begin, end), whose memory begins at `memory`.
void RunBatch(ThreadPool* pool, Group* begin, Group* end, float* memory, float* threads,
              int64_t thread_memory) {
  int64_t steps = 0;
  for (Group* group = begin; group != end; ++group) {
    group->set_memory(memory);
    memory += group->memory();
    steps = std::max(steps, group->steps());
  }
  const int64_t num_threads = pool == nullptr ? 1 : pool->num_threads();
  for (int64_t step = 0; step < steps; ++step) {
    Round packing, multiplying;
    for (const Group* group = begin; group != end; ++group) {
      packing.Add(group, group->num_pack_pieces(step));
      multiplying.Add(group, group->num_tiles(step));
    }
    packing.Run(pool, [&](int, const Group& group, int64_t piece, const Group&, int64_t) {
      group.Pack(step, piece);
    });
    multiplying.Run(pool,
                    [&](int thread, const Group& group, int64_t tile, const Group& next, int64_t next_tile) {
                      group.Multiply(step, tile, tile + num_threads, next.Columns(next_tile),
                                     threads + thread * thread_memory);
                    });
  }
}

}  // namespace

void RunGroupedGemm(const KernelContext& context, const GroupedMatmulArgs& args, const GemmKernels& kernels) {
  GemmKernels chosen = kernels;
  const bool plain = args.kind == Kind::kWeight && !args.accumulate;
  if (plain && args.c.num_elements() > kStreamFloats) chosen.finish = kernels.stream;

  std::vector<Group> groups;
  groups.reserve(args.offsets.num_elements());
  int64_t work = 0, thread_memory = 0;
  for (int64_t g = 0; g + 1 < args.offsets.num_elements(); ++g) {
    const Group group(Product(args, g), chosen);
    if (group.empty()) continue;
    groups.push_back(group);
    work += group.work();
    thread_memory = std::max(thread_memory, group.thread_memory());
  }
  // Batches: runs of groups that fit the memory, by where they end.
  std::vector<size_t> ends;
  int64_t memory = 0, most = 0;
  for (size_t g = 0; g < groups.size(); ++g) {
    if (g > 0 && memory + groups[g].memory() > kBatchFloats) {
      ends.push_back(g);
      memory = 0;
    }
    memory += groups[g].memory();
    most = std::max(most, memory);
  }
  ends.push_back(groups.size());

  ThreadPool* const pool = work < kWorthThreads ? nullptr : context.pool;
  const int64_t num_threads = pool == nullptr ? 1 : pool->num_threads();
  const int64_t floats = std::max<int64_t>(1, most + thread_memory * num_threads);
  const Buffer buffer = context.scratch->Allocate(floats * sizeof(float), MemoryTag::kBuffers);
  float* const shared = static_cast<float*>(buffer.data());
  size_t begin = 0;
  for (size_t end : ends) {
    RunBatch(pool, groups.data() + begin, groups.data() + end, shared, shared + most, thread_memory);
    begin = end;
  }
}

}  // namespace strata
