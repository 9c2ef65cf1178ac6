// The collectives over a Transport, for host memory: one communication thread a rank runs them in order,
// beside computation.
#pragma once

#include <memory>

#include "parallel/communicator.h"
#include "parallel/transport.h"

namespace strata {

struct CommOptions {
  double timeout_s = 600;  // after which an absent rank is an error
  TrafficLog* traffic = nullptr;
  Tracer* tracer = nullptr;
};

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
