#include "kernels/simt/block_scheduler.h"

#include <algorithm>
#include <bit>
#include <exception>
#include <iomanip>
#include <numeric>
#include <sstream>
#include <utility>

namespace simt {

using strata::StrCat;

Config& config() {
  static thread_local Config config;
  return config;
}

namespace internal {

thread_local constinit const ThreadPosition* this_thread = nullptr;
thread_local constinit BlockPosition this_block;
thread_local constinit RunningBlock running_block;

namespace {

// A step of splitmix64 spreads a number over all bits.
uint64_t Mixed(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

template <typename T>
std::string Triple(const T& v) {
  return StrCat("(", v.x, ",", v.y, ",", v.z, ")");
}

std::string Place(const Loc& where) { return StrCat(where.file_name(), ":", where.line()); }

std::string Hex(uint32_t mask) {
  std::ostringstream out;
  out << std::hex << std::setw(8) << std::setfill('0') << mask;
  return out.str();
}

uint32_t FirstLanes(unsigned n) { return n >= 32 ? ~0u : (1u << n) - 1; }

}  // namespace

BlockScheduler& BlockScheduler::OfThread() {
  static thread_local BlockScheduler scheduler;
  return scheduler;
}

BlockScheduler::BlockScheduler()
    : threads_(kMaxThreads), positions_(kMaxThreads), fibers_(kMaxThreads, &RunThreads) {
  if (CheckerOfThread) checker_ = &CheckerOfThread();
  for (unsigned i = 0; i < kMaxThreads; ++i) {
    positions_[i].linear = i;
    positions_[i].lane = i % 32;
  }
  running_block.shared = &shared_;
  running_block.stacks_begin = fibers_.begin();
  running_block.stacks_end = fibers_.end();
  running_block.positions_begin = reinterpret_cast<const char*>(positions_.data());
  running_block.positions_end = reinterpret_cast<const char*>(positions_.data() + positions_.size());
}

// ---- grids ----

void BlockScheduler::RunGrid(dim3 grid, dim3 block, size_t shared_bytes, void (*run)(const void* call),
                             const void* call, size_t call_bytes) {
  if (running_ != &host_) throw Error("a kernel cannot start a grid");
  config_ = config();
  CheckLaunch(grid, block, shared_bytes);
  run_ = run;
  call_ = call;
  dynamic_bytes_ = shared_bytes;
  running_block.call_begin = static_cast<const char*>(call);
  running_block.call_end = running_block.call_begin + call_bytes;
  BeginShape(grid, block);
  if (checker_) checker_->BeginGrid();
  const uint64_t blocks = uint64_t{grid.x} * grid.y * grid.z;
  const std::vector<uint32_t> order = BlockOrder(blocks);
  for (uint64_t i = 0; i < blocks; ++i) {
    RunBlock(!order.empty() ? order[i] : config_.order == Order::kReverse ? blocks - 1 - i : i);
  }
}

// CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
void BlockScheduler::CheckLaunch(dim3 grid, dim3 block, size_t shared_bytes) const {
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  std::string problem;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || threads == 0) problem = "no blocks or no threads";
  if (threads > kMaxThreads) problem = StrCat(threads, " threads in a block: at most ", kMaxThreads);
  if (block.z > 64) problem = "block.z is at most 64";
  if (grid.x > 0x7fffffff || grid.y > 65535 || grid.z > 65535) {
    problem = "grid.x is at most 2147483647, grid.y and grid.z at most 65535";
  }
  if (shared_bytes > config_.max_shared_bytes) {
    problem = StrCat(shared_bytes, " bytes of shared memory: at most ", config_.max_shared_bytes);
  }
  if (!problem.empty()) {
    throw Error(StrCat("invalid launch of grid ", Triple(grid), ", block ", Triple(block), ": ", problem));
  }
}

// Empty where blocks run in order or in reverse.
std::vector<uint32_t> BlockScheduler::BlockOrder(uint64_t blocks) const {
  std::vector<uint32_t> order;
  if (config_.order != Order::kRandom) return order;
  order.resize(blocks);
  std::iota(order.begin(), order.end(), 0u);
  for (uint64_t i = blocks; i > 1; --i) std::swap(order[i - 1], order[Mixed(config_.seed + i) % i]);
  return order;
}

void BlockScheduler::BeginShape(dim3 grid, dim3 block) {
  num_threads_ = block.x * block.y * block.z;
  this_block.threads = block;
  this_block.blocks = grid;
  unsigned i = 0;
  for (unsigned z = 0; z < block.z; ++z) {
    for (unsigned y = 0; y < block.y; ++y) {
      for (unsigned x = 0; x < block.x; ++x) positions_[i++].index = {x, y, z};
    }
  }
}

// ---- blocks ----

void BlockScheduler::RunBlock(uint64_t number) {
  BeginBlock(number);
  Resume(ready_.Pop());  // until all have ended, or nobody can go on
  if (error_ == nullptr && live_ > 0) {
    error_ = std::make_exception_ptr(Error(StrCat("deadlock: no thread of the block can run\n", Describe())));
  }
  if (error_ != nullptr) {
    fibers_.Restart();
    std::rethrow_exception(std::exchange(error_, nullptr));
  }
}

void BlockScheduler::BeginBlock(uint64_t number) {
  const dim3 grid = this_block.blocks;
  this_block.index = {static_cast<unsigned>(number % grid.x), static_cast<unsigned>(number / grid.x % grid.y),
                      static_cast<unsigned>(number / grid.x / grid.y)};
  live_ = num_threads_;
  at_barrier_ = 0;
  shared_.BeginBlock(dynamic_bytes_);
  ready_.Begin(config_.order, Mixed(config_.seed) + Mixed(number));
  for (unsigned first = 0; first < num_threads_; first += 32) {
    warps_[first / 32] = {.alive = FirstLanes(num_threads_ - first), .waiting = 0};
  }
  for (unsigned i = 0; i < num_threads_; ++i) {
    threads_[i].fiber = nullptr;
    threads_[i].copies.Clear();
    MakeReady(i);
  }
  running_block.number = number;
  if (checker_) checker_->BeginBlock();
}

// ---- threads ----

void BlockScheduler::RunThreads() {
  Fiber::Entered();
  BlockScheduler& self = OfThread();
  for (;;) {
    self.RunThread();
    if (self.error_ != nullptr) self.SwitchTo(self.host_);  // for good
    Fiber* const fiber = self.running_;
    const int next = self.ready_.Pop();
    if (next >= 0 && self.threads_[next].fiber == nullptr) {  // which needs a fiber: this one
      self.threads_[next].fiber = fiber;
      self.Become(static_cast<unsigned>(next));
    } else {
      self.fibers_.Give(fiber);
      self.Resume(next);  // returns when the fiber has been given to another thread
    }
  }
}

void BlockScheduler::RunThread() {
  try {
    running_block.in_kernel = true;
    run_(call_);
    running_block.in_kernel = false;
    EndThread();
  } catch (...) {
    running_block.in_kernel = false;
    error_ = std::current_exception();
  }
}

void BlockScheduler::EndThread() {
  Thread& thread = threads_[current_];
  thread.state = State::kDone;
  thread.fiber = nullptr;
  --live_;
  warps_[current_ / 32].alive &= ~(1u << current_ % 32);
  if (at_barrier_ > 0 && at_barrier_ == live_) OpenBarrier();
  // What the others of its warp wait for may have become impossible.
  uint32_t waiting = warps_[current_ / 32].waiting;
  for (; waiting != 0; waiting &= waiting - 1) {
    TryWarpCollective(current_ / 32 * 32 + static_cast<unsigned>(std::countr_zero(waiting)));
  }
}

// Lets the next thread run; returns when it is this one's turn again.
void BlockScheduler::Suspend() {
  const int next = ready_.Pop();
  if (next != static_cast<int>(current_)) Resume(next);
}

void BlockScheduler::Resume(int thread) {
  if (thread < 0) return SwitchTo(host_);
  Fiber*& fiber = threads_[thread].fiber;
  if (fiber == nullptr) fiber = fibers_.Take();
  Become(static_cast<unsigned>(thread));
  SwitchTo(*fiber);
}

void BlockScheduler::Become(unsigned thread) {
  current_ = thread;
  this_thread = &positions_[thread];
}

void BlockScheduler::SwitchTo(Fiber& fiber) {
  Fiber* const from = running_;
  if (from == &fiber) return;
  running_ = &fiber;
  running_block.stack_begin = fiber.stack();
  running_block.stack_end = fiber.stack() + fiber.stack_bytes();
  from->SwitchTo(fiber);
}

void BlockScheduler::Yield() {
  ready_.Push(current_);
  Suspend();
}

void BlockScheduler::MayPreempt() {
  if (config_.preempt_every > 0 && Mixed(config_.seed + ++accesses_) % config_.preempt_every == 0) Yield();
}

// ---- barriers ----

int BlockScheduler::Barrier(Vote vote, bool predicate, Site site) {
  Thread& thread = threads_[current_];
  thread.state = State::kAtBarrier;
  thread.predicate = predicate;
  thread.site = site;
  vote_ = vote;
  if (++at_barrier_ == live_) OpenBarrier();
  Suspend();
  return thread.votes;
}

void BlockScheduler::OpenBarrier() {
  if (live_ < num_threads_) {
    throw Error(
        StrCat("divergent barrier: some threads have returned from the kernel before it\n", Describe()));
  }
  int holds = 0;
  for (unsigned i = 0; i < num_threads_; ++i) {
    if (threads_[i].site != threads_[0].site) {
      throw Error(StrCat("divergent barrier: threads of one block wait at different ones\n", Describe()));
    }
    holds += threads_[i].predicate;
  }
  const int all = static_cast<int>(num_threads_);
  const int votes = vote_ == Vote::kCount ? holds : vote_ == Vote::kAll ? holds == all : holds > 0;
  at_barrier_ = 0;
  if (checker_) checker_->Barrier();
  for (unsigned i = 0; i < num_threads_; ++i) {
    threads_[i].votes = votes;
    MakeReady(i);
  }
}

// ---- warp collectives ----

void BlockScheduler::WarpCollective(uint32_t mask, void* argument, WarpFunction function, Site site,
                                    bool orders_memory) {
  Thread& thread = threads_[current_];
  if ((mask >> current_ % 32 & 1) == 0) {
    throw Error(StrCat(site.what, ": the lane that calls is not in its own mask ", Hex(mask), ", at ",
                       Place(site.where), Who()));
  }
  thread.state = State::kInWarp;
  thread.mask = mask;
  thread.argument = argument;
  thread.function = function;
  thread.site = site;
  thread.orders_memory = orders_memory;
  warps_[current_ / 32].waiting |= 1u << current_ % 32;
  TryWarpCollective(current_);
  Suspend();
}

// Does what `thread` waits for if all lanes of its mask wait for it.
void BlockScheduler::TryWarpCollective(unsigned thread) {
  const Thread& asked = threads_[thread];
  const unsigned first = thread / 32 * 32;
  Warp& warp = warps_[thread / 32];
  // Lanes that the block never had may be named.
  const uint32_t lanes = asked.mask & FirstLanes(num_threads_ - first), present = lanes & warp.alive;
  if ((present & ~warp.waiting) != 0) return;
  void* arguments[32] = {};
  for (uint32_t left = present; left != 0; left &= left - 1) {
    const unsigned lane = static_cast<unsigned>(std::countr_zero(left));
    const Thread& other = threads_[first + lane];
    if (other.mask != asked.mask) return;  // it has another collective to end first
    if (other.function != asked.function || other.site != asked.site) {
      throw Error(StrCat("divergent warp collective: lanes that one mask names are in different calls\n",
                         Describe()));
    }
    arguments[lane] = other.argument;
  }
  if (present != lanes) {
    throw Error(StrCat("divergent warp collective: it names lanes that have returned (",
                       Hex(lanes & ~present), ")\n", Describe()));
  }
  warp.waiting &= ~lanes;
  asked.function(arguments);
  if (asked.orders_memory && checker_) checker_->SyncWarp(first, lanes);
  for (uint32_t left = lanes; left != 0; left &= left - 1) {
    MakeReady(first + static_cast<unsigned>(std::countr_zero(left)));
  }
}

// ---- shared memory and copies ----

void* BlockScheduler::SharedArray(const void* key, size_t bytes, Loc where) {
  void* const array = shared_.Array(key, bytes);
  if (array == nullptr) {
    throw Error(
        StrCat("static shared arrays exceed ", SharedArena::kStaticLimit, " bytes at ", Place(where), Who()));
  }
  if (dynamic_bytes_ + shared_.static_bytes() > config_.max_shared_bytes) {
    throw Error(StrCat("static and dynamic shared memory together exceed ", config_.max_shared_bytes,
                       " bytes at ", Place(where), Who()));
  }
  return array;
}

void BlockScheduler::BeginCopy(const PendingCopies::Copy& copy) {
  const auto Misaligned = [&](const void* p) { return reinterpret_cast<uintptr_t>(p) % copy.bytes != 0; };
  if ((copy.bytes != 4 && copy.bytes != 8 && copy.bytes != 16) || Misaligned(copy.to) ||
      Misaligned(copy.from)) {
    throw Error(StrCat("cp.async: misaligned address at ", Place(copy.where), Who()));
  }
  if (!shared_.Contains(copy.to, copy.bytes)) {
    throw Error(StrCat("cp.async to ", shared_.Describe(copy.to), " at ", Place(copy.where), Who()));
  }
  if (checker_) {
    if (copy.valid > 0) checker_->Read(copy.from, copy.valid, copy.where);
    checker_->BeginCopy(copy.to, copy.bytes, copy.where);
  }
  if (config_.order == Order::kRandom && ready_.Random() % 2 == 0) {
    std::memcpy(copy.to, copy.from, copy.valid);  // lands now, and again when it is waited for
  }
  threads_[current_].copies.Add(copy);
}

void BlockScheduler::LandCopies(unsigned left) {
  threads_[current_].copies.Land(left, [this](const PendingCopies::Copy& copy) { Land(copy); });
}

void BlockScheduler::Land(const PendingCopies::Copy& copy) {
  if (checker_) checker_->LandCopy(copy.to, copy.bytes, copy.where);
  std::memcpy(copy.to, copy.from, copy.valid);
  std::memset(static_cast<char*>(copy.to) + copy.valid, 0, copy.bytes - copy.valid);
}

// ---- errors ----

void BlockScheduler::Abandon(const Error& error) {
  error_ = std::make_exception_ptr(error);
  SwitchTo(host_);
  __builtin_unreachable();  // the fiber is restarted
}

std::string BlockScheduler::Who() const {
  return StrCat(" by block ", Triple(this_block.index), " thread ", Triple(positions_[current_].index));
}

std::string BlockScheduler::DescribeThread(unsigned i) const {
  const Thread& thread = threads_[i];
  switch (thread.state) {
    case State::kReady:
      return "can run";
    case State::kDone:
      return "have returned from the kernel";
    case State::kAtBarrier:
      return StrCat("wait in ", thread.site.what, " at ", Place(thread.site.where));
    case State::kInWarp:
      return StrCat("wait in ", thread.site.what, "(mask ", Hex(thread.mask), ") at ",
                    Place(thread.site.where));
  }
  return "";
}

std::string BlockScheduler::Describe() const {
  constexpr int kMaxLines = 16;
  std::string text = StrCat("  block ", Triple(this_block.index), ", ", live_, " of ", num_threads_,
                            " threads not finished");
  int lines = 0;
  for (unsigned begin = 0, end; begin < num_threads_; begin = end) {
    const std::string state = DescribeThread(begin);
    for (end = begin + 1; end < num_threads_ && DescribeThread(end) == state;) ++end;
    if (++lines > kMaxLines) return text + "\n  …";
    text += StrCat("\n  threads ", begin, "-", end - 1, ": ", state);
  }
  return text;
}

}  // namespace internal
}  // namespace simt
