// What every communicator must do, whatever carries its messages: shared by the tests over threads and MPI.
// A rank that sees something else throws std::runtime_error. Threading: each rank calls with its own engine.
#pragma once

#include "parallel/host_communicator.h"

namespace strata {

/// Throws with `what` when `ok` is false.
void Expect(bool ok, const std::string& what);

/// Every collective, element type and a range of lengths against plain loops over all ranks' data, to the
/// bit.
void CheckCollectives(Communicator& comm);
/// The same bits for any cut into buckets, started together or one by one.
void CheckBuckets(Communicator& comm);
/// The traffic of each collective against its formula. `log` is the communicator's.
void CheckTraffic(Communicator& comm, TrafficLog& log);

}  // namespace strata
