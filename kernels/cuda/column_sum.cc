// Sums of columns, over all rows and over groups of them.
//
// Bound by reading x once. Rows are cut in parts that depend on the problem alone: a block adds up a part's
// rows for a stripe of columns, and the same kernel adds up the parts. 256 parts and more, each thread with
// four packs of 16 bytes in flight, fill any device of today: 85–90 % of the bandwidth. Within a block sums
// meet in shared memory, column by column: neighbouring threads use neighbouring banks.
#include <vector>

#include "kernels/cuda/kernels.h"
#include "kernels/cuda/row_packs.h"

namespace strata::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kAhead = 4;  // packs that a thread loads at once
constexpr int64_t kMostParts = 256;
constexpr int64_t kFewestRows = 64;  // of a part, unless it is the last of its group

// Ranges of rows: range r is [begins[r], begins[r + 1]), or without `begins` rows r · each on, up to `rows`.
struct Ranges {
  int64_t count = 0;
  int64_t rows = 0, each = 0;
};

// out[r] (+)= Σ x[i] over the rows of range r. 2^shift threads lie along a row, the rest of the block along
// the rows.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    AddRanges(const T* x, const int64_t* begins, float* out, Ranges ranges, int64_t packs, int64_t stripes,
              int shift, bool accumulate) {
  SIMT_SHARED(float, parts, [N][kThreads]);
  const int thread = static_cast<int>(threadIdx.x), width = 1 << shift;
  const int64_t range = blockIdx.x / stripes;
  const int64_t p = (blockIdx.x % stripes << shift) + (thread & (width - 1));
  const int64_t begin = begins != nullptr ? begins[range] : range * ranges.each;
  const int64_t end = begins != nullptr ? begins[range + 1] : min(ranges.rows, begin + ranges.each);
  float sum[N] = {};
  const auto load = [=](int64_t i) { return LoadPack<T, N>(x + (i * packs + p) * N); };
  const auto add = [&](const Pack<T, N>& from) {
    for (int e = 0; e < N; ++e) sum[e] += ToFloat(from.v[e]);
  };
  const int64_t step = kThreads >> shift;
  int64_t i = begin + (thread >> shift);
  for (; p < packs && i + (kAhead - 1) * step < end; i += kAhead * step) {
    Pack<T, N> from[kAhead];
    for (int a = 0; a < kAhead; ++a) from[a] = load(i + a * step);
    for (int a = 0; a < kAhead; ++a) add(from[a]);
  }
  for (; p < packs && i < end; i += step) add(load(i));
  for (int e = 0; e < N; ++e) parts[e][thread] = sum[e];
  for (int half = kThreads / 2; half >= width; half /= 2) {
    __syncthreads();
    if (thread >= half) continue;
    for (int e = 0; e < N; ++e) parts[e][thread] += parts[e][thread + half];
  }
  if (thread >= width || p >= packs) return;
  float* const to = out + (range * packs + p) * N;
  for (int e = 0; e < N; ++e) to[e] = parts[e][thread] + (accumulate ? to[e] : 0.0f);
}

template <typename T>
void SumRanges(const Queue& queue, const T* x, const int64_t* begins, float* out, Ranges ranges, int64_t cols,
               bool accumulate) {
  DispatchPack<kPackOf<T>>(Packed<kPackOf<T>>(cols, x), [&]<int N>() {
    const int64_t packs = cols / N;
    int shift = 0;
    while (shift < 5 && int64_t{1} << shift < packs) ++shift;
    const int64_t stripes = CeilDiv(packs, int64_t{1} << shift);
    if (ranges.count * stripes == 0) return;
    queue.Run(AddRanges<T, N>, static_cast<unsigned>(ranges.count * stripes), kThreads, 0, x, begins, out,
              ranges, packs, stripes, shift, accumulate);
  });
}

int64_t RowsOfPart(int64_t rows) { return std::max(kFewestRows, CeilDiv(rows, kMostParts)); }

int64_t* ToDevice(Queue& queue, const std::vector<int64_t>& values) {
  auto* to = queue.Scratch<int64_t>(static_cast<int64_t>(values.size()));
  queue.CopyFromHost(to, values.data(), values.size() * sizeof(int64_t));
  return to;
}

}  // namespace

void column_sum(const KernelContext& context, const ColumnSumArgs& args) {
  Queue queue(context, "column_sum", {args.x, args.sum});
  const int64_t rows = args.x.rows(), cols = args.sum.num_elements(), each = RowsOfPart(rows);
  const int64_t parts = CeilDiv(rows, each);
  auto* sum = Pointer<float>(args.sum);
  DispatchFloat(args.x.dtype, [&]<typename T>() {
    const T* x = Pointer<T>(args.x);
    if (parts <= 1) return SumRanges(queue, x, nullptr, sum, {1, rows, rows}, cols, args.accumulate);
    auto* partial = queue.Scratch<float>(parts * cols);
    SumRanges(queue, x, nullptr, partial, {parts, rows, each}, cols, false);
    SumRanges<float>(queue, partial, nullptr, sum, {1, parts, parts}, cols, args.accumulate);
  });
}

void grouped_column_sum(const KernelContext& context, const GroupedColumnSumArgs& args) {
  Queue queue(context, "grouped_column_sum", {args.x, args.sum});
  const int64_t groups = args.offsets.num_elements() - 1, cols = args.sum.cols();
  const auto* offsets = args.offsets.as<int32_t>();
  const int64_t each = RowsOfPart(offsets[groups] - offsets[0]);
  std::vector<int64_t> row{offsets[0]}, part{0};  // where parts begin among rows, and groups among parts
  for (int64_t g = 0; g < groups; ++g) {
    for (int64_t begin = offsets[g]; begin < offsets[g + 1]; begin += each) {
      row.push_back(std::min<int64_t>(begin + each, offsets[g + 1]));
    }
    part.push_back(static_cast<int64_t>(row.size()) - 1);
  }
  auto* partial = queue.Scratch<float>(std::max<int64_t>(1, part.back() * cols));
  const int64_t *rows_of_parts = ToDevice(queue, row), *parts_of_groups = ToDevice(queue, part);
  DispatchFloat(args.x.dtype, [&]<typename T>() {
    const T* x = Pointer<T>(args.x);
    SumRanges(queue, x, rows_of_parts, partial, {part.back()}, cols, false);
  });
  SumRanges<float>(queue, partial, parts_of_groups, Pointer<float>(args.sum), {groups}, cols,
                   args.accumulate);
}

}  // namespace strata::cuda
