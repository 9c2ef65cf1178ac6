// mma.h on the emulated device. The last lane to arrive does the work of its warp. Included by mma.h alone.
#pragma once

namespace simt {

namespace internal {

template <typename T>
float HalfOf(uint32_t word, int half) {
  const auto bits = static_cast<uint16_t>(word >> (16 * half));
  T value;
  std::memcpy(&value, &bits, sizeof(bits));
  return static_cast<float>(value);
}

struct MmaArguments {
  FragC* c;
  const FragA* a;
  const FragB* b;
};

// Products are exact and their sum is rounded once: at least as good as any tensor core.
template <typename T>
void MmaOfWarp(void* const* lanes) {
  float a[16][16], b[16][8];
  for (int l = 0; l < kWarp; ++l) {
    const auto* const args = static_cast<const MmaArguments*>(lanes[l]);
    if (args == nullptr) Trap("mma takes all 32 lanes");
    const int g = l / 4, t = l % 4;
    for (int i = 0; i < 8; ++i) {
      a[g + i / 2 % 2 * 8][2 * t + i % 2 + i / 4 * 8] = HalfOf<T>(args->a->r[i / 2], i % 2);
    }
    for (int i = 0; i < 4; ++i) b[2 * t + i % 2 + i / 2 * 8][g] = HalfOf<T>(args->b->r[i / 2], i % 2);
  }
  for (int l = 0; l < kWarp; ++l) {
    for (int i = 0; i < 4; ++i) {
      float& c = static_cast<MmaArguments*>(lanes[l])->c->c[i];
      double sum = c;
      for (int k = 0; k < 16; ++k) {
        sum += static_cast<double>(a[l / 4 + i / 2 * 8][k]) * b[k][2 * (l % 4) + i % 2];
      }
      c = static_cast<float>(sum);
    }
  }
}

struct LdmatrixArguments {
  uint32_t* r;
  const void* row;
};

template <bool kTransposed>
void LdmatrixOfWarp(void* const* lanes) {
  for (int l = 0; l < kWarp; ++l) {
    const auto* const args = static_cast<const LdmatrixArguments*>(lanes[l]);
    if (args == nullptr) Trap("ldmatrix takes all 32 lanes");
    if (reinterpret_cast<uintptr_t>(args->row) % 16 != 0 || !InShared(args->row)) {
      Trap("ldmatrix: a row is not 16 aligned bytes of shared memory");
    }
  }
  for (int l = 0; l < kWarp; ++l) {
    for (int i = 0; i < 4; ++i) {
      uint16_t halves[2];
      for (int e = 0; e < 2; ++e) {
        const int row = kTransposed ? 2 * (l % 4) + e : l / 4, column = kTransposed ? l / 4 : 2 * (l % 4) + e;
        const void* const from = static_cast<const LdmatrixArguments*>(lanes[8 * i + row])->row;
        std::memcpy(&halves[e], static_cast<const uint16_t*>(from) + column, 2);
      }
      static_cast<LdmatrixArguments*>(lanes[l])->r[i] = halves[0] | static_cast<uint32_t>(halves[1]) << 16;
    }
  }
}

}  // namespace internal

template <typename T = __nv_bfloat16>
void mma_m16n8k16(FragC& c, const FragA& a, const FragB& b, Loc where = Loc::current()) {
  internal::MmaArguments args{&c, &a, &b};
  internal::WarpCollective(kAllLanes, &args, internal::MmaOfWarp<T>, "mma.m16n8k16", where);
}
inline void ldmatrix_x4(uint32_t (&r)[4], const void* row, Loc where = Loc::current()) {
  internal::NoteRead(row, 16, where);
  internal::LdmatrixArguments args{r, row};
  internal::WarpCollective(kAllLanes, &args, internal::LdmatrixOfWarp<false>, "ldmatrix.x4", where);
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row, Loc where = Loc::current()) {
  internal::NoteRead(row, 16, where);
  internal::LdmatrixArguments args{r, row};
  internal::WarpCollective(kAllLanes, &args, internal::LdmatrixOfWarp<true>, "ldmatrix.x4.trans", where);
}
inline void cp_async16(void* shared, const void* global, bool valid = true, Loc where = Loc::current()) {
  internal::BeginCopy(shared, global, 16, valid ? 16 : 0, where);
}
inline void cp_async_commit() { internal::EndCopyGroup(); }
template <int kLeft>
void cp_async_wait() {
  internal::LandCopies(kLeft);
}

}  // namespace simt
