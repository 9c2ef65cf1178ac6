#include "tools/known_gpus.h"

namespace strata {

std::span<const KnownGpu> KnownGpus() {
  static constexpr KnownGpu kGpus[] = {
      {"a100-40gb", 40960, 312, 19.5},    {"a100-80gb", 81920, 312, 19.5},  {"h100-80gb", 81559, 989, 67},
      {"h200-141gb", 143771, 989, 67},    {"b200-180gb", 183359, 2250, 75}, {"l40s-48gb", 46068, 362, 91.6},
      {"rtx4090-24gb", 24564, 165, 82.6},
  };
  return kGpus;
}

const KnownGpu* FindKnownGpu(std::string_view name) {
  for (const KnownGpu& gpu : KnownGpus()) {
    if (gpu.name == name) return &gpu;
  }
  return nullptr;
}

}  // namespace strata
