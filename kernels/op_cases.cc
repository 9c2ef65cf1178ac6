#include "kernels/op_cases.h"

#include <cmath>
#include <cstring>

#include "kernels/reference/elements.h"

namespace strata {
namespace {

using reference::LoadElement;
using reference::Rounded;
using reference::StoreElement;

constexpr size_t kGuard = 64;       // bytes before and after each tensor that nobody may write or use
constexpr std::byte kPoison{0xff};  // all ones is NaN in every floating type

// FNV-1a, over words; the guards make up for a remainder of less than one.
uint64_t Checksum(const std::vector<std::byte>& bytes) {
  uint64_t h = 14695981039346656037u, word;
  for (size_t i = 0; i + sizeof(word) <= bytes.size(); i += sizeof(word)) {
    std::memcpy(&word, &bytes[i], sizeof(word));
    h = (h ^ word) * 1099511628211u;
  }
  return h;
}

// Half the distance between 1 and the next number: rounding is relative to it. Integers are exact.
double Roundoff(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return 0x1p-53;
    case DType::kF32:
      return 0x1p-24;
    case DType::kF16:
      return 0x1p-11;
    case DType::kBF16:
      return 0x1p-8;
    default:
      return 0;
  }
}

// Rounding of numbers that are too small for all digits: half the smallest one.
double Underflow(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return 0x1p-150;
    case DType::kF16:
      return 0x1p-25;
    case DType::kBF16:
      return 0x1p-134;
    default:
      return 0;
  }
}

// The one place where the op test says how exact a kernel must be. Every output is rounded to its type. Sums
// run in fp32, in fp64 where the output is: n roundings add up like a random walk, to about √n of them.
double Bound(const CaseOutput& output, double want, double scale) {
  const Accuracy& accuracy = output.accuracy;
  const double rounding = 1.01 * Roundoff(output.dtype) * std::abs(want) + Underflow(output.dtype);
  if (accuracy.terms == 0) return rounding;
  const double unit = Roundoff(output.dtype == DType::kF64 ? DType::kF64 : DType::kF32);
  double relative = unit * (4 + 2 * std::sqrt(accuracy.terms) + accuracy.approximation);
  if (accuracy.through_t) relative += 2 * Roundoff(output.dtype);
  return rounding + relative * scale;
}

// Fills the memory that the allocator hands out next.
void PoisonFreeMemory(Device& device) {
  static const std::vector<std::byte> poison(1 << 19, kPoison);
  const Buffer buffer = device.allocator().Allocate(poison.size(), MemoryTag::kBuffers);
  device.Copy(buffer.data(), poison.data(), poison.size(), device.compute_stream());
  device.Synchronize(device.compute_stream());
}

}  // namespace

TensorView CaseTensors::Make(const std::string& name, DType dtype, Shape shape, Accuracy accuracy,
                             const std::function<double(int64_t)>& value) {
  const DType stored = options_.in_double && IsFloating(dtype) ? DType::kF64 : dtype;
  const size_t size = static_cast<size_t>(shape.num_elements()) * SizeOf(stored);
  const bool shifted = options_.only < 0 || options_.only == static_cast<int>(slots_.size());
  const size_t before = kGuard + (shifted ? static_cast<size_t>(options_.shift) * SizeOf(stored) : 0);
  std::vector<std::byte> bytes(before + size + kGuard, kPoison);
  for (int64_t i = 0; value && i < shape.num_elements(); ++i) {
    StoreElement(bytes.data() + before, stored, i, Rounded(dtype, value(i)));
  }
  Slot slot{name,     dtype,
            accuracy, device_.allocator().Allocate(bytes.size(), MemoryTag::kActivations),
            {},       Checksum(bytes)};
  slot.view = TensorView(static_cast<char*>(slot.buffer.data()) + before, stored, shape);
  device_.Copy(slot.buffer.data(), bytes.data(), bytes.size(), device_.compute_stream());
  device_.Synchronize(device_.compute_stream());
  slots_.push_back(slot);
  return slot.view;
}

std::function<double(int64_t)> CaseTensors::Normals(double scale, double mean) const {
  constexpr int64_t kNumbers = 65521;
  static const std::vector<float> numbers = [] {
    const RandomStream random{1, Purpose("op cases"), 0};
    std::vector<float> v(kNumbers);
    for (int64_t i = 0; i < kNumbers; ++i) v[i] = random.Normal(i);
    return v;
  }();
  const int64_t offset = 7919 * static_cast<int64_t>(slots_.size());
  return [=](int64_t i) { return mean + scale * numbers[(offset + i) % kNumbers]; };
}

TensorView CaseTensors::Random(DType dtype, Shape shape, double scale, double mean) {
  return Make("", dtype, shape, {}, Normals(scale, mean));
}

