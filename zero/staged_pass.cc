#include "zero/staged_pass.h"

#include <algorithm>
#include <deque>
#include <memory>
#include <utility>

namespace strata {
namespace {

constexpr size_t kBlock = AsyncFile::kAlignment;
constexpr size_t RoundUp(size_t n) { return (n + kBlock - 1) / kBlock * kBlock; }

// A task that was begun.
struct Progress {
  const StagedPass::Task* task;
  std::vector<StagedPass::Operand> operands;
  int64_t stretches = 0;  // with writes under way
  bool closed = false;
  void TellWhenWritten() const {
    if (closed && stretches == 0 && task->written) task->written();
  }
};

// One buffer, and the writes that still read it.
struct Slot {
  Buffer memory;
  std::vector<Transfer> writes;
  std::shared_ptr<Progress> writer;
  void Drain() {
    for (Transfer& write : writes) write.Wait();
    writes.clear();
    if (const auto progress = std::move(writer)) {
      --progress->stretches;
      progress->TellWhenWritten();
    }
  }
};

struct Stretch {
  std::shared_ptr<Progress> progress;
  int64_t begin, count;
  Slot* slot;  // null: everything in place
  std::vector<TensorView> views;
  std::vector<Transfer> reads;
};

}  // namespace

void StagedPass::Run() {
  Allocator& memory =
      space_ == MemorySpace::kDevice ? store_.device().allocator() : store_.device().host_allocator();
  std::vector<Slot> slots(static_cast<size_t>(std::max<int64_t>(buffers_, 1)));
  std::deque<Stretch> ahead;          // being read, or ready
  std::shared_ptr<Progress> current;  // the task that stretches are taken from
  size_t next_task = 0, next_slot = 0;
  int64_t next_begin = 0, stretch = 0;
  bool staged = false;

  auto open_task = [&] {
    const Task& task = tasks_[next_task];
    current = std::make_shared<Progress>(Progress{&task, task.open()});
    size_t bytes = 0;  // an element of what has to be staged
    for (const Operand& operand : current->operands) {
      if (!operand.array->InPlace(space_)) bytes += SizeOf(operand.array->dtype());
    }
    staged = bytes > 0;
    stretch = task.count;
    if (staged) {
      const int64_t most =
          buffer_bytes_ / static_cast<int64_t>(bytes) / TierArray::kAlign * TierArray::kAlign;
      stretch = std::min(stretch, std::max(most, TierArray::kAlign));
    }
  };
  auto start_next = [&] {
    if (next_task == tasks_.size()) return false;
    if (next_begin == 0) open_task();
    const Task& task = tasks_[next_task];
    Stretch s{current, next_begin, std::min(stretch, task.count - next_begin), nullptr, {}, {}};
    std::byte* at = nullptr;
    if (staged) {
      s.slot = &slots[next_slot++ % slots.size()];
      s.slot->Drain();
      size_t bytes = 0;
      for (const Operand& operand : current->operands) {
        if (!operand.array->InPlace(space_))
          bytes += RoundUp(static_cast<size_t>(stretch) * SizeOf(operand.array->dtype()));
      }
      if (s.slot->memory.size() < bytes) s.slot->memory = memory.Allocate(bytes, MemoryTag::kBuffers);
      at = static_cast<std::byte*>(s.slot->memory.data());
    }
    for (const Operand& operand : current->operands) {
      const TierArray& array = *operand.array;
      if (array.InPlace(space_)) {
        s.views.push_back(array.View().Slice(operand.base + s.begin, s.count));
        continue;
      }
      s.views.emplace_back(at, array.dtype(), Shape{s.count});
      at += RoundUp(s.views.back().num_bytes());
      if (operand.reads) s.reads.push_back(array.StartRead(operand.base + s.begin, s.views.back(), space_));
    }
    next_begin += s.count;
    if (next_begin >= task.count) {
      ++next_task;
      next_begin = 0;
    }
    ahead.push_back(std::move(s));
    return true;
  };

  // One buffer is worked on and one is written; the others are read into.
  const size_t most_ahead = std::max<size_t>(slots.size(), 2) - 1;
  for (;;) {
    while (ahead.size() < most_ahead && start_next()) {
    }
    if (ahead.empty()) break;
    Stretch s = std::move(ahead.front());
    ahead.pop_front();
    for (Transfer& read : s.reads) read.Wait();
    Progress& progress = *s.progress;
    progress.task->body(s.begin, s.views);
    for (size_t i = 0; s.slot && i < progress.operands.size(); ++i) {
      const Operand& operand = progress.operands[i];
      if (operand.writes && !operand.array->InPlace(space_)) {
        s.slot->writes.push_back(operand.array->StartWrite(operand.base + s.begin, s.views[i], space_));
      }
    }
    if (s.slot && !s.slot->writes.empty()) {
      s.slot->writer = s.progress;
      ++progress.stretches;
    }
    if (s.begin + s.count >= progress.task->count) {
      if (progress.task->close) progress.task->close();
      progress.closed = true;
      progress.TellWhenWritten();
    }
  }
  // In the order in which they were given out.
  for (size_t i = 0; i < slots.size(); ++i) slots[(next_slot + i) % slots.size()].Drain();
}

}  // namespace strata
