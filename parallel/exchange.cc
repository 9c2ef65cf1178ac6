#include "parallel/exchange.h"

#include <algorithm>
#include <chrono>
#include <set>
#include <thread>

#include "runtime/base/error.h"
#include "runtime/base/units.h"

namespace strata {
namespace {

constexpr int kSequenceBits = 10, kDetailBits = 10;
constexpr uint32_t kSequenceMask = (1u << kSequenceBits) - 1, kDetailMask = (1u << kDetailBits) - 1;
static_assert(8u << (kSequenceBits + kDetailBits) <= Transport::kLabelLimit);

// Passes the time between two looks at messages that did not move for `waited` seconds and `looks` looks.
// Ranks often have fewer cores than threads, and the core that is polled on is missing where the awaited data
// are computed: so look closely for as long as a message under way takes, then sleep. Sleeping for a part of
// the wait so far delays the news by no more than that part.
void Pause(int looks, double waited) {
  constexpr int kPolls = 64, kYields = 8;
  if (looks <= kPolls) return;
  if (looks <= kPolls + kYields) return std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::duration<double>(std::clamp(waited / 8, 10e-6, 1e-3)));
}

// "rank 2", "ranks 2, 3".
std::string Ranks(const std::set<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank" : "ranks";
  for (const char* separator = " "; const int rank : ranks) {
    text += separator + std::to_string(rank);
    separator = ", ";
  }
  return text;
}

}  // namespace

const char* Name(OpKind kind) {
  switch (kind) {
    case OpKind::kAllGather:
      return "all_gather";
    case OpKind::kReduceScatter:
      return "reduce_scatter";
    case OpKind::kAllReduce:
      return "all_reduce";
    case OpKind::kAllToAll:
      return "all_to_all";
    case OpKind::kBroadcast:
      return "broadcast";
    case OpKind::kBarrier:
      return "barrier";
  }
  return "another operation";
}

uint32_t OpId::Label() const {
  const uint32_t folded = (detail ^ (detail >> kDetailBits) ^ (detail >> (2 * kDetailBits))) & kDetailMask;
  return (static_cast<uint32_t>(kind) << (kSequenceBits + kDetailBits)) |
         (static_cast<uint32_t>(sequence & kSequenceMask) << kDetailBits) | folded;
}

std::string OpId::ToString() const { return StrCat(Name(kind), " #", sequence); }

Exchange::Exchange(Transport& transport, const Group& group, const OpId& id, double timeout_s,
                   const std::atomic<bool>& cancelled)
    : transport_(transport), group_(group), id_(id), timeout_s_(timeout_s), cancelled_(cancelled) {}

void Exchange::Send(int place, const void* from, size_t bytes) {
  bytes_sent_ += static_cast<int64_t>(bytes);
  sends_.push_back(
      {place, bytes, transport_.Send(group_.channel, group_.ranks[place], from, bytes, id_.Label())});
}

void Exchange::Receive(int place, void* to, size_t bytes, Batch& batch) {
  batch.push_back(
      {place, bytes, transport_.Receive(group_.channel, group_.ranks[place], to, bytes, id_.Label())});
}

void Exchange::Wait(Batch& batch) {
  double last_progress = Now();
  int looks = 0;
  while (!batch.empty()) {
    if (Poll(batch)) {
      last_progress = Now();
      looks = 0;
      continue;
    }
    if (cancelled_) throw CommError("given up, since this rank failed");
    const double waited = Now() - last_progress;
    if (waited > timeout_s_) ThrowAbsent(batch);
    Pause(++looks, waited);
  }
}

void Exchange::Await(const std::function<bool()>& done, const std::string& late) const {
  const double begin = Now();
  for (int looks = 0; !done(); ++looks) {
    if (cancelled_) throw CommError("given up, since this rank failed");
    const double waited = Now() - begin;
    if (waited > timeout_s_) throw CommError(StrCat(late, " within ", timeout_s_, " s"));
    Pause(looks, waited);
  }
}

// Whether a message of the batch was completed.
bool Exchange::Poll(Batch& batch) {
  std::string disagreements;
  const auto completed = [&](const Pending& message) {
    const Transport::Status status = transport_.Test(message.request);
    if (status.mismatch) {
      if (!disagreements.empty()) disagreements += "; ";
      disagreements += Disagreement(message, status);
    }
    return status.done;
  };
  const bool any = std::erase_if(batch, completed) > 0;
  if (!disagreements.empty()) {
    throw CommError(disagreements,
                    "every rank must start the same operations in the same order and with the same sizes");
  }
  return any;
}

// What the peer is in, read from the label of its message.
std::string Exchange::Disagreement(const Pending& message, const Transport::Status& status) const {
  const auto kind = static_cast<OpKind>(status.label >> (kSequenceBits + kDetailBits));
  // The nearest sequence number to ours that has these last bits.
  const auto ahead =
      (static_cast<int64_t>(status.label >> kDetailBits) - static_cast<int64_t>(id_.sequence)) &
      int64_t{kSequenceMask};
  const int64_t sequence =
      static_cast<int64_t>(id_.sequence) + (ahead > kSequenceMask / 2 ? ahead - kSequenceMask - 1 : ahead);
  std::string text = StrCat("rank ", group_.ranks[message.place], " is in ", Name(kind), " #", sequence);
  if (kind != id_.kind || sequence != static_cast<int64_t>(id_.sequence)) return text;
  if (status.bytes == message.bytes) return text + " with another element type, length, root or reduction";
  return StrCat(text, " with ", status.bytes, " bytes for this rank, which expects ", message.bytes);
}

void Exchange::ThrowAbsent(const Batch& batch) const {
  std::set<int> absent;
  for (const Pending& message : batch) absent.insert(group_.ranks[message.place]);
  throw CommError(StrCat("nothing from ", Ranks(absent), " within ", timeout_s_, " s"),
                  "see what those ranks do and whether each rank starts the same operations; where they are "
                  "only slow, raise parallel.timeout_s");
}

}  // namespace strata
