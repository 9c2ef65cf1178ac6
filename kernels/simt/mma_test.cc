// Tensor-core products and matrix loads against plain ones.
#include "kernels/simt/mma.h"

#include <catch2/catch.hpp>
#include <vector>

#include "kernels/simt/faulty_kernels.h"

namespace simt {
namespace {

// c[16, 8] = a[16, 16] · b[16, 8] + c. Fragments are filled element by element, as the PTX manual draws them:
// "row = groupID for a0, a1, a4, a5; groupID + 8 otherwise", and so on.
template <typename T>
__global__ void Product(const T* a, const T* b, float* c) {
  const int lane = static_cast<int>(threadIdx.x), group = lane / 4, in_group = lane % 4;
  T a_elements[8], b_elements[4];
  for (int i = 0; i < 8; ++i) {
    const int row = i == 0 || i == 1 || i == 4 || i == 5 ? group : group + 8;
    const int column = in_group * 2 + (i & 1) + (i < 4 ? 0 : 8);
    a_elements[i] = a[row * 16 + column];
  }
  for (int i = 0; i < 4; ++i) b_elements[i] = b[(in_group * 2 + (i & 1) + (i < 2 ? 0 : 8)) * 8 + group];
  FragA fragment_a;
  FragB fragment_b;
  FragC sums;
  std::memcpy(fragment_a.r, a_elements, sizeof(a_elements));
  std::memcpy(fragment_b.r, b_elements, sizeof(b_elements));
  const auto Element = [&](int i) -> float& {
    return c[(i < 2 ? group : group + 8) * 8 + in_group * 2 + (i & 1)];
  };
  for (int i = 0; i < 4; ++i) sums.c[i] = Element(i);
  mma_m16n8k16<T>(sums, fragment_a, fragment_b);
  for (int i = 0; i < 4; ++i) Element(i) = sums.c[i];
}

TEMPLATE_TEST_CASE("mma.m16n8k16 is a product of matrices", "", __nv_bfloat16, __half) {
  std::vector<TestType> a(16 * 16), b(16 * 8);
  std::vector<float> c(16 * 8), expected(16 * 8);
  for (int i = 0; i < 16 * 16; ++i) a[i] = static_cast<float>(i * 37 % 29 - 14);
  for (int i = 0; i < 16 * 8; ++i) b[i] = static_cast<float>(i * 23 % 31 - 15) / 4;
  for (int i = 0; i < 16 * 8; ++i) c[i] = static_cast<float>(i);
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 8; ++j) {
      expected[i * 8 + j] = c[i * 8 + j];
      for (int k = 0; k < 16; ++k) expected[i * 8 + j] += float(a[i * 16 + k]) * float(b[k * 8 + j]);
    }
  }
  faulty::Run(Product<TestType>, 1, 32, 0, a.data(), b.data(), c.data());
  CHECK(c == expected);
}

// The same through shared memory and ldmatrix; b lies by rows of k, which the transposed load turns.
__global__ void LoadedProduct(const __nv_bfloat16* a, const __nv_bfloat16* b, float* c) {
  SIMT_SHARED(__nv_bfloat16, a_tile, [16][24]);
  SIMT_SHARED(__nv_bfloat16, b_tile, [16][24]);
  const int lane = static_cast<int>(threadIdx.x);
  cp_async16(&a_tile[lane / 2][lane % 2 * 8], a + lane * 8);
  cp_async16(&b_tile[lane / 2][lane % 2 * 8], b + lane * 8);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  FragA fragment_a;
  uint32_t fragments_b[4];
  ldmatrix_x4(fragment_a.r, &a_tile[lane % 16][lane / 16 * 8]);
  ldmatrix_x4_trans(fragments_b, &b_tile[lane % 16][lane / 16 * 8]);
  for (int half = 0; half < 2; ++half) {
    FragC sums = {};
    mma_m16n8k16(sums, fragment_a, FragB{{fragments_b[2 * half], fragments_b[2 * half + 1]}});
    for (int i = 0; i < 4; ++i) {
      c[(lane / 4 + i / 2 * 8) * 16 + half * 8 + lane % 4 * 2 + i % 2] = sums.c[i];
    }
  }
}

TEST_CASE("ldmatrix gives fragments that mma takes") {
  struct alignas(16) Matrix {
    __nv_bfloat16 elements[16 * 16];
  } a, b;
  std::vector<float> c(16 * 16), expected(16 * 16);
  for (int i = 0; i < 16 * 16; ++i) {
    a.elements[i] = static_cast<float>(i * 37 % 29 - 14);
    b.elements[i] = static_cast<float>(i * 23 % 31 - 15);
  }
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 16; ++j) {
      for (int k = 0; k < 16; ++k)
        expected[i * 16 + j] += float(a.elements[i * 16 + k]) * float(b.elements[k * 16 + j]);
    }
  }
  for (const Order order : {Order::kInOrder, Order::kReverse, Order::kRandom}) {
    config().order = order;
    faulty::Run(LoadedProduct, 1, 32, 0, a.elements, b.elements, c.data());
    CHECK(c == expected);
  }
  config() = {};
}

__global__ void CopyFirst(const uint4* x, uint4* y, int valid) {
  SIMT_SHARED(uint4, stage, [32]);
  cp_async16(&stage[threadIdx.x], &x[threadIdx.x], static_cast<int>(threadIdx.x) < valid);
  cp_async_commit();
  cp_async_wait<0>();
  y[threadIdx.x] = stage[threadIdx.x];
}

TEST_CASE("An invalid copy writes zeros") {
  std::vector<uint4> x(32, {1, 2, 3, 4}), y(32);
  faulty::Run(CopyFirst, 1, 32, 0, x.data(), y.data(), 20);
  CHECK(y[19].w == 4);
  CHECK(y[20].x == 0);
  CHECK(y[31].w == 0);
}

}  // namespace
}  // namespace simt
