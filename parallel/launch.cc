#include "parallel/launch.h"

#include <algorithm>
#include <mutex>

#include "runtime/base/log.h"

namespace strata {
namespace {

using Body = std::function<int(Job&)>;
using Report = std::function<int(const std::exception&)>;

int RunProcess(int* argc, char*** argv, const Body& body, const Report& report) {
  const std::unique_ptr<Transport> transport = NewMpiTransport(argc, argv);
  SetThreadRank(transport->rank(), transport->size());
  Job job{transport->rank(), transport->size(), *transport};
  try {
    return body(job);
  } catch (const std::exception& e) {
    const int status = report(e);
    transport->Abort("", status);
    return status;
  }
}

int RunThreads(int size, const Body& body, const Report& report) {
  std::mutex mutex;
  bool failed = false;
  int status = 0;
  try {
    ThreadJob::Run(size, [&](Transport& transport) {
      Job job{transport.rank(), transport.size(), transport};
      try {
        const int mine = body(job);
        std::lock_guard lock(mutex);
        status = std::max(status, mine);
      } catch (const std::exception& e) {
        std::lock_guard lock(mutex);
        // Later ones are the first one's echo.
        if (!failed) status = report(e);
        failed = true;
        throw;
      }
    });
  } catch (const std::exception&) {
    // reported above
  }
  return status;
}

}  // namespace

int RunJob(Backend backend, int thread_ranks, int* argc, char*** argv, const Body& body,
           const Report& report) {
  if (backend == Backend::kAuto) {
    backend = StartedByMpi() ? Backend::kMpi : Backend::kThreads;
    thread_ranks = 1;
  }
  return backend == Backend::kMpi ? RunProcess(argc, argv, body, report)
                                  : RunThreads(thread_ranks, body, report);
}

int LocalRanks(const Transport& transport) { return transport.local_size(); }

}  // namespace strata
