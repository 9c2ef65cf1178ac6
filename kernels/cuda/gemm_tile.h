// Which tile of a product a block of threads makes.
#pragma once

#include "kernels/cuda/gemm_epilogue.h"

namespace strata::cuda {

struct TilePlace {
  int64_t group;
  int64_t m_begin, m_end;  // rows of a; the tile may be cut short by m_end
  int64_t n_begin;
  int64_t k_begin, k_end;  // terms of this block
  TileOfC c;
};

/// The place of block blockIdx.x, part blockIdx.y. Blocks that run at the same time should read the same rows
/// and columns from the L2 cache: they go down bands of eight rows of tiles.
template <int kTile>
__device__ __forceinline__ TilePlace PlaceOf(const Product& p) {
  constexpr int64_t kBand = 8;
  const int64_t tile_columns = CeilDiv(p.n, kTile), tiles = p.tile_rows * tile_columns;
  TilePlace place{};
  int64_t index = blockIdx.x;
  if (p.ragged == Ragged::kTerms) {
    place.group = index / tiles;
    index %= tiles;
  }
  const int64_t band = index / (kBand * tile_columns), within = index - band * kBand * tile_columns;
  const int64_t height = min(kBand, p.tile_rows - band * kBand);
  const int64_t tile_row = band * kBand + within % height;
  place.n_begin = within / height * kTile;
  place.m_begin = tile_row * kTile;
  place.m_end = p.m;
  place.k_begin = p.split_terms * blockIdx.y;
  place.k_end = min(p.k, place.k_begin + p.split_terms);
  if (p.ragged == Ragged::kRows) {
    int low = 0, high = p.groups;  // the last group with first_tile ≤ tile_row; one without rows has no tile
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (p.first_tile[middle] <= tile_row ? low : high) = middle;
    }
    place.group = low;
    place.m_begin = p.offsets[low] + (tile_row - p.first_tile[low]) * kTile;
    place.m_end = p.offsets[low + 1];
  } else if (p.ragged == Ragged::kTerms) {
    place.k_begin = p.offsets[place.group];
    place.k_end = p.offsets[place.group + 1];
  }
  // Each part, and each group of kTerms, has its own m rows of c.
  place.c.row = place.m_begin + p.m * (blockIdx.y + (p.ragged == Ragged::kTerms ? place.group : 0));
  place.c.column = place.n_begin;
  place.c.bias = place.group * p.n + place.n_begin;
  place.c.rows = static_cast<int>(min(int64_t{kTile}, place.m_end - place.m_begin));
  place.c.columns = static_cast<int>(min(int64_t{kTile}, p.n - place.n_begin));
  return place;
}

}  // namespace strata::cuda
