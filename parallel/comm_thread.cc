#include "parallel/comm_thread.h"

#include <exception>
#include <future>
#include <utility>

#include "runtime/base/error.h"
#include "runtime/base/log.h"

namespace strata {

void Operation::Wait() const {
  done.wait(false);
  if (!error.empty()) throw CommError(error, hint);
}

std::string Operation::ToString() const {
  return StrCat(id.ToString(), " on axis ", group->axis, ", called at ", id.at.file_name(), ":",
                id.at.line());
}

CommThread::CommThread(Transport& transport, const CommOptions& options)
    : transport_(transport),
      options_(options),
      tracer_(options.tracer),
      thread_([this, rank = ThreadRank(), world = ThreadWorldSize()] {
        SetThreadRank(rank, world);
        RunTasks();
      }) {}

CommThread::~CommThread() {
  cancelled_ = true;
  EnqueueTask(nullptr);
  thread_.join();
}

int CommThread::OpenChannel() {
  std::promise<int> opened;
  EnqueueTask([&] {
    try {
      opened.set_value(transport_.OpenChannel());
    } catch (...) {
      opened.set_exception(std::current_exception());
    }
  });
  return opened.get_future().get();
}

void CommThread::Enqueue(std::shared_ptr<Operation> operation) {
  EnqueueTask([this, operation = std::move(operation)] { Run(*operation); });
}

void CommThread::Leave(const Operation& operation) {
  if (operation.done) return;
  if (std::uncaught_exceptions() > 0) cancelled_ = true;
  operation.done.wait(false);
}

void CommThread::EnqueueTask(std::function<void()> task) {
  std::lock_guard lock(mutex_);
  tasks_.push_back(std::move(task));
  task_added_.notify_one();
}

// Until the null task.
void CommThread::RunTasks() {
  for (;;) {
    std::function<void()> task;
    {
      std::unique_lock lock(mutex_);
      task_added_.wait(lock, [&] { return !tasks_.empty(); });
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    if (!task) return;
    task();
  }
}

void CommThread::Run(Operation& operation) {
  try {
    if (!failure_.empty()) throw CommError("not run, after the failure of " + failure_);
    const double begin = Now();
    Exchange exchange(transport_, *operation.group, operation.id, options_.timeout_s, cancelled_);
    operation.body(exchange);
    exchange.FinishSends();
    Log(operation, exchange.bytes_sent(), begin, Now());
  } catch (const std::exception& e) {
    const auto* const error = dynamic_cast<const Error*>(&e);
    operation.error = StrCat(operation.ToString(), ", on rank ", transport_.rank(), ": ", e.what());
    operation.hint = error ? error->hint() : "";
    if (failure_.empty()) {
      failure_ = operation.error;
      transport_.Cancel();
    }
    if (operation.abandon) operation.abandon();
  }
  operation.body = nullptr;
  operation.abandon = nullptr;
  operation.done = true;
  operation.done.notify_all();
}

void CommThread::Log(const Operation& operation, int64_t bytes, double begin, double end) {
  const std::string& axis = operation.group->axis;
  const char* const op = Name(operation.id.kind);
  if (options_.traffic) options_.traffic->Add(axis, op, bytes, end - begin);
  if (Tracer* const t = tracer_) t->Record("comm", axis + "." + op, begin, end, bytes);
}

}  // namespace strata
