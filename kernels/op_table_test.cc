// Every op, every backend of the CPU, against the reference kernels in double.

#include <bit>
#include <catch2/catch.hpp>
#include <functional>
#include <map>
#include <numeric>
#include <set>

#include "kernels/op_cases.h"

namespace strata {
namespace {

std::vector<const KernelTable*> CpuTables() {
  std::vector<const KernelTable*> tables;
  for (CpuIsa isa : SupportedCpuIsas()) tables.push_back(&CpuKernels(isa));
  return tables;
}

bool BitEqual(const std::vector<CaseOutput>& a, const std::vector<CaseOutput>& b) {
  for (size_t s = 0; s < a.size(); ++s) {
    for (size_t i = 0; i < a[s].values.size(); ++i) {
      if (std::bit_cast<uint64_t>(a[s].values[i]) != std::bit_cast<uint64_t>(b[s].values[i])) return false;
    }
  }
  return true;
}

class Devices {
 public:
  Device& operator[](int num_threads) {
    std::unique_ptr<Device>& device = devices_[num_threads];
    if (!device) device = NewCpuDevice(num_threads);
    return *device;
  }

 private:
  std::map<int, std::unique_ptr<Device>> devices_;
};

// Runs the cases of the ops on every table: within the bound of the oracle, bit-equal on 1, 2 and 3 threads
// and wherever the tensors lie.
void CheckOps(const std::set<std::string>& ops) {
  Devices devices;
  std::map<std::string, int> failures;  // by table and op; the first few are shown
  for (const OpCase& op_case : AllOpCases()) {
    if (!ops.contains(op_case.op)) continue;
    const auto oracle = RunCase(op_case, ReferenceKernels(), devices[1], {.in_double = true});
    const auto check = [&](const KernelTable& table, const std::string& problem) {
      if (problem.empty() || ++failures[table.name + op_case.op] > 5) return;
      FAIL_CHECK(table.name << ": " << op_case.op << " " << op_case.name << ": " << problem);
    };
    check(ReferenceKernels(), Difference(RunCase(op_case, ReferenceKernels(), devices[1]), oracle));
    for (const KernelTable* table : CpuTables()) {
      const auto got = RunCase(op_case, *table, devices[1]);
      check(*table, Difference(got, oracle));
      for (int threads : {2, 3}) {
        const auto same = RunCase(op_case, *table, devices[threads], {.shift = threads - 2});
        check(*table, BitEqual(got, same) ? "" : StrCat("not bit-equal on ", threads, " threads"));
      }
    }
  }
  SUCCEED();
}

TEST_CASE("matrix products agree with the oracle") { CheckOps({"matmul", "column_sum"}); }
TEST_CASE("attention agrees with the oracle") {
  CheckOps({"attention_forward", "attention_backward", "rotary"});
}
TEST_CASE("norms agree with the oracle") {
  CheckOps({"layer_norm_forward", "layer_norm_backward", "rms_norm_forward", "rms_norm_backward"});
}
TEST_CASE("elementwise ops agree with the oracle") {
  CheckOps({"activation_forward", "activation_backward", "swiglu_forward", "swiglu_backward", "axpby", "fill",
            "sum_squares"});
}
TEST_CASE("ops on rows agree with the oracle") {
  CheckOps(
      {"embedding_forward", "embedding_backward", "gather_rows", "scatter_rows", "softmax_cross_entropy"});
}
TEST_CASE("cross entropy over a part of the vocabulary agrees with the oracle") {
  CheckOps({"cross_entropy_partial", "cross_entropy_grad"});
}
TEST_CASE("routing agrees with the oracle") {
  CheckOps({"route", "route_backward", "combine_rows", "combine_rows_backward"});
}
TEST_CASE("products of groups agree with the oracle") { CheckOps({"grouped_matmul", "grouped_column_sum"}); }
TEST_CASE("ops with random numbers agree with the oracle") { CheckOps({"dropout", "random_normal"}); }
TEST_CASE("optimisers agree with the oracle") { CheckOps({"adamw", "sgd", "lion"}); }

TEST_CASE("random_normal has the same bits on every instruction set") {
  const std::unique_ptr<Device> device = NewCpuDevice(1);
  for (const OpCase& op_case : AllOpCases()) {
    if (op_case.op != "random_normal") continue;
    INFO(op_case.name);
    const auto scalar = RunCase(op_case, CpuKernels(CpuIsa::kScalar), *device);
    for (const KernelTable* table : CpuTables()) {
      INFO(table->name);
      CHECK(BitEqual(scalar, RunCase(op_case, *table, *device)));
    }
  }
}

// So that a step that keeps only pre-activations can make the activations again.
TEST_CASE("a product's activation has the bits of activation_forward on its pre-activation") {
  const std::unique_ptr<Device> device = NewCpuDevice(1);
  const DType type = GENERATE(DType::kF32, DType::kBF16, DType::kF16);
  const Activation activation = GENERATE(Activation::kNone, Activation::kGeluTanh, Activation::kGeluErf,
                                         Activation::kSilu, Activation::kRelu);
  for (const KernelTable* table : CpuTables()) {
    INFO(table->name << " " << Name(type) << " activation " << static_cast<int>(activation));
    CaseTensors tensors(*device);
    const Shape shape{37, 70};
    MatmulArgs product;
    product.a = tensors.Random(type, {37, 50});
    product.b = tensors.Random(type, {50, 70}, 0.3);
    product.c = tensors.Result("c", type, shape, {});
    product.bias = tensors.Random(DType::kF32, {70});
    product.activation = activation;
    product.pre_activation = tensors.Result("pre_activation", type, shape, {});
    table->matmul(ContextOf(*device), product);
    const TensorView again = tensors.Result("again", type, shape, {});
    table->activation_forward(ContextOf(*device), {activation, product.pre_activation, again});
    const std::vector<double> fused = tensors.Values(product.c), apart = tensors.Values(again);
    CHECK(std::inner_product(fused.begin(), fused.end(), apart.begin(), 0, std::plus(),
                             std::not_equal_to()) == 0);
  }
}

TEST_CASE("every op has cases") {
  std::set<std::string> ops;
  for (const OpCase& op_case : AllOpCases()) ops.insert(op_case.op);
#define STRATA_OP(op, Args) CHECK(ops.contains(#op));
#include "kernels/ops.def"
#undef STRATA_OP
}

// An op that a backend does not have yet is listed here by name; today none is missing.
TEST_CASE("no table has an empty cell") {
  const std::vector<std::string> missing;
  CHECK(NullCells(ReferenceKernels()) == missing);
  CHECK(NullCells(CpuKernels()) == missing);
  for (const KernelTable* table : CpuTables()) {
    INFO(table->name);
    CHECK(NullCells(*table) == missing);
  }
  KernelTable incomplete = ReferenceKernels();
  incomplete.dropout = nullptr;
  CHECK(NullCells(incomplete) == std::vector<std::string>{"dropout"});
}

TEST_CASE("the comparison notices what it should") {
  const CaseOutput want{"x", DType::kF32, {}, {1.0, 2.0, NAN, INFINITY}};
  const auto with = [&](size_t i, double value) {
    CaseOutput got = want;
    got.values[i] = value;
    return Difference({got}, {want});
  };
  CHECK(with(0, 1 + 1e-7).empty());
  CHECK_FALSE(with(0, 1 + 1e-5).empty());
  CHECK_FALSE(with(1, NAN).empty());
  CHECK_FALSE(with(2, 0).empty());
  CHECK_FALSE(with(3, 3e38).empty());
  CHECK_FALSE(with(3, -INFINITY).empty());
}

}  // namespace
}  // namespace strata
