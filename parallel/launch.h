// RunJob: the same program under mpirun, as threads of one process, or alone.
//
// Ownership: the job's transport lives while the body runs. Threading: called from main; under threads the
// body runs on several threads at once.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>

#include "parallel/transport.h"

namespace strata {

enum class Backend : uint8_t {
  kAuto,  // MPI where mpirun started this process, else a single rank
  kMpi,
  kThreads,
};

/// What a rank knows of the job it belongs to.
struct Job {
  int rank, world;
  Transport& transport;
};

/// Runs `body` on every rank of this process (`thread_ranks` of them under kThreads, else one), each under
/// its label in the log (SetThreadRank), and returns the highest exit status that they gave.
///
/// When a rank throws, `report` says so on that rank's thread, before anything else ends, and gives the exit
/// status. Then the other ranks are brought down: threads, by CommError in whatever they do or start next,
/// without another report; processes, at once, this one included. MPI is finalised before the return.
int RunJob(Backend backend, int thread_ranks, int* argc, char*** argv, const std::function<int(Job&)>& body,
           const std::function<int(const std::exception&)>& report);

/// How many ranks of the job run on this machine and share its cores.
int LocalRanks(const Transport& transport);

}  // namespace strata
