// simd.h against libm in double precision, for each instruction set this processor has.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kernels/kernel_table.h"

#define STRATA_CPU_ISA cpu_scalar
#include "kernels/cpu/simd_probe.h"
#undef STRATA_CPU_ISA
#define STRATA_CPU_ISA cpu_avx2
#include "kernels/cpu/simd_probe.h"
#undef STRATA_CPU_ISA
#define STRATA_CPU_ISA cpu_avx512
#include "kernels/cpu/simd_probe.h"
#undef STRATA_CPU_ISA

namespace strata {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kTiny = std::numeric_limits<float>::denorm_min();

template <typename Body>
void ForEachIsa(const Body& body) {
  for (CpuIsa isa : SupportedCpuIsas()) {
    if (isa == CpuIsa::kAvx512Bf16) continue;  // shares the vectors of kAvx512
    INFO("instruction set " << Name(isa));
    body(isa == CpuIsa::kScalar ? cpu_scalar::Probe()
         : isa == CpuIsa::kAvx2 ? cpu_avx2::Probe()
                                : cpu_avx512::Probe());
  }
}

std::vector<float> Apply(SimdProbe::Map map, const std::vector<float>& x) {
  std::vector<float> y(x.size(), kNan);
  map(x.data(), y.data(), static_cast<int64_t>(x.size()));
  return y;
}

// The distance of floats around `exact`.
double Ulp(double exact) {
  const float magnitude = std::min(std::abs(static_cast<float>(exact)), std::numeric_limits<float>::max());
  const float above = std::nextafter(magnitude, kInfinity);
  return above == kInfinity ? 0x1p104 : double{above} - double{magnitude};
}

// The largest error of `map` over `x`, in units of the last place of the exact value.
template <typename Exact>
double WorstUlps(SimdProbe::Map map, const std::vector<float>& x, Exact exact) {
  const std::vector<float> y = Apply(map, x);
  double worst = 0;
  float where = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double want = exact(double{x[i]});
    const double error = y[i] == static_cast<float>(want) ? 0 : std::abs(y[i] - want) / Ulp(want);
    if (!(error <= worst)) worst = error, where = x[i];
  }
  UNSCOPED_INFO("worst at " << where << ": " << worst << " ulp");
  return worst;
}

std::vector<float> Uniform(float low, float high, int n) {
  std::mt19937 random(7);
  std::uniform_real_distribution<float> draw(low, high);
  std::vector<float> x(n);
  for (float& v : x) v = draw(random);
  return x;
}

// ± every magnitude from the smallest subnormal to the largest finite float, at random mantissas.
std::vector<float> AllMagnitudes(bool negative_too) {
  std::mt19937 random(11);
  std::vector<float> x;
  for (uint32_t top = 0; top < 0x7f80; ++top) {
    const float v = std::bit_cast<float>((top << 16) | static_cast<uint32_t>(random() & 0xffffu));
    x.push_back(v == 0 ? kTiny : v);
    if (negative_too) x.push_back(-x.back());
  }
  return x;
}

TEST_CASE("Exp is within 2 ulp up to overflow and never subnormal", "[simd]") {
  ForEachIsa([](const SimdProbe& simd) {
    const auto exact = [](double x) { return x < -87.33654f ? 0.0 : std::exp(x); };
    CHECK(WorstUlps(simd.exp, Uniform(-104, 89, 200001), exact) < 2);
    CHECK(WorstUlps(simd.exp, Uniform(-1, 1, 50001), exact) < 2);
    CHECK(WorstUlps(simd.exp, AllMagnitudes(true), exact) < 2);
    const std::vector<float> y =
        Apply(simd.exp, {0.0f, -kInfinity, kInfinity, kNan, -1e30f, 88.8f, -87.5f, -87.33f});
    CHECK(y[0] == 1.0f);
    CHECK(y[1] == 0.0f);
    CHECK(y[2] == kInfinity);
    CHECK(std::isnan(y[3]));
    CHECK(y[4] == 0.0f);
    CHECK(y[5] == kInfinity);
    CHECK(y[6] == 0.0f);
  });
}

