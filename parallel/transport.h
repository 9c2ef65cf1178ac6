// Transport: bytes between pairs of ranks; what the host collectives are built from.
//
// One algorithm for each collective (direct exchange between all pairs, which moves the least bytes and sums
// in a fixed order) serves every transport. Because a collective is a set of messages, whoever waits too long
// knows from whom.
//
// A message carries a label; messages of one channel between one pair of ranks arrive in the order they were
// sent, and one whose label or size is not the expected one is reported rather than delivered. Channels keep
// groups apart.
//
// Threading: a transport is used by its rank's communication thread alone, except Abort.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace strata {

class Transport {
 public:
  /// A message under way.
  using Request = uint64_t;
  /// 23 bits: what the tags of every network under Open MPI can hold.
  static constexpr uint32_t kLabelLimit = uint32_t{1} << 23;
  struct Status {
    bool done = false;
    /// Set when the arrived message's label or size is another than the one asked for.
    bool mismatch = false;
    uint32_t label = 0;
    size_t bytes = 0;
  };

  virtual ~Transport() = default;
  /// This rank of the job, and how many there are.
  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// How many of them run on this machine and share its cores.
  virtual int local_size() const = 0;
  /// This rank's place among those.
  virtual int local_rank() const = 0;
  /// A new channel; all ranks of the job open channels in the same order.
  virtual int OpenChannel() = 0;
  /// Labels are below kLabelLimit, `from` and `to` live until the request is done or cancelled. All functions
  /// throw CommError when the job was aborted or the network fails.
  virtual Request Send(int channel, int peer, const void* from, size_t bytes, uint32_t label) = 0;
  virtual Request Receive(int channel, int peer, void* to, size_t bytes, uint32_t label) = 0;
  /// Moves messages along and reports on one; a done request is forgotten.
  virtual Status Test(Request request) = 0;
  /// Gives up every request of this rank after a failure: when it returns, none of their memory is touched
  /// any more. The peers are not told.
  virtual void Cancel() = 0;
  /// Tells the other ranks that this one failed. Threads: their pending and later operations throw CommError
  /// with `reason`. Processes: prints `reason` where it is not empty, and ends the whole job, this process
  /// included, with exit status `status`.
  virtual void Abort(const std::string& reason, int status) = 0;
};

/// Ranks as threads of one process (tests, `parallel.backend: threads`).
class ThreadJob {
 public:
  explicit ThreadJob(int size);
  ~ThreadJob();
  /// The transport of `rank`; valid while the job lives.
  Transport& transport(int rank);
  /// Runs body(transport) as `size` ranks, rank 0 on the calling thread, the others on threads of their own,
  /// each under its rank's label (SetThreadRank). An exception in one rank aborts the others; the first cause
  /// is rethrown.
  static void Run(int size, const std::function<void(Transport&)>& body);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// The ranks that mpirun started. Initialises MPI; finalises it when destroyed, or ends the job when that
/// happens on the way of an exception or after Cancel. One in a process's life.
std::unique_ptr<Transport> NewMpiTransport(int* argc, char*** argv);
/// Whether this process was started by mpirun (or another launcher Open MPI knows), without touching MPI.
bool StartedByMpi();

}  // namespace strata
