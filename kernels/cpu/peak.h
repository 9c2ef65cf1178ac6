// What this machine can do at best: the ceilings that speeds are compared with.
//
// Each figure is the best of many short measurements, so that other programs running beside disturb it
// little. Threading: called like a kernel, by the thread that owns the pool.
#pragma once

#include <cstdint>

#include "runtime/base/thread_pool.h"

namespace strata {

/// Rate of fp32 multiply-adds between registers by the widest vectors here, of all threads of `pool`
/// together, in GFLOP/s (a multiply-add is 2). Takes about `seconds`.
double MeasureFmaPeak(ThreadPool& pool, double seconds);

/// The same of vdpbf16ps (a pair of multiply-adds is 4); 0 where there is none.
double MeasureBf16DotPeak(ThreadPool& pool, double seconds);

/// Memory bandwidth of a = b + s · c (McCalpin, "STREAM", 1995) over three fp32 arrays of `bytes` together,
/// in GB/s, 12 bytes being counted for an element; the better of plain and non-temporal stores. `bytes`
/// should be several times the last cache.
double MeasureTriad(ThreadPool& pool, int64_t bytes);

}  // namespace strata
