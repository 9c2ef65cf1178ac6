// What the tests of CPU kernels share: small tensors of any type, and running a kernel on every instruction
// set and several numbers of threads. Threading: one test at a time.
#pragma once

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/kernel_table.h"

namespace strata::testing {

/// A tensor that owns its elements and shows them as doubles. It begins as NaN (all bits set).
class TestTensor {
 public:
  TestTensor() = default;
  TestTensor(DType dtype, Shape shape)
      : dtype_(dtype),
        shape_(shape),
        bytes_(static_cast<size_t>(shape.num_elements()) * SizeOf(dtype), '\xff') {
    bytes_.reserve(bytes_.size() + 1);  // so that data() of an empty tensor is not null: it is defined
  }
  /// Uniform in [low, high), rounded to the type.
  static TestTensor Random(DType dtype, Shape shape, uint32_t seed, double low = -2, double high = 2) {
    TestTensor tensor(dtype, shape);
    std::mt19937 random(seed);
    std::uniform_real_distribution<double> draw(low, high);
    for (int64_t i = 0; i < tensor.size(); ++i) tensor.Set(i, draw(random));
    return tensor;
  }
  template <typename T>
  static TestTensor Of(const std::vector<T>& values, Shape shape) {
    TestTensor tensor(kDTypeOf<T>, shape);
    for (size_t i = 0; i < values.size(); ++i) tensor.Put(static_cast<int64_t>(i), values[i]);
    return tensor;
  }
  static TestTensor Ints(const std::vector<int32_t>& values) {
    return Of(values, {static_cast<int64_t>(values.size())});
  }

  TensorView view() { return {bytes_.data(), dtype_, shape_}; }
  DType dtype() const { return dtype_; }
  int64_t size() const { return shape_.num_elements(); }
  std::vector<char>& bytes() { return bytes_; }

  double operator[](int64_t i) const {
    switch (dtype_) {
      case DType::kF32:
        return At<float>(i);
      case DType::kBF16:
        return static_cast<float>(At<BFloat16>(i));
      case DType::kF16:
        return static_cast<float>(At<Half>(i));
      case DType::kF64:
        return At<double>(i);
      default:
        return At<int32_t>(i);
    }
  }
  void Set(int64_t i, double value) {
    const float rounded = static_cast<float>(value);
    switch (dtype_) {
      case DType::kF32:
        return Put(i, rounded);
      case DType::kBF16:
        return Put(i, BFloat16(rounded));
      case DType::kF16:
        return Put(i, Half(rounded));
      case DType::kF64:
        return Put(i, value);
      default:
        return Put(i, static_cast<int32_t>(value));
    }
  }
  std::vector<double> values() const {
    std::vector<double> v(static_cast<size_t>(size()));
    for (int64_t i = 0; i < size(); ++i) v[i] = (*this)[i];
    return v;
  }

 private:
  template <typename T>
  T At(int64_t i) const {
    T value;
    std::memcpy(&value, bytes_.data() + static_cast<size_t>(i) * sizeof(T), sizeof(T));
    return value;
  }
  template <typename T>
  void Put(int64_t i, T value) {
    std::memcpy(bytes_.data() + static_cast<size_t>(i) * sizeof(T), &value, sizeof(T));
  }

  DType dtype_ = DType::kF32;
  Shape shape_ = {0};
  std::vector<char> bytes_;
};

/// The relative spacing of a type.
inline double Epsilon(DType dtype) {
  return dtype == DType::kBF16 ? 0x1p-8 : dtype == DType::kF16 ? 0x1p-11 : 0x1p-24;
}

/// Every element of `got` is `want` within `absolute`, and within its type's rounding and `relative` of it.
inline void CheckClose(const TestTensor& got, const std::vector<double>& want, double absolute,
                       double relative = 1e-6) {
  REQUIRE(got.size() == static_cast<int64_t>(want.size()));
  const double smallest = got.dtype() == DType::kF16 ? 0x1p-25 : 0;
  for (int64_t i = 0; i < got.size(); ++i) {
    const double bound = absolute + smallest + (relative + 1.001 * Epsilon(got.dtype())) * std::abs(want[i]);
    if (!(std::abs(got[i] - want[i]) <= bound)) {
      FAIL("element " << i << " is " << got[i] << ", not " << want[i] << " ± " << bound);
    }
  }
}

/// Runs `run` for every instruction set of this processor and 1, 2 and 3 threads, each time from the same
/// content of `tensors` (all that `run` reads or writes). `check` sees the results of one thread; more
/// threads must give the same bits.
inline void OnEveryCpu(const std::vector<TestTensor*>& tensors,
                       const std::function<void(const KernelTable&, const KernelContext&)>& run,
                       const std::function<void()>& check) {
  std::vector<std::vector<char>> initial, expected(tensors.size());
  for (TestTensor* tensor : tensors) initial.push_back(tensor->bytes());
  for (CpuIsa isa : SupportedCpuIsas()) {
    INFO("instruction set " << Name(isa));
    for (int threads = 1; threads <= 3; ++threads) {
      INFO(threads << " threads");
      static const std::unique_ptr<Device> devices[] = {NewCpuDevice(1), NewCpuDevice(2), NewCpuDevice(3)};
      Device& device = *devices[threads - 1];
      for (size_t i = 0; i < tensors.size(); ++i) {
        std::copy(initial[i].begin(), initial[i].end(), tensors[i]->bytes().begin());
      }
      run(CpuKernels(isa), KernelContext{&device.pool(), device.compute_stream(), &device.allocator()});
      if (threads == 1) {
        check();
        for (size_t i = 0; i < tensors.size(); ++i) expected[i] = tensors[i]->bytes();
      }
      for (size_t i = 0; i < tensors.size(); ++i) {
        if (tensors[i]->bytes() != expected[i]) FAIL("tensor " << i << " depends on the number of threads");
      }
    }
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    std::copy(initial[i].begin(), initial[i].end(), tensors[i]->bytes().begin());
  }
}

inline constexpr DType kFloatTypes[] = {DType::kF32, DType::kBF16, DType::kF16};

/// The slope of `f` at x by central differences.
inline double Slope(const std::function<double(double)>& f, double x) {
  constexpr double kStep = 1e-5;
  return (f(x + kStep) - f(x - kStep)) / (2 * kStep);
}

}  // namespace strata::testing
