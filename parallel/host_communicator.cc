#include "parallel/host_communicator.h"

#include <algorithm>
#include <utility>

#include "parallel/comm_thread.h"
#include "parallel/host_group.h"
#include "parallel/nccl_communicator.h"
#include "runtime/base/error.h"
#include "runtime/base/log.h"

namespace strata {
namespace {

// A device whose memory is the host's needs no care.
CommOptions WithOwnMemory(CommOptions options) {
  if (options.device && options.device->shares_host_memory()) options.device = nullptr;
  return options;
}

}  // namespace

struct CommEngine::Impl {
  CommThread thread;
  bool told = false;  // why NCCL is not used
};

CommEngine::CommEngine(Transport& transport, CommOptions options)
    : impl_(new Impl{{transport, WithOwnMemory(options)}}) {}

CommEngine::~CommEngine() = default;

Transport& CommEngine::transport() const { return impl_->thread.transport(); }

std::unique_ptr<Communicator> CommEngine::NewCommunicator(std::vector<int> ranks, std::string axis) {
  CommThread& thread = impl_->thread;
  const int rank = thread.transport().rank();
  const auto mine = std::find(ranks.begin(), ranks.end(), rank);
  STRATA_CHECK(mine != ranks.end() && std::is_sorted(ranks.begin(), ranks.end()))
      << "group of axis " << axis << " on rank " << rank;
  const int place = static_cast<int>(mine - ranks.begin());
  const int channel = thread.OpenChannel();
  auto host =
      std::make_unique<HostCommunicator>(thread, Group{std::move(ranks), place, channel, std::move(axis)});
  if (!thread.options().device) return host;
  std::string why_not;
  if (auto nccl = NewNcclCommunicator(host, &why_not)) return nccl;
  if (!std::exchange(impl_->told, true)) LogInfo("collectives go through host memory: {}", why_not);
  return host;
}

void CommEngine::set_tracer(Tracer* tracer) { impl_->thread.set_tracer(tracer); }

}  // namespace strata