TEST_CASE("Log is within 2 ulp over all positive floats", "[simd]") {
  ForEachIsa([](const SimdProbe& simd) {
    const auto exact = [](double x) { return std::log(x); };
    CHECK(WorstUlps(simd.log, AllMagnitudes(false), exact) < 2);
    CHECK(WorstUlps(simd.log, Uniform(0.4f, 2.5f, 200001), exact) < 2);
    const std::vector<float> y = Apply(simd.log, {1.0f, 0.0f, -0.0f, kInfinity, -1.0f, -kInfinity, kNan});
    CHECK(y[0] == 0.0f);
    CHECK(y[1] == -kInfinity);
    CHECK(y[2] == -kInfinity);
    CHECK(y[3] == kInfinity);
    CHECK(std::isnan(y[4]));
    CHECK(std::isnan(y[5]));
    CHECK(std::isnan(y[6]));
  });
}

TEST_CASE("Tanh and Sigmoid are within 4 ulp, Erf within 8, over all floats", "[simd]") {
  ForEachIsa([](const SimdProbe& simd) {
    const auto exact_tanh = [](double x) { return std::tanh(x); };
    const auto exact_erf = [](double x) { return std::erf(x); };
    const auto exact_sigmoid = [](double x) { return 1 / (1 + std::exp(-x)); };
    for (const std::vector<float>& x :
         {AllMagnitudes(true), Uniform(-10, 10, 200001), Uniform(-1, 1, 50001)}) {
      CHECK(WorstUlps(simd.tanh, x, exact_tanh) < 4);
      CHECK(WorstUlps(simd.erf, x, exact_erf) < 8);
    }
    CHECK(WorstUlps(simd.sigmoid, Uniform(-80, 80, 200001), exact_sigmoid) < 4);
    for (SimdProbe::Map map : {simd.tanh, simd.erf}) {
      const std::vector<float> y = Apply(map, {0.0f, kInfinity, -kInfinity, kNan});
      CHECK(y[0] == 0.0f);
      CHECK(y[1] == 1.0f);
      CHECK(y[2] == -1.0f);
      CHECK(std::isnan(y[3]));
    }
    const std::vector<float> y = Apply(simd.sigmoid, {kInfinity, -kInfinity, kNan});
    CHECK(y[0] == 1.0f);
    CHECK(y[1] == 0.0f);
    CHECK(std::isnan(y[2]));
  });
}

TEST_CASE("Sqrt is correctly rounded; Min and Max give the second operand for NaN", "[simd]") {
  ForEachIsa([](const SimdProbe& simd) {
    const std::vector<float> x = AllMagnitudes(false);
    const std::vector<float> y = Apply(simd.sqrt, x);
    for (size_t i = 0; i < x.size(); ++i) REQUIRE(y[i] == std::sqrt(x[i]));

    float a[16], b[16], low[16], high[16];
    for (int i = 0; i < 16; ++i) a[i] = static_cast<float>(i % 3), b[i] = static_cast<float>(i % 2);
    a[0] = kNan;
    b[1] = kNan;
    simd.min(a, b, low);
    simd.max(a, b, high);
    CHECK(low[0] == b[0]);
    CHECK(high[0] == b[0]);
    CHECK(std::isnan(low[1]));
    CHECK(std::isnan(high[1]));
    for (int i = 2; i < simd.lanes; ++i) {
      CHECK(low[i] == std::min(a[i], b[i]));
      CHECK(high[i] == std::max(a[i], b[i]));
    }
  });
}

TEST_CASE("reductions see every lane", "[simd]") {
  ForEachIsa([](const SimdProbe& simd) {
    for (int lane = 0; lane < simd.lanes; ++lane) {
      float x[16] = {};
      std::fill(x, x + 16, -3.0f);
      x[lane] = 40.0f;
      CHECK(simd.reduce_max(x) == 40.0f);
      CHECK(simd.reduce_add(x) == 40.0f - 3.0f * static_cast<float>(simd.lanes - 1));
    }
  });
}

