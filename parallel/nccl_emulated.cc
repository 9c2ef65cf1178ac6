// The emulated NCCL, for the emulated GPUs.
#include "kernels/simt/emulated_nccl.h"
#include "parallel/nccl_api.h"

namespace strata {

const NcclApi* FindNccl(std::string* why_not) {
  static const NcclApi api = {
#define STRATA_NCCL_FUNCTION(name) .name = &nccl##name,
      STRATA_NCCL_FUNCTIONS(STRATA_NCCL_FUNCTION)
#undef STRATA_NCCL_FUNCTION
  };
  const bool absent = simt::EmulatedNcclFaults().absent;
  *why_not = absent ? "the emulated machine has no NCCL" : "";
  return absent ? nullptr : &api;
}

}  // namespace strata
