// random_normal against RandomStream::Normal, and against itself on other instruction sets and layouts.
#include "kernels/cpu/kernel_testing.h"

namespace strata {
namespace {

using testing::kFloatTypes;
using testing::OnEveryCpu;
using testing::TestTensor;

TEST_CASE("random_normal is RandomStream::Normal, with the same bits everywhere", "[random]") {
  const RandomStream random{42, Purpose("init", 1), 3};
  TestTensor row_index = TestTensor::Ints({5, 0, 1000000, 3, 17});
  struct Layout {
    std::string name;
    int64_t rows, cols;
    GlobalIndex index;
  };
  const Layout layouts[] = {
      {"whole", 300, 257, {}},
      {"rows further on", 5, 6, {.row_offset = 13, .row_index = {}}},
      {"some columns", 9, 21, {.row_offset = 2, .row_index = {}, .col_offset = 5, .global_cols = 43}},
      {"listed rows", 5, 19, {.row_index = row_index.view(), .col_offset = 1, .global_cols = 22}},
      {"beyond 2^34", 4, 1031, {.row_offset = 17000000, .row_index = {}}},
      {"nothing", 0, 8, {}},
  };
  for (const Layout& layout : layouts) {
    for (DType dtype : kFloatTypes) {
      INFO(layout.name << ", " << Name(dtype));
      const GlobalIndex& index = layout.index;
      const int64_t global_cols = index.global_cols == 0 ? layout.cols : index.global_cols;
      TestTensor unit(dtype, {layout.rows, layout.cols}), moved(dtype, {layout.rows, layout.cols});
      std::vector<char> bits;
      OnEveryCpu(
          {&unit, &moved},
          [&](const KernelTable& k, const KernelContext& context) {
            k.random_normal(context, {unit.view(), random, index});
            k.random_normal(context, {moved.view(), random, index, 3.0f, 0.02f});
          },
          [&] {
            for (int64_t i = 0; i < unit.size(); ++i) {
              const int64_t row = i / layout.cols, col = i % layout.cols;
              const int64_t global_row =
                  index.row_index.defined() ? static_cast<int64_t>(row_index[row]) : index.row_offset + row;
              const auto global = static_cast<uint64_t>(global_row * global_cols + index.col_offset + col);
              const double want = random.Normal(global);
              const double rounding = testing::Epsilon(dtype);
              REQUIRE(std::abs(unit[i] - want) <= 1e-5 + rounding * std::abs(want));
              REQUIRE(std::abs(moved[i] - (3 + 0.02 * want)) <= 1e-6 + rounding * 3.2);
            }
            // The first instruction set's bits are what the others must give.
            if (bits.empty()) bits = unit.bytes();
            CHECK((bits == unit.bytes()));
          });
    }
  }
}

TEST_CASE("random_normal has the moments of the normal distribution", "[random]") {
  constexpr int64_t kCount = 1 << 20;
  TestTensor out(DType::kF32, {kCount});
  const std::unique_ptr<Device> device = NewCpuDevice(2);
  const KernelContext context{&device->pool(), device->compute_stream(), &device->allocator()};
  CpuKernels(SupportedCpuIsas().back()).random_normal(context, {out.view(), {7, 1, 0}, {}});
  double moment[5] = {}, neighbours = 0, within = 0;
  for (int64_t i = 0; i < kCount; ++i) {
    double power = 1;
    for (int m = 1; m <= 4; ++m) moment[m] += (power *= out[i]) / kCount;
    if (i > 0) neighbours += out[i] * out[i - 1] / kCount;
    within += (std::abs(out[i]) < 1) / double{kCount};
  }
  // Five standard deviations of each estimate.
  const double deviation = 5 / std::sqrt(double{kCount});
  CHECK(std::abs(moment[1]) < deviation);
  CHECK(std::abs(moment[2] - 1) < deviation * std::sqrt(2.0));
  CHECK(std::abs(moment[3]) < deviation * std::sqrt(15.0));
  CHECK(std::abs(moment[4] - 3) < deviation * std::sqrt(96.0));
  CHECK(std::abs(neighbours) < deviation);
  CHECK(std::abs(within - std::erf(std::sqrt(0.5))) < deviation * 0.5);
}

}  // namespace
}  // namespace strata