TensorView CaseTensors::Given(DType dtype, Shape shape, const std::vector<double>& values) {
  STRATA_CHECK(static_cast<int64_t>(values.size()) == shape.num_elements()) << shape.ToString();
  return Make("", dtype, shape, {}, [&](int64_t i) { return values[i]; });
}

TensorView CaseTensors::Result(const std::string& name, DType dtype, Shape shape, Accuracy accuracy) {
  return Make(name, dtype, shape, accuracy, nullptr);
}

TensorView CaseTensors::Updated(const std::string& name, DType dtype, Shape shape, Accuracy accuracy,
                                double scale, double mean) {
  return Make(name, dtype, shape, accuracy, Normals(scale, mean));
}

TensorView CaseTensors::Accumulated(const std::string& name, DType dtype, Shape shape, Accuracy accuracy,
                                    bool accumulate) {
  return accumulate ? Updated(name, dtype, shape, accuracy) : Result(name, dtype, shape, accuracy);
}

std::vector<std::byte> CaseTensors::Read(const void* from, size_t bytes) const {
  std::vector<std::byte> host(bytes);
  device_.Copy(host.data(), from, bytes, device_.compute_stream());
  device_.Synchronize(device_.compute_stream());
  return host;
}

std::vector<double> CaseTensors::Values(const TensorView& view) const {
  const std::vector<std::byte> bytes = Read(view.data, view.num_bytes());
  std::vector<double> values(view.num_elements());
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = LoadElement(bytes.data(), view.dtype, static_cast<int64_t>(i));
  }
  return values;
}

std::vector<CaseOutput> CaseTensors::Outputs() const {
  std::vector<CaseOutput> outputs;
  for (size_t s = 0; s < slots_.size(); ++s) {
    const Slot& slot = slots_[s];
    const std::vector<std::byte> bytes = Read(slot.buffer.data(), slot.buffer.size());
    const size_t before = static_cast<char*>(slot.view.data) - static_cast<char*>(slot.buffer.data());
    const size_t end = before + slot.view.num_bytes();
    for (size_t i = 0; i < end + kGuard; ++i) {
      if ((i < before || i >= end) && bytes[i] != kPoison) {
        throw Error(StrCat("tensor ", s, " (", slot.name, ") was written ",
                           i < before ? before - i : i - end + 1, " bytes ", i < before ? "before" : "after",
                           " its bounds"));
      }
    }
    if (!slot.name.empty()) {
      outputs.push_back({slot.name, slot.dtype, slot.accuracy, Values(slot.view)});
    } else if (Checksum(bytes) != slot.checksum) {
      throw Error(StrCat("input tensor ", s, " ", slot.view.shape.ToString(), " was written"));
    }
  }
  return outputs;
}

KernelContext ContextOf(Device& device) {
  return {&device.pool(), device.compute_stream(), &device.allocator()};
}

std::vector<CaseOutput> RunCase(const OpCase& op_case, const KernelTable& kernels, Device& device,
                                CaseTensors::Options options) {
  CaseTensors tensors(device, options);
  const Launch launch = op_case.build(tensors);
  PoisonFreeMemory(device);
  launch(kernels, ContextOf(device));
  device.Synchronize(device.compute_stream());
  return tensors.Outputs();
}

std::string Difference(const std::vector<CaseOutput>& got, const std::vector<CaseOutput>& want) {
  std::string text;
  for (size_t s = 0; s < want.size(); ++s) {
    const CaseOutput& output = want[s];
    double scale = output.accuracy.floor;
    for (double w : output.values) {
      if (std::isfinite(w)) scale = std::max(scale, std::abs(w));
    }
    size_t wrong = 0, worst = 0;
    double worst_excess = 0;
    for (size_t i = 0; i < output.values.size(); ++i) {
      const double g = got[s].values[i], w = output.values[i], rounded = Rounded(output.dtype, w);
      const double bound = Bound(output, w, scale);
      double excess = std::abs(g - w) / bound;  // above 1, or not a number, is wrong
      if (g == w || g == rounded || (std::isnan(g) && std::isnan(w))) excess = 0;
      if (excess <= 1) continue;
      if (std::isnan(excess)) excess = INFINITY;
      if (wrong++ == 0 || excess > worst_excess) worst = i, worst_excess = excess;
    }
    if (wrong == 0) continue;
    text += StrCat(text.empty() ? "" : "; ", output.name, "[", worst, "] is ", got[s].values[worst], ", not ",
                   output.values[worst], ": ", worst_excess, " times the bound (", wrong, " of ",
                   output.values.size(), " wrong)");
  }
  return text;
}

std::vector<std::string> NullCells(const KernelTable& kernels) {
  std::vector<std::string> names;
#define STRATA_OP(op, Args) \
  if (kernels.op == nullptr) names.push_back(#op);
#include "kernels/ops.def"
#undef STRATA_OP
  return names;
}

}  // namespace strata
