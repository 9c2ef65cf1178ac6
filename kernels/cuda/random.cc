// Ops with random numbers: dropout, jitter, normal numbers. The words are those of runtime/base/rng.h, so
// masks are the same on every device and in every layout.
//
// Dropout moves 8 bytes an element in fp32, 4 in bf16; normal numbers 4 or 2. A Philox block, which serves
// four elements, is ten rounds of two wide products, and comes to some 20 integer instructions an element
// with its conversions. At 64 a clock on a multiprocessor that is 3.2 elements, where an H100's memory
// brings 1.9 (fp32) or 3.8 (bf16): fp32 is bound by memory, 90 % of its bandwidth to be expected, bf16 by
// Philox, about 80 % of it. Normal numbers add a logarithm, a root, a sine and a cosine for two, and are
// bound by arithmetic.
//
// Where rows are whole blocks, which is the usual case, a thread has one or two blocks, 16 bytes of the wider
// type.
#include "kernels/cuda/device_math.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/queue.h"

namespace strata::cuda {
namespace {

// GlobalIndex on the device.
struct Place {
  int64_t row_offset, col_offset, global_cols;
  const int32_t* row_index;

  Place(const GlobalIndex& index, int64_t cols)
      : row_offset(index.row_offset),
        col_offset(index.col_offset),
        global_cols(index.global_cols == 0 ? cols : index.global_cols),
        row_index(Pointer<int32_t>(index.row_index)) {}

  __device__ uint64_t operator()(int64_t row, int64_t col) const {
    const int64_t global_row = row_index != nullptr ? row_index[row] : row_offset + row;
    return static_cast<uint64_t>(global_row * global_cols + col_offset + col);
  }
};

// The numbers of elements 4 · block … of a stream: body.Numbers makes four from the words of a block.
template <int kBlocks, typename Body>
__device__ __forceinline__ void MakeNumbers(const Body& body, const RandomStream& random, uint64_t block,
                                            float (&numbers)[4 * kBlocks]) {
  for (int b = 0; b < kBlocks; ++b) body.Numbers(random.Block(block + b), numbers + 4 * b);
}

// Every pack of kWidth elements has whole blocks.
template <int kWidth, typename Body>
__global__ void WholeBlocksKernel(Body body, RandomStream random, Place place, int64_t rows, int64_t cols) {
  const int64_t packs = cols / kWidth, end = rows * packs, stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < end; i += stride) {
    const int64_t row = i / packs;
    float numbers[kWidth];
    MakeNumbers<kWidth / 4>(body, random, place(row, (i - row * packs) * kWidth) / 4, numbers);
    body.template operator()<kWidth>(i * kWidth, numbers);
  }
}

// Blocks begin anywhere in a row: a thread has what a block and a row share. Blocks are counted from the one
// that the row begins in.
template <typename Body>
__global__ void PartBlocksKernel(Body body, RandomStream random, Place place, int64_t rows, int64_t cols,
                                 int64_t blocks_per_row) {
  const int64_t end = rows * blocks_per_row, stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < end; i += stride) {
    const int64_t row = i / blocks_per_row;
    const uint64_t begin = place(row, 0), block = begin / 4 + static_cast<uint64_t>(i - row * blocks_per_row);
    const auto col = static_cast<int64_t>(block * 4 - begin);  // of the first number; negative before the row
    float numbers[4];
    MakeNumbers<1>(body, random, block, numbers);
    for (int w = 0; w < 4; ++w) {
      if (col + w >= 0 && col + w < cols) body.template operator()<1>(row * cols + col + w, numbers + w);
    }
  }
}

// Calls body.operator()<N>(i, numbers) for elements [i, i + N) of a matrix, at `operands`.
template <int kWidth, typename Body, typename... T>
void RunRandom(const Queue& queue, const RandomStream& random, const GlobalIndex& index,
               const TensorView& matrix, const Body& body, const T*... operands) {
  constexpr int kThreads = 256;
  const int64_t rows = matrix.rows(), cols = matrix.cols();
  if (rows == 0) return;
  const Place place(index, cols);
  const bool whole = cols % kWidth == 0 && place.global_cols % 4 == 0 && place.col_offset % 4 == 0 &&
                     (Aligned(kWidth * sizeof(T), operands) && ...);
  if (whole) {
    queue.Run(WholeBlocksKernel<kWidth, Body>, GridStride(queue, rows * (cols / kWidth), kThreads, 32),
              kThreads, 0, body, random, place, rows, cols);
  } else {
    const int64_t blocks_per_row = CeilDiv(cols + 3, 4);  // a row that begins with the last element of one
    queue.Run(PartBlocksKernel<Body>, GridStride(queue, rows * blocks_per_row, kThreads, 32), kThreads, 0,
              body, random, place, rows, cols, blocks_per_row);
  }
}

