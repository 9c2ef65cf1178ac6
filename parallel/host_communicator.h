// CommEngine: a rank's communicators, whichever way their bytes go.
//
// Between host memories they travel over a Transport, run by one communication thread a rank, beside
// computation. Tensors may also lie in the memory of `CommOptions::device`, where that is another than the
// host's: then they go by NCCL between GPUs (parallel/nccl_communicator.h), or through host copies where NCCL
// cannot serve the group (parallel/device_staging.h).
#pragma once

#include <memory>

#include "parallel/comm_options.h"
#include "parallel/communicator.h"
#include "parallel/transport.h"

namespace strata {

/// A rank's communication thread. Owns the order of all operations of its communicators; outlives them.
class CommEngine {
 public:
  CommEngine(Transport& transport, CommOptions options);
  ~CommEngine();
  CommEngine(const CommEngine&) = delete;
  CommEngine& operator=(const CommEngine&) = delete;

  Transport& transport() const;
  /// The group of `ranks` (ranks of the job, ascending, this one among them). Called by all ranks of the job
  /// in the same order, each with its own group along the axis.
  std::unique_ptr<Communicator> NewCommunicator(std::vector<int> ranks, std::string axis);
  void set_tracer(Tracer* tracer);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace strata
