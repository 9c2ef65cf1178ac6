#include "kernels/cpu/peak.h"

#include <algorithm>
#include <chrono>
#include <memory>

#include "kernels/kernel_table.h"
#include "runtime/base/allocator.h"

#define STRATA_CPU_ISA cpu_scalar
#include "kernels/cpu/peak_loops.h"
#undef STRATA_CPU_ISA
#define STRATA_CPU_ISA cpu_avx2
#include "kernels/cpu/peak_loops.h"
#undef STRATA_CPU_ISA
#define STRATA_CPU_ISA cpu_avx512
#include "kernels/cpu/peak_loops.h"
#undef STRATA_CPU_ISA
#define STRATA_CPU_ISA cpu_avx512_bf16
#include "kernels/cpu/peak_loops.h"
#undef STRATA_CPU_ISA

namespace strata {
namespace {

struct Loops {
  int64_t (*fma)(int64_t rounds);
  int64_t (*bf16_dot)(int64_t rounds);
  void (*triad)(float* a, const float* b, const float* c, float s, int64_t n, bool stream);
};

Loops FastestLoops() {
  switch (SupportedCpuIsas().back()) {
    case CpuIsa::kScalar:
      break;
    case CpuIsa::kAvx2:
      return {cpu_avx2::FmaLoop, cpu_avx2::Bf16DotLoop, cpu_avx2::Triad};
    case CpuIsa::kAvx512:
      return {cpu_avx512::FmaLoop, cpu_avx512::Bf16DotLoop, cpu_avx512::Triad};
    case CpuIsa::kAvx512Bf16:
      return {cpu_avx512_bf16::FmaLoop, cpu_avx512_bf16::Bf16DotLoop, cpu_avx512_bf16::Triad};
  }
  return {cpu_scalar::FmaLoop, cpu_scalar::Bf16DotLoop, cpu_scalar::Triad};
}

double Seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// The best rate of `runs` runs of `work`, which gives an amount, in 10⁹ a second.
template <typename Work>
double BestRate(int runs, const Work& work) {
  double best = 0;
  for (int run = 0; run < runs; ++run) {
    const double begin = Seconds();
    const double amount = work();
    best = std::max(best, amount / (Seconds() - begin) * 1e-9);
  }
  return best;
}

double MeasureLoop(ThreadPool& pool, double seconds, int64_t (*loop)(int64_t rounds)) {
  // Many short runs, so that some go undisturbed even where other programs want the processor. A round takes
  // some 5 ns.
  const int runs = std::max(20, static_cast<int>(seconds / 1e-3));
  const int64_t rounds = std::max<int64_t>(1, static_cast<int64_t>(seconds / runs / 5e-9));
  return BestRate(runs, [&] {
    int64_t operations = 0;
    pool.Run([&](int thread) {
      const int64_t done = loop(rounds);
      if (thread == 0) operations = done;
    });
    return static_cast<double>(operations) * pool.num_threads();
  });
}

}  // namespace

double MeasureFmaPeak(ThreadPool& pool, double seconds) {
  return MeasureLoop(pool, seconds, FastestLoops().fma);
}

double MeasureBf16DotPeak(ThreadPool& pool, double seconds) {
  return MeasureLoop(pool, seconds, FastestLoops().bf16_dot);
}

double MeasureTriad(ThreadPool& pool, int64_t bytes) {
  const int threads = pool.num_threads();
  const int64_t n = std::max<int64_t>(1, bytes / 12 / threads / 16) * 16;  // of each array, for each thread
  const std::unique_ptr<MemorySource> source = NewHostMemorySource();
  Allocator allocator(*source);
  const Buffer buffer = allocator.Allocate(3 * n * threads * sizeof(float), MemoryTag::kBuffers);
  float* const a = static_cast<float*>(buffer.data());
  float* const b = a + n * threads;
  float* const c = b + n * threads;
  // Every thread touches its own part first, which decides where its pages lie.
  pool.Run([&](int thread) {
    for (float* array : {a, b, c}) std::fill_n(array + thread * n, n, 1.0f);
  });

  const Loops loops = FastestLoops();
  const auto triad = [&](bool stream) {
    return BestRate(8, [&] {
      pool.Run([&](int thread) {
        const int64_t at = thread * n;
        loops.triad(a + at, b + at, c + at, 0.5f, n, stream);
      });
      return 12.0 * static_cast<double>(n * threads);
    });
  };
  return std::max(triad(false), triad(true));
}

}  // namespace strata