// Memory that ends where a protected page begins.
class GuardedPage {
 public:
  GuardedPage() {
    size_ = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    begin_ = static_cast<char*>(
        mmap(nullptr, 2 * size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    REQUIRE(begin_ != MAP_FAILED);
    REQUIRE(mprotect(begin_ + size_, size_, PROT_NONE) == 0);
  }
  ~GuardedPage() { munmap(begin_, 2 * size_); }
  template <typename T>
  T* Last(int n) {
    return reinterpret_cast<T*>(begin_ + size_) - n;
  }

 private:
  char* begin_;
  size_t size_;
};

template <typename From, typename To>
void CheckPartial(void (*convert)(const From*, To*, int), int lanes) {
  GuardedPage in, out;
  for (int n = 0; n <= lanes; ++n) {
    INFO("n " << n);
    // Up against the protected page: a touch beyond n is a fault.
    From* from = in.Last<From>(n);
    To* to = out.Last<To>(n);
    for (int i = 0; i < n; ++i) from[i] = From(static_cast<float>(i + 1));
    convert(from, to, n);
    for (int i = 0; i < n; ++i) CHECK(static_cast<float>(to[i]) == static_cast<float>(i + 1));
    // Inside the page: what lies behind n keeps its bits.
    To room[17];
    std::memset(static_cast<void*>(room), 0x5a, sizeof room);
    To untouched = room[16];
    convert(from, room, n);
    for (int i = n; i < 17; ++i) CHECK(std::memcmp(&room[i], &untouched, sizeof untouched) == 0);
  }
}

TEST_CASE("partial loads and stores touch n elements", "[simd]") {
  ForEachIsa([](const SimdProbe& simd) {
    CheckPartial(simd.copy_f32, simd.lanes);
    CheckPartial(simd.load_bf16, simd.lanes);
    CheckPartial(simd.store_bf16, simd.lanes);
    CheckPartial(simd.load_f16, simd.lanes);
    CheckPartial(simd.store_f16, simd.lanes);
  });
}

template <typename T>
void CheckConversions(void (*load)(const T*, float*, int), void (*store)(const float*, T*, int), int lanes) {
  // All 65536 patterns widen as T itself does.
  std::vector<T> narrow(65536);
  for (size_t i = 0; i < narrow.size(); ++i) narrow[i].bits = static_cast<uint16_t>(i);
  std::vector<float> wide(narrow.size());
  for (size_t i = 0; i < narrow.size(); i += lanes) load(&narrow[i], &wide[i], lanes);
  for (size_t i = 0; i < narrow.size(); ++i) {
    const float want = static_cast<float>(narrow[i]);
    if (std::isnan(want) ? !std::isnan(wide[i])
                         : std::bit_cast<uint32_t>(wide[i]) != std::bit_cast<uint32_t>(want)) {
      FAIL_CHECK("pattern " << i << " became " << wide[i] << ", not " << want);
    }
  }
  // Floats of every magnitude, the halfway points and their neighbours, and NaN narrow as T itself does.
  std::vector<float> x = AllMagnitudes(true);
  for (size_t i = 0; i + 1 < wide.size(); ++i) {
    if (!std::isfinite(wide[i]) || !std::isfinite(wide[i + 1])) continue;
    const float half = static_cast<float>((double{wide[i]} + double{wide[i + 1]}) / 2);
    for (float v : {half, std::nextafter(half, -kInfinity), std::nextafter(half, kInfinity)}) x.push_back(v);
  }
  for (float v : {kInfinity, -kInfinity, kNan, std::bit_cast<float>(0x7f800001u), 65519.0f, 65520.0f})
    x.push_back(v);
  x.resize(x.size() / lanes * lanes + lanes, 0.0f);
  std::vector<T> y(x.size());
  for (size_t i = 0; i < x.size(); i += lanes) store(&x[i], &y[i], lanes);
  for (size_t i = 0; i < x.size(); ++i) {
    const T want(x[i]);
    if (std::isnan(x[i]) ? !std::isnan(static_cast<float>(y[i])) : y[i].bits != want.bits) {
      FAIL_CHECK(x[i] << " became pattern " << y[i].bits << ", not " << want.bits);
    }
  }
}

TEST_CASE("bf16 and fp16 convert as the storage types do", "[simd]") {
  ForEachIsa([](const SimdProbe& simd) {
    CheckConversions<BFloat16>(simd.load_bf16, simd.store_bf16, simd.lanes);
    CheckConversions<Half>(simd.load_f16, simd.store_f16, simd.lanes);
  });
}

}  // namespace
}  // namespace strata
