#include "zero/zero_options.h"

#include "runtime/base/error.h"

namespace strata {

void ZeroOptions::Validate() const {
  if (stage < 0 || stage > 3) {
    throw ConfigError(StrCat("zero.stage: ", stage, " is no stage"), "choose 0, 1, 2 or 3");
  }
  if (stage >= 2 && reduce == Reduce::kStep) {
    throw ConfigError(StrCat("zero.reduce: step needs whole gradients on every rank, which stage ", stage,
                             " does not keep"),
                      "choose zero.reduce: micro_batch, or stage 0 or 1");
  }
  if (offload.uses(Tier::kNvme) && offload.path.empty()) {
    throw ConfigError("zero.offload: state rests on nvme, and zero.offload.nvme.path names no folder",
                      "give a folder on a local disk");
  }
}

}  // namespace strata
