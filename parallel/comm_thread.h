// CommThread: a rank's communication thread, which runs started collectives one after another, beside the
// rank's computation; and the rule that nothing runs after the first that failed.
//
// Ownership: outlives the communicators and their Works. Threading: Enqueue from the rank's thread;
// operations run on the communication thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "parallel/comm_options.h"
#include "parallel/exchange.h"
#include "parallel/host_collectives.h"

namespace strata {

/// One started collective, from its place in the queue to its end.
struct Operation {
  std::shared_ptr<const Group> group;
  OpId id;
  std::function<void(Exchange&)> body;
  /// Called instead of or after `body` where the operation fails; may be empty.
  std::function<void()> abandon;

  /// Set at the end; `error` is empty where all went well. The texts are kept rather than the exception,
  /// whose copies would be shared between threads.
  std::string error, hint;
  std::atomic<bool> done{false};

  /// Returns when it is done; throws its CommError.
  void Wait() const;
  /// "all_gather #14 on axis dp, called at zero/engine.cc:120".
  std::string ToString() const;
};

class CommThread {
 public:
  CommThread(Transport& transport, const CommOptions& options);
  ~CommThread();
  CommThread(const CommThread&) = delete;
  CommThread& operator=(const CommThread&) = delete;

  Transport& transport() const { return transport_; }
  const CommOptions& options() const { return options_; }
  /// The collectives' memory; the communication thread's own.
  Scratch& scratch() { return scratch_; }
  void set_tracer(Tracer* tracer) { tracer_ = tracer; }

  /// Opens a channel. All ranks do so in the same order.
  int OpenChannel();
  void Enqueue(std::shared_ptr<Operation> operation);
  /// Returns when the operation is done, so that nothing of it touches memory any more. On the way of an
  /// exception it gives all operations of this rank up instead of waiting for the other ranks.
  void Leave(const Operation& operation);

 private:
  void EnqueueTask(std::function<void()> task);
  void RunTasks();
  void Run(Operation& operation);
  void Log(const Operation& operation, int64_t bytes, double begin, double end);

  Transport& transport_;
  const CommOptions options_;
  std::atomic<Tracer*> tracer_;
  std::atomic<bool> cancelled_{false};
  // The communication thread's own.
  Scratch scratch_;
  std::string failure_;  // the first failed operation and why; nothing runs after it

  std::mutex mutex_;
  std::condition_variable task_added_;
  std::deque<std::function<void()>> tasks_;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace strata
