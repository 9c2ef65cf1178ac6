// Exchange: the messages of one collective, and what is said when they do not come.
//
// Ownership: refers to its transport and to the memory of the messages; lives while one collective runs.
// Threading: the communication thread's own.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <source_location>
#include <span>
#include <string>
#include <vector>

#include "parallel/transport.h"

namespace strata {

enum class OpKind : uint8_t { kAllGather = 1, kReduceScatter, kAllReduce, kAllToAll, kBroadcast, kBarrier };
/// "all_gather", …; "another operation" for a value that is none of these.
const char* Name(OpKind kind);

/// A group of ranks on one channel.
struct Group {
  std::vector<int> ranks;  // of the job, ascending
  int place;               // of this rank in `ranks`
  int channel;
  std::string axis;
  int size() const { return static_cast<int>(ranks.size()); }
};

/// Which collective this is: the n-th of its group. `detail` is anything else on which the group must agree.
struct OpId {
  OpKind kind;
  uint64_t sequence;
  uint32_t detail;
  std::source_location at;
  /// What its messages are labelled with: 3 bits kind, 10 bits sequence, 10 bits detail.
  uint32_t Label() const;
  /// "all_gather #14".
  std::string ToString() const;
};

class Exchange {
 public:
  struct Pending {
    int place;  // of the peer in the group
    size_t bytes;
    Transport::Request request;
  };
  using Batch = std::vector<Pending>;

  /// Gives up with CommError after `timeout_s` in which no message came or went, or when `cancelled` is set.
  Exchange(Transport& transport, const Group& group, const OpId& id, double timeout_s,
           const std::atomic<bool>& cancelled);

  /// Starts a message to the peer at `place`; awaited by FinishSends.
  void Send(int place, const void* from, size_t bytes);
  /// Starts one from there, awaited by Wait(batch).
  void Receive(int place, void* to, size_t bytes, Batch& batch);
  /// Returns when the messages of the batch are there, and leaves it empty. Throws CommError that names the
  /// ranks that are absent or in another operation.
  void Wait(Batch& batch);
  void FinishSends() { Wait(sends_); }
  /// Returns when done() says so; it is asked again and again. Throws CommError(late) after `timeout_s`.
  void Await(const std::function<bool()>& done, const std::string& late) const;
  /// Bytes that this rank sends for the collective by another way than Send.
  void CountBytes(int64_t bytes) { bytes_sent_ += bytes; }

  const Group& group() const { return group_; }
  int64_t bytes_sent() const { return bytes_sent_; }

 private:
  bool Poll(Batch& batch);
  std::string Disagreement(const Pending& message, const Transport::Status& status) const;
  [[noreturn]] void ThrowAbsent(const Batch& batch) const;

  Transport& transport_;
  const Group& group_;
  const OpId& id_;
  const double timeout_s_;
  const std::atomic<bool>& cancelled_;
  Batch sends_;
  int64_t bytes_sent_ = 0;
};

}  // namespace strata
