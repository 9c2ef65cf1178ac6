// Op cases: named runs of every op of ops.def, whatever the backend and the device.
//
// A case builds its tensors through a Device, so they may lie in a memory of their own, from numbers that
// depend on the case alone. Outputs start as NaN. What a run leaves in them comes back as doubles; the oracle
// is the same case, its tensors kept in fp64, through the reference kernels. Benches build cases of their own
// shapes and time the launch.
//
// Ownership: CaseTensors owns the memory of one run; a Launch refers to it. Threading: one thread.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "kernels/kernel_table.h"

namespace strata {

/// How far an output may lie from the oracle, beyond the rounding of the value itself to the output's type.
/// Errors are relative to the scale of the output: the largest magnitude of the oracle's, at least `floor`.
struct Accuracy {
  double terms = 1;  // how many rounded numbers are added up; 0: nothing is, the value is only rounded
  double floor = 0;  // the magnitude of terms that cancel
  double approximation = 0;  // the error of exp, tanh … and of their arguments, in units of 2⁻²⁴
  bool through_t = false;    // intermediate results may be rounded to T, as tensor cores need them
};

struct CaseOutput {
  std::string name;
  DType dtype;
  Accuracy accuracy;
  std::vector<double> values;
};

class CaseTensors {
 public:
  struct Options {
    bool in_double = false;  // fp64 instead of each floating type, holding the same numbers
    int64_t shift = 0;       // elements by which tensors lie off the allocator's alignment
    int only = -1;           // the one tensor that does, by the order they are made in; −1: all
  };
  explicit CaseTensors(Device& device) : CaseTensors(device, Options()) {}
  CaseTensors(Device& device, Options options) : device_(device), options_(options) {}

  /// An input of normal numbers. From 65,521 elements on they repeat.
  TensorView Random(DType dtype, Shape shape, double scale = 1, double mean = 0);
  /// An input of these numbers, rounded to `dtype`.
  TensorView Given(DType dtype, Shape shape, const std::vector<double>& values);
  /// An output that the op must not read: NaN.
  TensorView Result(const std::string& name, DType dtype, Shape shape, Accuracy accuracy);
  /// An output that the op also reads: normal numbers.
  TensorView Updated(const std::string& name, DType dtype, Shape shape, Accuracy accuracy, double scale = 1,
                     double mean = 0);
  /// Result, or Updated with standard normal numbers for an op that accumulates.
  TensorView Accumulated(const std::string& name, DType dtype, Shape shape, Accuracy accuracy,
                         bool accumulate);

  /// What a tensor holds now.
  std::vector<double> Values(const TensorView& view) const;
  /// The outputs, in the order they were made. Throws Error if an input changed or a tensor was written
  /// outside its bounds.
  std::vector<CaseOutput> Outputs() const;

 private:
  struct Slot {
    std::string name;  // empty: an input
    DType dtype;
    Accuracy accuracy;
    Buffer buffer;
    TensorView view;
    uint64_t checksum;
  };
  // Makes a tensor whose element i is value(i), or NaN without `value`.
  TensorView Make(const std::string& name, DType dtype, Shape shape, Accuracy accuracy,
                  const std::function<double(int64_t)>& value);
  std::function<double(int64_t)> Normals(double scale, double mean) const;
  std::vector<std::byte> Read(const void* from, size_t bytes) const;

  Device& device_;
  Options options_;
  std::vector<Slot> slots_;
};

using Launch = std::function<void(const KernelTable&, const KernelContext&)>;

struct OpCase {
  std::string op;    // its row of ops.def
  std::string name;  // types, shape and options
  std::function<Launch(CaseTensors&)> build;
};

/// Every case of the shared op test, each op's together.
std::vector<OpCase> AllOpCases();

/// What the kernels of `device` run with.
KernelContext ContextOf(Device& device);
/// Builds and launches a case and returns its outputs. Free memory of the device's allocator, where scratch
/// comes from, is NaN before.
std::vector<CaseOutput> RunCase(const OpCase& op_case, const KernelTable& kernels, Device& device,
                                CaseTensors::Options options = {});
/// Empty when every element of `got` is within its bound of `want`; else says where it is farthest off.
std::string Difference(const std::vector<CaseOutput>& got, const std::vector<CaseOutput>& want);

/// Where a product's activation first lacks the bits of activation_forward on its pre-activation, which a
/// step that keeps only pre-activations counts on. Empty: nowhere.
std::string ActivationDifference(const KernelTable& kernels, Device& device);

/// The ops that a table lacks.
std::vector<std::string> NullCells(const KernelTable& kernels);

}  // namespace strata
