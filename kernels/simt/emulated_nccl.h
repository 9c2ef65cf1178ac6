// NCCL between the emulated GPUs of one process, with faults that tests set.
//
// A collective is work of its stream and runs late like any other; where a peer's part has not run, it waits
// for it, as a GPU does. Ownership: one for the process, as the emulated machine. Threading: any thread.
#pragma once

#include <atomic>

namespace simt {

struct NcclFaults {
  std::atomic<bool> absent{false};        // there is no such library
  std::atomic<bool> remote_error{false};  // every communicator reports an asynchronous error
  std::atomic<bool> stuck{false};         // operations are started and never get under way
};
NcclFaults& EmulatedNcclFaults();

/// Communicators of NCCL that exist now.
int NumNcclCommunicators();

}  // namespace simt
