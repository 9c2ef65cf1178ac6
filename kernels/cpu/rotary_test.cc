// Rotary embedding against double-precision sines, at positions up to a million.
#include "kernels/cpu/kernel_testing.h"

namespace strata {
namespace {

using testing::CheckClose;
using testing::OnEveryCpu;
using testing::TestTensor;

struct Case {
  int64_t batch, len, num_heads, head_dim, n;  // n pairs of each head turn
  int64_t position_offset = 0;
  bool positions = false;
};

TEST_CASE("rotary turns pairs by halves, and inverse turns them back", "[rotary]") {
  const Case cases[] = {
      {1, 1, 1, 2, 1},
      {2, 5, 3, 8, 4},
      {2, 7, 2, 64, 32, 1000},
      {1, 3, 4, 80, 40},
      {2, 3, 2, 33, 13},
      {1, 4, 2, 128, 64, 999'990},
      {2, 3, 2, 64, 32, 0, true},
      {3, 0, 2, 8, 4},
  };
  for (DType dtype : testing::kFloatTypes) {
    for (const Case& c : cases) {
      INFO(Name(dtype) << " heads " << c.num_heads << " of " << c.head_dim << ", pairs " << c.n);
      const int64_t width = c.num_heads * c.head_dim + 3;  // columns of others, right of the heads
      TestTensor x = TestTensor::Random(dtype, {c.batch * c.len, width}, 1), back = x;
      const std::vector<double> before = x.values();
      std::vector<float> inv_freq;
      for (int64_t i = 0; i < c.n; ++i) {
        inv_freq.push_back(static_cast<float>(std::pow(10000.0, -static_cast<double>(i) / c.n)));
      }
      TestTensor frequencies = TestTensor::Of(inv_freq, {c.n});
      std::vector<int32_t> position_list;
      for (int64_t row = 0; row < c.batch * c.len; ++row) {
        position_list.push_back(
            static_cast<int32_t>(c.positions ? row * 174'761 % 1'000'003 : c.position_offset + row % c.len));
      }
      TestTensor positions = TestTensor::Ints(position_list);

      std::vector<double> turned = before, turned_back = before;
      for (int64_t row = 0; row < c.batch * c.len; ++row) {
        for (int64_t h = 0; h < c.num_heads; ++h) {
          for (int64_t i = 0; i < c.n; ++i) {
            const double angle = static_cast<double>(position_list[row]) * double{inv_freq[i]};
            const int64_t first = row * width + h * c.head_dim + i, second = first + c.n;
            const double a = before[first], b = before[second];
            turned[first] = a * std::cos(angle) - b * std::sin(angle);
            turned[second] = b * std::cos(angle) + a * std::sin(angle);
            turned_back[first] = a * std::cos(angle) + b * std::sin(angle);
            turned_back[second] = b * std::cos(angle) - a * std::sin(angle);
          }
        }
      }
      const auto args = [&](TestTensor& data, bool inverse) {
        return RotaryArgs{{data.view().data, dtype, c.len * width, width},
                          c.batch,
                          c.len,
                          c.num_heads,
                          c.head_dim,
                          frequencies.view(),
                          c.positions ? positions.view() : TensorView(),
                          c.position_offset,
                          inverse};
      };
      OnEveryCpu(
          {&x, &back},
          [&](const KernelTable& kernels, const KernelContext& context) {
            kernels.rotary(context, args(x, false));
            kernels.rotary(context, args(back, true));
          },
          [&] {
            CheckClose(x, turned, 5e-7);
            CheckClose(back, turned_back, 5e-7);
          });
    }
  }
}

}  // namespace
}  // namespace strata
