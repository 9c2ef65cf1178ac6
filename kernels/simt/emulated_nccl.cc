// NCCL's interface over messages between the emulated GPUs: every collective posts what its peers need, takes
// what it needs from them, and computes it itself.
#include "kernels/simt/emulated_nccl.h"

#include <nccl.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/simt/emulator.h"
#include "runtime/base/dtype.h"

namespace simt {
namespace {

using Bytes = std::vector<char>;

// The ranks that were given one id.
struct Clique {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::pair<int, int>, std::deque<Bytes>> messages;  // by sender and receiver
};

struct Cliques {
  std::mutex mutex;
  uint64_t next_id = 1;
  std::map<uint64_t, std::weak_ptr<Clique>> by_id;
};

Cliques& TheCliques() {
  static Cliques cliques;
  return cliques;
}

std::atomic<int> num_communicators{0};

size_t SizeOf(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclFloat32:
      return 4;
    default:
      return 8;
  }
}

// Each sum rounded to the type, as NCCL passes it on. An extreme over a NaN is one.
template <typename T>
void Combine(T* sum, const T* term, size_t count, ncclRedOp_t op) {
  using Acc = std::conditional_t<std::is_integral_v<T> || sizeof(T) >= 4, T, float>;
  for (size_t i = 0; i < count; ++i) {
    const auto a = static_cast<Acc>(sum[i]), b = static_cast<Acc>(term[i]);
    if (op == ncclSum) {
      sum[i] = static_cast<T>(a + b);
    } else if (const bool keep = op == ncclMax ? b <= a : b >= a; !keep && a == a) {
      sum[i] = term[i];
    }
  }
}

void Combine(void* sum, const void* term, size_t count, ncclDataType_t type, ncclRedOp_t op) {
  const auto combine = [&]<typename T>(T* to) { Combine(to, static_cast<const T*>(term), count, op); };
  switch (type) {
    case ncclInt32:
      return combine(static_cast<int32_t*>(sum));
    case ncclInt64:
      return combine(static_cast<int64_t*>(sum));
    case ncclFloat32:
      return combine(static_cast<float*>(sum));
    case ncclFloat64:
      return combine(static_cast<double*>(sum));
    case ncclFloat16:
      return combine(static_cast<strata::Half*>(sum));
    case ncclBfloat16:
      return combine(static_cast<strata::BFloat16*>(sum));
    case ncclInt8:
      return combine(static_cast<int8_t*>(sum));
  }
}

// Sends and receives between ncclGroupStart and ncclGroupEnd are one piece of work.
struct OpenGroup {
  int depth = 0;
  cudaStream_t stream = nullptr;
  ncclComm_t comm = nullptr;
  std::vector<std::function<void()>> sends, receives;
};
thread_local OpenGroup group;

}  // namespace

NcclFaults& EmulatedNcclFaults() {
  static NcclFaults faults;
  return faults;
}

int NumNcclCommunicators() { return num_communicators; }

}  // namespace simt

// What outlives the handle: work that was started with it.
struct CommState {
  int rank, ranks;
  std::shared_ptr<simt::Clique> clique;
  bool aborted = false;  // guarded by the clique's mutex

  void Post(int to, const void* from, size_t bytes) {
    std::lock_guard lock(clique->mutex);
    const char* const begin = static_cast<const char*>(from);
    clique->messages[{rank, to}].emplace_back(begin, begin + bytes);
    clique->changed.notify_all();
  }
  // Empty when the communicator was aborted.
  simt::Bytes Take(int from) {
    std::unique_lock lock(clique->mutex);
    auto& box = clique->messages[{from, rank}];
    clique->changed.wait(lock, [&] { return aborted || !box.empty(); });
    if (aborted) return {};
    simt::Bytes message = std::move(box.front());
    box.pop_front();
    return message;
  }
  void TakeTo(int from, void* to, size_t bytes) {
    const simt::Bytes message = Take(from);
    std::memcpy(to, message.data(), std::min(bytes, message.size()));
  }
};

struct ncclComm {
  std::shared_ptr<CommState> state;
};