struct UniformNumbers {
  template <typename Words>
  static __device__ __forceinline__ void Numbers(const Words& words, float* numbers) {
    for (int w = 0; w < 4; ++w) numbers[w] = RandomStream::ToUniform(words[w]);
  }
};

template <typename T>
struct DropoutBody : UniformNumbers {
  const T* x;
  T* y;
  float p, scale;
  bool accumulate;

  template <int N>
  __device__ __forceinline__ void operator()(int64_t i, const float* uniform) const {
    const Pack<T, N> in = LoadPack<T, N>(x + i);
    Pack<T, N> out = accumulate ? LoadPack<T, N>(y + i) : in;
    for (int e = 0; e < N; ++e) {
      const float value = uniform[e] >= p ? ToFloat(in.v[e]) * scale : 0.0f;
      out.v[e] = FromFloat<T>(accumulate ? ToFloat(out.v[e]) + value : value);
    }
    StorePack(y + i, out);
  }
};

template <typename X, typename Y>
struct JitterBody : UniformNumbers {
  const X* x;
  Y* y;
  float amplitude;
  bool accumulate;

  template <int N>
  __device__ __forceinline__ void operator()(int64_t i, const float* uniform) const {
    const Pack<X, N> in = LoadPack<X, N>(x + i);
    Pack<Y, N> out = accumulate ? LoadPack<Y, N>(y + i) : Pack<Y, N>{};
    for (int e = 0; e < N; ++e) {
      const float value = ToFloat(in.v[e]) * (1.0f + amplitude * (2.0f * uniform[e] - 1.0f));
      out.v[e] = FromFloat<Y>(accumulate ? ToFloat(out.v[e]) + value : value);
    }
    StorePack(y + i, out);
  }
};

// Box and Muller: words 0 and 1 make elements 0 and 1, words 2 and 3 the others.
template <typename T>
struct NormalBody {
  T* out;
  float mean, std;

  template <typename Words>
  __device__ __forceinline__ void Numbers(const Words& words, float* numbers) const {
    for (int w = 0; w < 4; w += 2) {
      const float radius = sqrtf(-2.0f * logf(RandomStream::ToUniform(words[w])));
      float cosine, sine;
      CosSinOfTurns(RandomStream::ToUniform(words[w + 1]), &cosine, &sine);
      numbers[w] = mean + std * (radius * cosine);
      numbers[w + 1] = mean + std * (radius * sine);
    }
  }
  template <int N>
  __device__ __forceinline__ void operator()(int64_t i, const float* numbers) const {
    Pack<T, N> pack;
    for (int e = 0; e < N; ++e) pack.v[e] = FromFloat<T>(numbers[e]);
    StorePack(out + i, pack);
  }
};

// Elements that are 16 bytes of the widest of the types.
template <typename... T>
inline constexpr int kWidthOf = 16 / static_cast<int>(std::max({sizeof(T)...}));

}  // namespace

void dropout(const KernelContext& context, const DropoutArgs& args) {
  const Queue queue(context, "dropout", {args.x, args.y});
  DispatchFloat(args.x.dtype, [&]<typename T>() {
    const float scale = args.p < 1.0f ? 1.0f / (1.0f - args.p) : 0.0f;  // p = 1 keeps nothing
    const DropoutBody<T> body{{}, Pointer<T>(args.x), Pointer<T>(args.y), args.p, scale, args.accumulate};
    RunRandom<kWidthOf<T>>(queue, args.random, args.index, args.x, body, body.x, body.y);
  });
}

void jitter(const KernelContext& context, const JitterArgs& args) {
  const Queue queue(context, "jitter", {args.x, args.y});
  DispatchFloat(args.x.dtype, [&]<typename X>() {
    DispatchFloat(args.y.dtype, [&]<typename Y>() {
      const JitterBody<X, Y> body{
          {}, Pointer<X>(args.x), Pointer<Y>(args.y), args.amplitude, args.accumulate};
      RunRandom<kWidthOf<X, Y>>(queue, args.random, args.index, args.x, body, body.x, body.y);
    });
  });
}

void random_normal(const KernelContext& context, const RandomNormalArgs& args) {
  const Queue queue(context, "random_normal", {args.out});
  DispatchFloat(args.out.dtype, [&]<typename T>() {
    const NormalBody<T> body{Pointer<T>(args.out), args.mean, args.std};
    RunRandom<kWidthOf<T>>(queue, args.random, args.index, args.out, body, body.out);
  });
}

}  // namespace strata::cuda
