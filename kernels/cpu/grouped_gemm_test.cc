// Products of groups against the products of their groups, one by one, and double sums. Shapes, types and
// epilogues are in the op cases; here is what they are too small for.
#include <span>

#include "kernels/cpu/kernel_testing.h"

namespace strata {
namespace {

using testing::CheckClose;
using testing::OnEveryCpu;
using testing::TestTensor;
using Kind = GroupedMatmulArgs::Kind;

// Every element of c, by double sums, for groups of `rows` rows.
void Check(DType type, const std::vector<int32_t>& rows, int64_t n, int64_t k, Kind kind) {
  INFO(Name(type) << " kind " << static_cast<int>(kind) << " " << n << " × " << k);
  std::vector<int32_t> offsets{0};
  for (int32_t r : rows) offsets.push_back(offsets.back() + r);
  const auto groups = static_cast<int64_t>(rows.size());
  const int64_t total = offsets.back(), in = kind == Kind::kForward ? k : n,
                out = kind == Kind::kForward ? n : k;
  TestTensor a = TestTensor::Random(type, {total, in}, 1, -1, 1);
  TestTensor b = kind == Kind::kWeight ? TestTensor::Random(type, {total, k}, 2, -1, 1)
                                       : TestTensor::Random(type, {groups, n, k}, 2, -1, 1);
  TestTensor c =
      kind == Kind::kWeight ? TestTensor(DType::kF32, {groups, n, k}) : TestTensor(type, {total, out});
  std::vector<double> want(c.size());
  const std::vector<double> av = a.values(), bv = b.values();
  for (int64_t g = 0; g < groups; ++g) {
    for (int64_t r = offsets[g]; r < offsets[g + 1]; ++r) {
      for (int64_t i = 0; i < n; ++i) {
        for (int64_t j = 0; j < k; ++j) {
          const int64_t w = (g * n + i) * k + j;
          if (kind == Kind::kForward) want[r * n + i] += av[r * k + j] * bv[w];
          if (kind == Kind::kInput) want[r * k + j] += av[r * n + i] * bv[w];
          if (kind == Kind::kWeight) want[w] += av[r * n + i] * bv[r * k + j];
        }
      }
    }
  }
  OnEveryCpu(
      {&a, &b, &c},
      [&](const KernelTable& kernels, const KernelContext& context) {
        GroupedMatmulArgs args;
        args.kind = kind;
        args.a = a.view(), args.b = b.view(), args.c = c.view();
        args.offsets = {offsets.data(), DType::kI32, {groups + 1}};
        kernels.grouped_matmul(context, args);
      },
      [&] { CheckClose(c, want, 5e-6, 2e-6); });
}

TEST_CASE("groups of every number of rows around the panels, tiles and limits", "[grouped_gemm]") {
  const std::vector<int32_t> rows{1, 14, 15, 16, 17, 31, 32, 33, 0, 64, 65, 127, 128, 129};
  for (Kind kind : {Kind::kForward, Kind::kInput, Kind::kWeight}) {
    Check(DType::kF32, rows, 48, 80, kind);
    Check(DType::kF32, rows, 37, 45, kind);
  }
  Check(DType::kBF16, rows, 48, 80, Kind::kForward);
}

TEST_CASE("groups whose weights are wider than a tile", "[grouped_gemm]") {
  Check(DType::kF32, {3, 20, 40}, 300, 70, Kind::kForward);
  Check(DType::kF32, {3, 90, 128}, 70, 528, Kind::kInput);
  Check(DType::kF32, {1, 20}, 150, 1040, Kind::kInput);
  Check(DType::kF32, {3, 20, 40}, 300, 70, Kind::kWeight);
}

TEST_CASE("gradients of weights that are written past the caches", "[grouped_gemm]") {
  constexpr int64_t kGroups = 3, kN = 1200, kK = 1201;  // more than four million, half of the rows unaligned
  std::vector<int32_t> offsets{0, 5, 5, 140};
  TestTensor a = TestTensor::Random(DType::kF32, {offsets.back(), kN}, 1, -1, 1);
  TestTensor b = TestTensor::Random(DType::kF32, {offsets.back(), kK}, 2, -1, 1);
  std::vector<float> c(kGroups * kN * kK, NAN), again(c.size(), 0.0f);
  const std::unique_ptr<Device> device = NewCpuDevice(2);
  const KernelContext context{&device->pool(), device->compute_stream(), &device->allocator()};
  GroupedMatmulArgs args;
  args.kind = Kind::kWeight;
  args.a = a.view(), args.b = b.view();
  args.c = {c.data(), DType::kF32, {kGroups, kN, kK}};
  args.offsets = {offsets.data(), DType::kI32, {kGroups + 1}};
  CpuKernels().grouped_matmul(context, args);
  args.c.data = again.data();
  args.accumulate = true;  // to zeros: the same, through the caches
  CpuKernels().grouped_matmul(context, args);
  CHECK(std::equal(c.begin(), c.end(), again.begin()));
  for (int64_t at = 0; at < static_cast<int64_t>(c.size()); at += 997) {
    const int64_t g = at / (kN * kK), i = at / kK % kN, j = at % kK;
    double want = 0;
    for (int64_t r = offsets[g]; r < offsets[g + 1]; ++r) want += a[r * kN + i] * b[r * kK + j];
    if (!(std::abs(c[at] - want) <= 1e-5)) FAIL("element " << at << " is " << c[at] << ", not " << want);
  }
}

TEST_CASE("a group does not depend on the others", "[grouped_gemm]") {
  constexpr int64_t kN = 96, kK = 64, kRows = 40;
  TestTensor a = TestTensor::Random(DType::kF32, {2 * kRows, kK}, 1),
             b = TestTensor::Random(DType::kF32, {3, kN, kK}, 2);
  TestTensor together(DType::kF32, {2 * kRows, kN}), alone(DType::kF32, {kRows, kN});
  std::vector<int32_t> offsets{0, kRows, kRows, 2 * kRows}, one{0, kRows};
  OnEveryCpu(
      {&together, &alone},
      [&](const KernelTable& kernels, const KernelContext& context) {
        GroupedMatmulArgs args;
        args.a = a.view(), args.b = b.view(), args.c = together.view();
        args.offsets = {offsets.data(), DType::kI32, {4}};
        kernels.grouped_matmul(context, args);
        args.a = a.view().Rows(kRows, kRows);
        args.b = b.view().Slice(2 * kN * kK, kN * kK).Reshaped({1, kN, kK});
        args.c = alone.view();
        args.offsets = {one.data(), DType::kI32, {2}};
        kernels.grouped_matmul(context, args);
      },
      [&] {
        const std::vector<char>& all = together.bytes();
        CHECK(std::equal(alone.bytes().begin(), alone.bytes().end(),
                         all.begin() + static_cast<std::ptrdiff_t>(all.size() / 2)));
      });
}

TEST_CASE("groups whose panels do not fit memory together", "[grouped_gemm]") {
  constexpr int64_t kGroups = 8, kRows = 512, kN = 512, kK = 1200;  // 655,360 floats of four million each
  TestTensor a = TestTensor::Random(DType::kF32, {kGroups * kRows, kK}, 1, -1, 1);
  TestTensor b = TestTensor::Random(DType::kF32, {kGroups, kN, kK}, 2, -1, 1);
  TestTensor together(DType::kF32, {kGroups * kRows, kN}), alone(DType::kF32, {kRows, kN});
  std::vector<int32_t> offsets, one{0, kRows};
  for (int32_t g = 0; g <= kGroups; ++g) offsets.push_back(g * static_cast<int32_t>(kRows));
  const std::unique_ptr<Device> device = NewCpuDevice(2);
  const KernelContext context{&device->pool(), device->compute_stream(), &device->allocator()};
  GroupedMatmulArgs args;
  args.a = a.view(), args.b = b.view(), args.c = together.view();
  args.offsets = {offsets.data(), DType::kI32, {kGroups + 1}};
  CpuKernels().grouped_matmul(context, args);
  for (int64_t g : {int64_t{0}, kGroups - 1}) {
    args.a = a.view().Rows(g * kRows, kRows);
    args.b = b.view().Slice(g * kN * kK, kN * kK).Reshaped({1, kN, kK});
    args.c = alone.view();
    args.offsets = {one.data(), DType::kI32, {2}};
    CpuKernels().grouped_matmul(context, args);
    CHECK(std::ranges::equal(
        alone.bytes(), std::span(together.bytes())
                           .subspan(static_cast<size_t>(g) * alone.bytes().size(), alone.bytes().size())));
  }
}

}  // namespace
}  // namespace strata
