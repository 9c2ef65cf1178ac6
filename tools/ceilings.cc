#include "tools/ceilings.h"

#include <algorithm>

#include "kernels/cpu/peak.h"
#include "kernels/cuda/cuda_properties.h"
#include "runtime/base/units.h"

namespace strata {

double SecondsOfCall(Device& device, double seconds, const std::function<void()>& body) {
  const auto run = [&](int64_t calls) {
    device.Synchronize(device.compute_stream());
    const double begin = Now();
    for (int64_t i = 0; i < calls; ++i) body();
    device.Synchronize(device.compute_stream());
    return (Now() - begin) / static_cast<double>(calls);
  };
  const double one = run(1);
  const auto calls = static_cast<int64_t>(std::min(seconds / one, 1000.0));
  return calls < 2 ? one : run(calls);
}

double Ceilings::Square::seconds(const Executor& run, double at_least) const {
  return SecondsOfCall(run.device(), at_least, [&] { run.matmul(args); });
}

double Ceilings::Square::flops() const {
  const auto side = static_cast<double>(args.c.shape[0]);
  return 2 * side * side * side;
}

Ceilings::Square Ceilings::MakeSquare(DType dtype, int64_t side) const {
  Square square;
  for (TensorView* view : {&square.args.a, &square.args.b, &square.args.c}) {
    square.buffers.push_back(run_.device().allocator().Allocate(
        static_cast<size_t>(side * side) * SizeOf(dtype), MemoryTag::kBuffers));
    *view = TensorView(square.buffers.back().data(), dtype, {side, side});
    // Numbers as they occur: products of zeros draw less power, and clock higher.
    RandomNormalArgs normal;
    normal.out = *view;
    run_.random_normal(normal);
  }
  square.args.trans_b = true;
  return square;
}

double Ceilings::Products(DType dtype, double seconds) {
  if (!on_gpu()) return MeasureFmaPeak(run_.device().pool(), seconds);
  if (!squares_.contains(dtype)) {
    constexpr int64_t kLargest = 8192;
    constexpr double kLongEnough = 1e-3;
    int64_t side = 64;
    Square square = MakeSquare(dtype, side);
    square.seconds(run_, 0);  // the first product of a process also opens the library
    while (side < kLargest && square.seconds(run_, 0) < kLongEnough) {
      side *= 2;
      square = MakeSquare(dtype, side);
    }
    squares_.emplace(dtype, std::move(square));
  }
  const Square& square = squares_.at(dtype);
  return square.flops() / square.seconds(run_, seconds) / 1e9;
}

double Ceilings::Bandwidth(int64_t bytes) {
  Device& device = run_.device();
  if (!on_gpu()) return MeasureTriad(device.pool(), bytes);
  const auto half = static_cast<size_t>(bytes) / 2;
  const Buffer from = device.allocator().Allocate(half, MemoryTag::kBuffers),
               to = device.allocator().Allocate(half, MemoryTag::kBuffers);
  const auto copy = [&] { device.Copy(to.data(), from.data(), half, device.compute_stream()); };
  SecondsOfCall(device, 0, copy);  // warms up
  return 2 * static_cast<double>(half) / SecondsOfCall(device, 5e-3, copy) / 1e9;
}

double Ceilings::TheoreticalProducts(DType dtype) const {
  if (!on_gpu() || dtype == DType::kF32) return 0;
  return PropertiesOfCudaDevice(run_.device().index()).bf16_flops / 1e9;
}

std::string Ceilings::products_meaning() const {
  return on_gpu() ? "rate of a large square product" : "fp32 FMA rate";
}

std::string Ceilings::bandwidth_meaning() const {
  return on_gpu() ? "copy within the GPU's memory" : "triad a = b + s*c (12 bytes an element)";
}

}  // namespace strata
