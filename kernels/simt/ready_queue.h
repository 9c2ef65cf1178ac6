// ReadyQueue: the threads of a block that could run, and who of them does next.
// Threading: one thread.
#pragma once

#include <array>
#include <bit>
#include <cstdint>

#include "kernels/simt/emulator.h"

namespace simt {

/// Most threads of a block.
inline constexpr unsigned kMaxThreads = 1024;

class ReadyQueue {
 public:
  /// Empties the queue. The order of a random schedule follows from `seed` and from who becomes ready when.
  void Begin(Order order, uint64_t seed) {
    order_ = order;
    begin_ = end_ = 0;
    warps_ = warp_ = 0;
    lanes_.fill(0);
    random_ = (seed ^ 0x9e3779b97f4a7c15) | 1;
    for (int i = 0; i < 4; ++i) Random();
  }

  void Push(unsigned thread) {
    if (order_ == Order::kRandom) {
      lanes_[thread / 32] |= 1u << thread % 32;
      warps_ |= 1u << thread / 32;
    } else {
      ring_[end_++ % kMaxThreads] = static_cast<uint16_t>(thread);
    }
  }

  /// -1 when nobody is ready.
  int Pop() {
    if (order_ == Order::kRandom) return warps_ == 0 ? -1 : PopRandom();
    if (begin_ == end_) return -1;
    return order_ == Order::kInOrder ? ring_[begin_++ % kMaxThreads] : ring_[--end_ % kMaxThreads];
  }

  uint64_t Random() {  // xorshift64
    random_ ^= random_ << 13;
    random_ ^= random_ >> 7;
    random_ ^= random_ << 17;
    return random_;
  }

 private:
  // A warp is kept for a long random run, so that it may get far ahead of the others.
  int PopRandom() {
    const uint64_t random = Random();
    if ((warps_ >> warp_ & 1) == 0 || random % 256 == 0) {
      warp_ = NthBit(warps_, static_cast<unsigned>(random >> 8) % std::popcount(warps_));
    }
    uint32_t& lanes = lanes_[warp_];
    const unsigned lane = NthBit(lanes, static_cast<unsigned>(random >> 32) % std::popcount(lanes));
    lanes &= ~(1u << lane);
    if (lanes == 0) warps_ &= ~(1u << warp_);
    return static_cast<int>(warp_ * 32 + lane);
  }
  static unsigned NthBit(uint32_t bits, unsigned n) {
    for (; n > 0; --n) bits &= bits - 1;
    return static_cast<unsigned>(std::countr_zero(bits));
  }

  Order order_ = Order::kInOrder;
  uint64_t random_ = 1;
  std::array<uint16_t, kMaxThreads> ring_{};        // in the other orders
  unsigned begin_ = 0, end_ = 0;                    // count on for ever
  std::array<uint32_t, kMaxThreads / 32> lanes_{};  // in the random order: the ready lanes of each warp
  uint32_t warps_ = 0;                              // and the warps that have some
  unsigned warp_ = 0;
};

}  // namespace simt
