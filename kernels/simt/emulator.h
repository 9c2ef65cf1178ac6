// Runs CUDA kernels on the CPU, for tests: what simt.h includes where no CUDA compiler is at work.
//
// The threads of a block are fibers that run in turns on one thread of the processor, from one barrier, warp
// collective or end to the next; blocks run one after another. A schedule says in which order: a kernel that
// is right gives the same result in all. An error of the kernel ends the grid with simt::Error: barriers or
// warp collectives that diverge, threads that wait for ever, limits exceeded; in the race build (race.h) also
// each wrong access to memory. What it cannot show: errors of the memory model beyond races, and speed.
//
// Threading: each thread has a schedule of its own and emulates a device of its own.
#pragma once

#define SIMT_EMULATED 1

#include <cuda_runtime_api.h>

#include <cstring>
#include <functional>
#include <tuple>

#include "kernels/simt/device_types.h"
#include "kernels/simt/execution.h"
#include "kernels/simt/intrinsics.h"
#include "runtime/base/error.h"

/// A static shared array of the block; SIMT_SHARED(float, tile, [32][33]) declares float tile[32][33].
#define SIMT_SHARED(T, name, dims)               \
  typedef T name##_simt_array dims;              \
  static const char name##_simt_key = 0;         \
  auto& name = *static_cast<name##_simt_array*>( \
      ::simt::internal::SharedArray(&name##_simt_key, sizeof(name##_simt_array), ::simt::Loc::current()))
/// The launch's dynamic shared memory.
#define SIMT_DYNAMIC_SHARED(T, name) T* name = static_cast<T*>(::simt::internal::DynamicShared())

namespace simt {

/// What is wrong with a kernel, and which threads wait where.
struct Error : strata::Error {
  using strata::Error::Error;
};

/// Who runs next: the thread that has waited longest, that with the highest number, or a random one. In the
/// random order one warp may run far ahead of others.
enum class Order : uint8_t { kInOrder, kReverse, kRandom };

struct Config {
  Order order = Order::kInOrder;
  uint64_t seed = 1;                            // of the random order; the same seed gives the same order
  size_t max_shared_bytes = size_t{227} << 10;  // of a block, static and dynamic together
  unsigned preempt_every = 0;  // in the race build one access in so many lets others run; 0: none
};
/// This thread's, which grids take up as they begin.
Config& config();

/// A kernel with its arguments, of which each thread gets a copy.
template <class... P>
struct KernelCall {
  void (*kernel)(P...);
  std::tuple<P...> arguments;

  static void Run(const void* call) {
    const auto& self = *static_cast<const KernelCall*>(call);
    std::apply(self.kernel, self.arguments);
  }
};

/// Runs a grid to its end: run(call) in each thread, where [call, call + call_bytes) is what the kernel may
/// read beside the device's memory. Throws simt::Error.
void RunGrid(dim3 grid, dim3 block, size_t shared_bytes, void (*run)(const void* call), const void* call,
             size_t call_bytes);
template <class... P>
void RunGrid(dim3 grid, dim3 block, size_t shared_bytes, const KernelCall<P...>& call) {
  RunGrid(grid, block, shared_bytes, &KernelCall<P...>::Run, &call, sizeof(call));
}

/// Queues work of a stream (emulated_runtime.cc).
void Enqueue(cudaStream_t stream, std::function<void()> work);
/// Refuses a pointer to memory that is not the device's.
void CheckPointer(const void* p);
template <class T>
void CheckArgument(const T& value) {
  if constexpr (std::is_pointer_v<T>) CheckPointer(value);
}

}  // namespace simt
