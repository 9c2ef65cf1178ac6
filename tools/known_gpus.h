// GPUs by name, for plans of machines that are not here. Threading: pure functions.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "runtime/base/dtype.h"

namespace strata {

struct KnownGpu {
  std::string_view name;  // "h100-80gb"
  int64_t memory_mib;     // as its driver reports it
  double bf16, fp32;      // TFLOP/s of dense products, by its data sheet: tensor cores, summing in fp32; FMA

  int64_t memory() const { return memory_mib << 20; }
  /// Floating-point operations a second of products of `dtype`.
  double Flops(DType dtype) const { return (dtype == DType::kF32 ? fp32 : bf16) * 1e12; }
};

std::span<const KnownGpu> KnownGpus();
/// That of the name, or null.
const KnownGpu* FindKnownGpu(std::string_view name);

}  // namespace strata
