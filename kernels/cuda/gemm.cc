// Which kernels make a product, and the kernel that ends one made in parts.
//
// FinishKernel is bound by memory: it reads each part once (4 bytes a sum) and moves what the epilogue names,
// 16 bytes at a time. 85-90 % of the bandwidth is to be expected, or more where the parts are still in the L2
// cache.
#include "kernels/cuda/gemm.h"

#include <vector>

#include "kernels/cuda/gemm_epilogue.h"

namespace strata::cuda {
namespace {

template <typename C, int N>
__global__ void FinishKernel(const __grid_constant__ Epilogue epilogue, const float* parts, int64_t num_parts,
                             int64_t m) {
  const int64_t elements = m * epilogue.n, stride = int64_t{gridDim.x} * blockDim.x * N;
  for (int64_t at = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * N; at < elements; at += stride) {
    float value[N] = {}, bias[N] = {};
    for (int64_t part = 0; part < num_parts; ++part) {
      const Pack<float, N> sums = LoadPack<float, N>(parts + part * elements + at);
      for (int e = 0; e < N; ++e) value[e] += sums.v[e];
    }
    if (epilogue.bias != nullptr) LoadAny(epilogue.bias_type, epilogue.bias, at % epilogue.n, bias);
    Finish<C, N>(epilogue, at, bias, value);
  }
}

// Few tiles leave most of a device idle: a long k is then cut into parts, which are summed in their order. A
// matter of the shape alone, since it changes the order of sums.
int64_t NumParts(const Product& p) {
  constexpr int64_t kEnoughTiles = 64, kShortest = 512;
  const int64_t tiles = CeilDiv(p.m, internal::kSmallTile) * CeilDiv(p.n, internal::kSmallTile);
  if (p.ragged != Ragged::kNone || 2 * tiles > kEnoughTiles) return 1;
  return std::max<int64_t>(1, std::min(kEnoughTiles / tiles, p.k / kShortest));
}

// Rows of tiles of each group from its first, to [groups].
std::vector<int32_t> FirstTiles(const int32_t* offsets, int groups, int tile) {
  std::vector<int32_t> first(1, 0);
  for (int g = 0; g < groups; ++g) {
    first.push_back(first.back() + static_cast<int32_t>(CeilDiv(offsets[g + 1] - offsets[g], tile)));
  }
  return first;
}

// The number of tiles.
int64_t CutTiles(Product& p, const int32_t* offsets, int tile) {
  p.tile_rows = p.ragged == Ragged::kRows ? FirstTiles(offsets, p.groups, tile).back() : CeilDiv(p.m, tile);
  return p.tile_rows * CeilDiv(p.n, tile) * (p.ragged == Ragged::kTerms ? p.groups : 1);
}

}  // namespace

void ChoosePacks(Epilogue& e) {
  e.packs = e.n % (16 / static_cast<int64_t>(SizeOf(e.type))) == 0 &&
            Aligned(16, e.c, e.pre_activation, e.residual);
}

void FinishParts(const Queue& queue, Epilogue epilogue, const float* sums, int64_t parts, int64_t m) {
  ChoosePacks(epilogue);
  DispatchEpilogue(epilogue, [&]<typename C, int N>() {
    constexpr int kThreads = 256;
    queue.Run(FinishKernel<C, N>, GridStride(queue, m * epilogue.n, kThreads * N), kThreads, 0, epilogue,
              sums, parts, m);
  });
}

void RunProduct(Queue& queue, Product p, const int32_t* offsets) {
  ChoosePacks(p.epilogue);
  const bool same = p.a.type == p.b.type, mma = same && p.a.type != DType::kF32;

  // Large tiles where they fill the device.
  int tile = internal::kLargeTile;
  int64_t tiles = CutTiles(p, offsets, tile);
  const int64_t rows = p.ragged == Ragged::kRows ? p.m / std::max(p.groups, 1) : p.m;
  if (!internal::kHasLargeTile || !same || std::min(rows, p.n) <= internal::kSmallTile ||
      tiles < queue.stream().multiprocessors) {
    tile = internal::kSmallTile;
    tiles = CutTiles(p, offsets, tile);
  }
  if (tiles == 0) return;

  if (p.ragged != Ragged::kNone) {
    const size_t bytes = (static_cast<size_t>(p.groups) + 1) * sizeof(int32_t);
    int32_t* const on_device = queue.Scratch<int32_t>(2 * (int64_t{p.groups} + 1));
    queue.CopyFromHost(on_device, offsets, bytes);
    p.offsets = on_device;
    if (p.ragged == Ragged::kRows) {
      const std::vector<int32_t> first = FirstTiles(offsets, p.groups, tile);
      queue.CopyFromHost(on_device + p.groups + 1, first.data(), bytes);
      p.first_tile = on_device + p.groups + 1;
    }
  }

  const Epilogue epilogue = p.epilogue;
  constexpr int64_t kDeepest = 32;  // a part is a whole number of stages of either family
  p.split_terms = CeilDiv(CeilDiv(p.k, NumParts(p)), kDeepest) * kDeepest;
  const int64_t parts = std::max<int64_t>(1, CeilDiv(p.k, std::max<int64_t>(1, p.split_terms)));
  if (parts > 1) {
    p.epilogue = Epilogue{.c = queue.Scratch<float>(parts * p.m * p.n), .n = p.n};
    ChoosePacks(p.epilogue);
  }
  mma ? internal::RunMma(queue, p, tile, tiles, parts) : internal::RunFma(queue, p, tile, tiles, parts);
  if (parts > 1) FinishParts(queue, epilogue, static_cast<const float*>(p.epilogue.c), parts, p.m);
}

}  // namespace strata::cuda