namespace simt {
namespace {

ncclResult_t Launch(ncclComm_t comm, cudaStream_t stream, std::function<void(CommState&)> work) {
  if (EmulatedNcclFaults().stuck) return ncclInProgress;
  Enqueue(stream, [state = comm->state, work = std::move(work)] { work(*state); });
  return ncclInProgress;  // until the next question: callers must ask
}

// to = the sum of all ranks' `count` elements, in the order of ranks.
void ReduceTo(CommState& state, const void* mine, void* to, size_t count, ncclDataType_t type,
              ncclRedOp_t op) {
  const size_t bytes = count * SizeOf(type);
  const Bytes own(static_cast<const char*>(mine), static_cast<const char*>(mine) + bytes);
  for (int r = 0; r < state.ranks; ++r) {
    const Bytes term = r == state.rank ? own : state.Take(r);
    if (term.size() != bytes) return;
    if (r == 0) {
      std::memcpy(to, term.data(), bytes);
    } else {
      Combine(to, term.data(), count, type, op);
    }
  }
}

ncclResult_t EndGroup() {
  if (--group.depth > 0) return ncclSuccess;
  OpenGroup ended = std::exchange(group, OpenGroup());
  if (!ended.comm) return ncclSuccess;
  return Launch(ended.comm, ended.stream,
                [sends = std::move(ended.sends), receives = std::move(ended.receives)](CommState&) {
                  for (const auto& send : sends) send();
                  for (const auto& receive : receives) receive();
                });
}

}  // namespace
}  // namespace simt

using simt::Launch;

const char* ncclGetErrorString(ncclResult_t result) {
  return result == ncclRemoteError ? "remote process exited or there was a network error" : "NCCL error";
}
const char* ncclGetLastError(ncclComm_t) { return "the emulated network is down"; }

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  simt::Cliques& cliques = simt::TheCliques();
  std::lock_guard lock(cliques.mutex);
  const uint64_t words[] = {cliques.next_id++, static_cast<uint64_t>(getpid())};
  *id = {};
  std::memcpy(id->internal, words, sizeof(words));
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t*) {
  uint64_t words[2];
  std::memcpy(words, id.internal, sizeof(words));
  const auto [number, process] = words;
  if (process != static_cast<uint64_t>(getpid())) return ncclSystemError;
  simt::Cliques& cliques = simt::TheCliques();
  std::lock_guard lock(cliques.mutex);
  std::shared_ptr<simt::Clique> clique = cliques.by_id[number].lock();
  if (!clique) cliques.by_id[number] = clique = std::make_shared<simt::Clique>();
  *comm = new ncclComm{std::make_shared<CommState>(CommState{rank, ranks, std::move(clique)})};
  ++simt::num_communicators;
  return ncclInProgress;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
  const simt::NcclFaults& faults = simt::EmulatedNcclFaults();
  *error = faults.remote_error ? ncclRemoteError : faults.stuck ? ncclInProgress : ncclSuccess;
  return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclInProgress; }

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  delete comm;
  --simt::num_communicators;
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  {
    std::lock_guard lock(comm->state->clique->mutex);
    comm->state->aborted = true;
    comm->state->clique->changed.notify_all();
  }
  return ncclCommDestroy(comm);
}

ncclResult_t ncclGroupStart() {
  ++simt::group.depth;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() { return simt::EndGroup(); }

ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  ncclGroupStart();
  simt::group.comm = comm;
  simt::group.stream = stream;
  simt::group.sends.push_back(
      [=, state = comm->state, bytes = count * simt::SizeOf(type)] { state->Post(peer, from, bytes); });
  return ncclGroupEnd();
}

ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  ncclGroupStart();
  simt::group.comm = comm;
  simt::group.stream = stream;
  simt::group.receives.push_back(
      [=, state = comm->state, bytes = count * simt::SizeOf(type)] { state->TakeTo(peer, to, bytes); });
  return ncclGroupEnd();
}

ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  return Launch(comm, stream, [=, bytes = count * simt::SizeOf(type)](CommState& state) {
    char* const out = static_cast<char*>(to);
    if (out + state.rank * bytes != from) std::memcpy(out + state.rank * bytes, from, bytes);
    for (int r = 0; r < state.ranks; ++r) {
      if (r != state.rank) state.Post(r, out + state.rank * bytes, bytes);
    }
    for (int r = 0; r < state.ranks; ++r) {
      if (r != state.rank) state.TakeTo(r, out + r * bytes, bytes);
    }
  });
}

ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
  return Launch(comm, stream, [=, bytes = count * simt::SizeOf(type)](CommState& state) {
    const char* const in = static_cast<const char*>(from);
    for (int r = 0; r < state.ranks; ++r) {
      if (r != state.rank) state.Post(r, in + r * bytes, bytes);
    }
    simt::ReduceTo(state, in + state.rank * bytes, to, count, type, op);
  });
}

ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
  return Launch(comm, stream, [=, bytes = count * simt::SizeOf(type)](CommState& state) {
    for (int r = 0; r < state.ranks; ++r) {
      if (r != state.rank) state.Post(r, from, bytes);
    }
    simt::ReduceTo(state, from, to, count, type, op);
  });
}

ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  return Launch(comm, stream, [=, bytes = count * simt::SizeOf(type)](CommState& state) {
    if (state.rank != root) return state.TakeTo(root, to, bytes);
    for (int r = 0; r < state.ranks; ++r) {
      if (r != root) state.Post(r, from, bytes);
    }
    if (from != to) std::memcpy(to, from, bytes);
  });
}
