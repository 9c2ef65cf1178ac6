// Ranks as processes, over Open MPI. A channel is a communicator of its own, a label is a tag.
#include <mpi.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <unordered_map>

#include "parallel/transport.h"
#include "runtime/base/error.h"
#include "runtime/base/log.h"

namespace strata {
namespace {

// MPI counts bytes in an int; a longer message travels in parts.
constexpr size_t kPartBytes = size_t{1} << 30;

void Check(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw CommError(StrCat(call, ": ", std::string(text, length)));
}

bool IsTruncation(int code) {
  int error_class = MPI_SUCCESS;
  MPI_Error_class(code, &error_class);
  return error_class == MPI_ERR_TRUNCATE;
}

class MpiTransport : public Transport {
 public:
  MpiTransport(int* argc, char*** argv) {
    // The communication thread calls MPI, the main thread only before and after it, or in Abort: `mutex_`
    // keeps the calls apart.
    int provided = MPI_THREAD_SINGLE;
    Check(MPI_Init_thread(argc, argv, MPI_THREAD_SERIALIZED, &provided), "MPI_Init_thread");
    if (provided < MPI_THREAD_SERIALIZED) {
      throw CommError("this MPI library gives no MPI_THREAD_SERIALIZED",
                      "install an Open MPI that was built with thread support");
    }
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    Check(MPI_Comm_rank(MPI_COMM_WORLD, &rank_), "MPI_Comm_rank");
    Check(MPI_Comm_size(MPI_COMM_WORLD, &size_), "MPI_Comm_size");
    MPI_Comm machine;
    Check(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank_, MPI_INFO_NULL, &machine),
          "MPI_Comm_split_type");
    Check(MPI_Comm_size(machine, &local_size_), "MPI_Comm_size");
    Check(MPI_Comm_rank(machine, &local_rank_), "MPI_Comm_rank");
    MPI_Comm_free(&machine);
  }

  ~MpiTransport() override {
    // The other ranks would wait for this one in MPI_Finalize.
    if (cancelled_ || std::uncaught_exceptions() > exceptions_at_start_) {
      Abort(StrCat("rank ", rank_, " failed"), 1);
    }
    for (MPI_Comm& channel : channels_) MPI_Comm_free(&channel);
    MPI_Finalize();
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  int local_size() const override { return local_size_; }
  int local_rank() const override { return local_rank_; }

  int OpenChannel() override {
    std::lock_guard lock(mutex_);
    MPI_Comm channel;
    Check(MPI_Comm_dup(MPI_COMM_WORLD, &channel), "MPI_Comm_dup");
    MPI_Comm_set_errhandler(channel, MPI_ERRORS_RETURN);
    channels_.push_back(channel);
    return static_cast<int>(channels_.size()) - 1;
  }

  Request Send(int channel, int peer, const void* from, size_t bytes, uint32_t label) override {
    return Start({.is_receive = false, .label = label, .bytes = bytes},
                 [&](size_t at, int count, MPI_Request* r) {
                   Check(MPI_Isend(static_cast<const char*>(from) + at, count, MPI_BYTE, peer,
                                   static_cast<int>(label), channels_[channel], r),
                         "MPI_Isend");
                 });
  }

  // Any tag is taken, so that a message of another operation is seen instead of waited past.
  Request Receive(int channel, int peer, void* to, size_t bytes, uint32_t label) override {
    return Start({.is_receive = true, .label = label, .bytes = bytes}, [&](size_t at, int count,
                                                                           MPI_Request* r) {
      Check(MPI_Irecv(static_cast<char*>(to) + at, count, MPI_BYTE, peer, MPI_ANY_TAG, channels_[channel], r),
            "MPI_Irecv");
    });
  }

  Status Test(Request request) override {
    std::lock_guard lock(mutex_);
    const auto found = pending_.find(request);
    STRATA_CHECK(found != pending_.end()) << "request " << request;
    Pending& message = found->second;
    while (message.num_done < message.parts.size()) {
      int done = 0;
      MPI_Status status;
      const int code = MPI_Test(&message.parts[message.num_done], &done, &status);
      const bool truncated = IsTruncation(code);
      if (!truncated) Check(code, "MPI_Test");
      if (!done && !truncated) return {};
      ++message.num_done;
      if (!message.is_receive) continue;
      MPI_Count arrived = 0;
      MPI_Get_elements_x(&status, MPI_BYTE, &arrived);
      message.bytes_arrived += static_cast<size_t>(arrived);
      const size_t expected = std::min(message.num_done * kPartBytes, message.bytes);
      if (truncated || status.MPI_TAG != static_cast<int>(message.label) ||
          message.bytes_arrived != expected) {
        // The request stays for Cancel: its other parts may be under way.
        return {true, true, static_cast<uint32_t>(status.MPI_TAG), message.bytes_arrived};
      }
    }
    const Status status{true, false, message.label, message.bytes};
    pending_.erase(found);
    return status;
  }

  void Cancel() override {
    std::lock_guard lock(mutex_);
    cancelled_ = true;
    for (auto& [request, message] : pending_) {
      for (MPI_Request& part : message.parts) {
        if (part == MPI_REQUEST_NULL) continue;
        if (message.is_receive) MPI_Cancel(&part);
        MPI_Request_free(&part);
      }
    }
    pending_.clear();
  }

  void Abort(const std::string& reason, int status) override {
    std::lock_guard lock(mutex_);
    if (!reason.empty()) LogLine(LogLevel::kError, reason);
    MPI_Abort(MPI_COMM_WORLD, status);
    std::_Exit(status);  // where MPI_Abort comes back, mpirun is gone
  }

 private:
  struct Pending {
    bool is_receive;
    uint32_t label;
    size_t bytes;
    std::vector<MPI_Request> parts{};
    size_t num_done = 0;
    size_t bytes_arrived = 0;
  };

  template <typename StartPart>
  Request Start(Pending message, StartPart start_part) {
    std::lock_guard lock(mutex_);
    size_t at = 0;
    do {  // an empty message is sent too
      const size_t count = std::min(kPartBytes, message.bytes - at);
      start_part(at, static_cast<int>(count), &message.parts.emplace_back());
      at += count;
    } while (at < message.bytes);
    pending_.emplace(++last_request_, std::move(message));
    return last_request_;
  }

  const int exceptions_at_start_ = std::uncaught_exceptions();
  int rank_ = 0, size_ = 1, local_rank_ = 0, local_size_ = 1;
  std::vector<MPI_Comm> channels_;
  std::mutex mutex_;  // guards what follows, and MPI
  Request last_request_ = 0;
  std::unordered_map<Request, Pending> pending_;
  bool cancelled_ = false;
};

}  // namespace

std::unique_ptr<Transport> NewMpiTransport(int* argc, char*** argv) {
  return std::make_unique<MpiTransport>(argc, argv);
}

bool StartedByMpi() {
  return std::getenv("OMPI_COMM_WORLD_SIZE") != nullptr || std::getenv("PMIX_RANK") != nullptr ||
         std::getenv("PMI_RANK") != nullptr;
}

}  // namespace strata
