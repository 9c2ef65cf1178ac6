// Ranks as threads of one process. A message is a pointer into the sender's memory; the receiver copies from
// there, so every byte moves once.
#include <atomic>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>

#include "parallel/transport.h"
#include "runtime/base/error.h"
#include "runtime/base/log.h"

namespace strata {
namespace {

// An offer of bytes. Whoever moves it from kOffered decides: the receiver to copy, or the sender to withdraw.
struct Message {
  enum class State : uint8_t { kOffered, kCopying, kTaken, kWithdrawn };

  Message(const void* from, size_t bytes, uint32_t label) : from(from), bytes(bytes), label(label) {}
  bool Move(State to) {
    State offered = State::kOffered;
    return state.compare_exchange_strong(offered, to);
  }

  const void* const from;
  const size_t bytes;
  const uint32_t label;
  std::atomic<State> state{State::kOffered};
};

// The messages of one sender on one channel. The n-th receive takes the n-th message.
struct Mailbox {
  std::deque<std::shared_ptr<Message>> messages;  // null: taken
  uint64_t first = 0;                             // number of messages.front()
  uint64_t receives = 0;
};

// What was sent to one rank.
struct Inbox {
  std::mutex mutex;
  std::map<std::pair<int, int>, Mailbox> boxes;  // by channel and sender
};

struct SharedState {
  explicit SharedState(int size) : inboxes(size) {}

  std::vector<Inbox> inboxes;  // by rank
  std::atomic<bool> aborted{false};
  std::mutex mutex;
  std::string reason;  // of the first Abort, written before `aborted`
};

class ThreadTransport : public Transport {
 public:
  ThreadTransport(SharedState& shared, int rank) : shared_(shared), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(shared_.inboxes.size()); }
  int local_size() const override { return size(); }
  int local_rank() const override { return rank(); }
  int OpenChannel() override { return num_channels_++; }

  Request Send(int channel, int peer, const void* from, size_t bytes, uint32_t label) override {
    CheckAborted();
    auto message = std::make_shared<Message>(from, bytes, label);
    sends_.emplace(++last_request_, message);
    Inbox& inbox = shared_.inboxes[peer];
    std::lock_guard lock(inbox.mutex);
    inbox.boxes[{channel, rank_}].messages.push_back(std::move(message));
    return last_request_;
  }

  Request Receive(int channel, int peer, void* to, size_t bytes, uint32_t label) override {
    CheckAborted();
    Inbox& inbox = shared_.inboxes[rank_];
    std::lock_guard lock(inbox.mutex);
    Mailbox& box = inbox.boxes[{channel, peer}];
    receives_.emplace(++last_request_, PendingReceive{&box, box.receives++, to, bytes, label});
    return last_request_;
  }

  Status Test(Request request) override {
    CheckAborted();
    if (const auto send = sends_.find(request); send != sends_.end()) {
      const bool taken = send->second->state == Message::State::kTaken;
      if (taken) sends_.erase(send);
      return {.done = taken};
    }
    const auto receive = receives_.find(request);
    STRATA_CHECK(receive != receives_.end()) << "request " << request;
    const Status status = Take(receive->second);
    if (status.done) receives_.erase(receive);
    return status;
  }

  void Cancel() override {
    for (auto& [request, message] : sends_) {
      if (message->Move(Message::State::kWithdrawn)) continue;
      // A receiver is in the middle of the copy.
      while (message->state == Message::State::kCopying) std::this_thread::yield();
    }
    sends_.clear();
    receives_.clear();
  }

  void Abort(const std::string& reason, int /*status*/) override {
    std::lock_guard lock(shared_.mutex);
    if (shared_.aborted) return;
    shared_.reason = reason;
    shared_.aborted = true;
  }

 private:
  struct PendingReceive {
    Mailbox* box;
    uint64_t number;
    void* to;
    size_t bytes;
    uint32_t label;
  };

  void CheckAborted() const {
    if (shared_.aborted) throw CommError(shared_.reason);
  }

  Status Take(const PendingReceive& receive) {
    std::shared_ptr<Message> message;
    {
      std::lock_guard lock(shared_.inboxes[rank_].mutex);
      Mailbox& box = *receive.box;
      if (receive.number - box.first >= box.messages.size()) return {};
      std::shared_ptr<Message>& place = box.messages[receive.number - box.first];
      if (!place->Move(Message::State::kCopying)) return {};  // withdrawn: it never comes
      message = std::move(place);
      while (!box.messages.empty() && !box.messages.front()) {
        box.messages.pop_front();
        ++box.first;
      }
    }
    const bool mismatch = message->label != receive.label || message->bytes != receive.bytes;
    if (!mismatch && receive.bytes > 0) std::memcpy(receive.to, message->from, receive.bytes);
    const Status status{true, mismatch, message->label, message->bytes};
    message->state = Message::State::kTaken;
    return status;
  }

  SharedState& shared_;
  const int rank_;
  int num_channels_ = 0;
  Request last_request_ = 0;
  std::unordered_map<Request, std::shared_ptr<Message>> sends_;
  std::unordered_map<Request, PendingReceive> receives_;
};

std::string Describe(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "an exception of unknown type";
  }
}

}  // namespace

struct ThreadJob::Impl {
  explicit Impl(int size) : shared(size) {
    for (int rank = 0; rank < size; ++rank) transports.emplace_back(shared, rank);
  }
  SharedState shared;
  std::deque<ThreadTransport> transports;
};

ThreadJob::ThreadJob(int size) : impl_(std::make_unique<Impl>(size)) {}

ThreadJob::~ThreadJob() = default;

Transport& ThreadJob::transport(int rank) { return impl_->transports[rank]; }

void ThreadJob::Run(int size, const std::function<void(Transport&)>& body) {
  ThreadJob job(size);
  std::mutex mutex;
  std::exception_ptr first_cause;
  const auto run = [&](int rank) {
    SetThreadRank(rank, size);
    try {
      body(job.transport(rank));
    } catch (...) {
      const std::exception_ptr error = std::current_exception();
      {
        std::lock_guard lock(mutex);
        if (!first_cause) first_cause = error;
      }
      job.transport(rank).Abort(StrCat("rank ", rank, " failed: ", Describe(error)), 1);
    }
  };
  const int caller_rank = ThreadRank(), caller_world = ThreadWorldSize();
  {
    std::vector<std::jthread> threads;
    for (int rank = 1; rank < size; ++rank) threads.emplace_back(run, rank);
    run(0);
  }
  SetThreadRank(caller_rank, caller_world);
  if (first_cause) std::rethrow_exception(first_cause);
}

}  // namespace strata
