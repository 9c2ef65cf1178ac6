// NcclApi: the functions of NCCL that are used, wherever they come from.
//
// NVIDIA's library is opened at run time, so that a binary starts where it is not; a build for the emulator
// has the emulated one. Threading: a constant.
#pragma once

#include <nccl.h>

#include <string>

namespace strata {

#define STRATA_NCCL_FUNCTIONS(F) \
  F(GetErrorString)              \
  F(GetLastError)                \
  F(GetUniqueId)                 \
  F(CommInitRankConfig)          \
  F(CommGetAsyncError)           \
  F(CommFinalize)                \
  F(CommDestroy)                 \
  F(CommAbort)                   \
  F(GroupStart)                  \
  F(GroupEnd)                    \
  F(Send)                        \
  F(Recv)                        \
  F(AllGather)                   \
  F(ReduceScatter)               \
  F(AllReduce)                   \
  F(Broadcast)

struct NcclApi {
#define STRATA_NCCL_FUNCTION(name) decltype(&nccl##name) name = nullptr;
  STRATA_NCCL_FUNCTIONS(STRATA_NCCL_FUNCTION)
#undef STRATA_NCCL_FUNCTION
};

/// Null where there is no NCCL; `why_not` says then what is missing.
const NcclApi* FindNccl(std::string* why_not);

}  // namespace strata
