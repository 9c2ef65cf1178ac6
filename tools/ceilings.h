// Ceilings: what a device does at best, measured: what speeds are compared with.
//
//   the CPU   kernels/cpu/peak.h: fp32 multiply-adds between registers, whatever the type; triad
//   a GPU     a square product of the type, large enough to take a millisecond, by cuBLASLt where it is
//   there;
//             a copy within the GPU's memory, each byte counted as it is read and as it is written
//
// Ownership: refers to the executor, which outlives it; keeps the product's matrices on the device (tag
// `buffers`). Threading: the rank's thread.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "kernels/executor.h"

namespace strata {

/// Seconds of one call of `body`, whose work is awaited: the mean of as many calls as take about `seconds`
/// together, so that starting and awaiting them does not count; 0: of a single one.
double SecondsOfCall(Device& device, double seconds, const std::function<void()>& body);

class Ceilings {
 public:
  explicit Ceilings(const Executor& run) : run_(run) {}

  /// Rate of multiply-adds in products of `dtype`, in GFLOP/s (a multiply-add is 2). Takes about `seconds`.
  double Products(DType dtype, double seconds = 0.01);
  /// Memory bandwidth in GB/s, over arrays of `bytes` together.
  double Bandwidth(int64_t bytes);
  /// The rate that the GPU's clock and multiprocessors allow, in GFLOP/s; 0 where it is not known.
  double TheoreticalProducts(DType dtype) const;

  /// What the two measure: "rate of …".
  std::string products_meaning() const;
  std::string bandwidth_meaning() const;

 private:
  struct Square {
    MatmulArgs args;
    std::vector<Buffer> buffers;
    double seconds(const Executor& run, double at_least) const;
    double flops() const;
  };
  Square MakeSquare(DType dtype, int64_t side) const;
  bool on_gpu() const { return run_.device().type() == DeviceType::kCuda; }

  const Executor& run_;
  std::map<DType, Square> squares_;
};

}  // namespace strata
