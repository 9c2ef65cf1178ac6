// Stands for NCCL where CUDA is not built in.
#include "parallel/nccl_communicator.h"

namespace strata {

std::unique_ptr<Communicator> NewNcclCommunicator(std::unique_ptr<HostCommunicator>&, std::string* why_not) {
  *why_not = "this build has no NCCL";
  return nullptr;
}

}  // namespace strata
