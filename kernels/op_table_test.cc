// Every op, every backend of the CPU, against the reference kernels in double.

#include <bit>
#include <catch2/catch.hpp>
#include <map>

#include "kernels/op_cases.h"

namespace strata {
namespace {

constexpr const char* kOps[] = {
#define STRATA_OP(op, Args) #op,
#include "kernels/ops.def"
#undef STRATA_OP
};

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

// Runs the cases of an op on every table: within the bound of the oracle, bit-equal on 1, 2 and 3 threads and
// wherever the tensors lie.
void CheckOp(const std::string& op) {
  Devices devices;
  int num_cases = 0;
  std::map<std::string, int> failures;  // by table; the first few are shown
  for (const OpCase& op_case : AllOpCases()) {
    if (op_case.op != op) continue;
    ++num_cases;
    const auto oracle = RunCase(op_case, ReferenceKernels(), devices[1], {.in_double = true});
    const auto check = [&](const KernelTable& table, const std::string& problem) {
      if (problem.empty() || ++failures[table.name] > 5) return;
      FAIL_CHECK(table.name << ": " << op_case.name << ": " << problem);
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
  CHECK(num_cases > 0);
}

TEST_CASE("every op agrees with the oracle") {
  for (const char* op : kOps) {
    DYNAMIC_SECTION(op) { CheckOp(op); }
  }
}

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

TEST_CASE("a product's activation has the bits of activation_forward on its pre-activation") {
  const std::unique_ptr<Device> device = NewCpuDevice(1);
  for (const KernelTable* table : CpuTables()) {
    INFO(table->name);
    CHECK(ActivationDifference(*table, *device) == "");
  }
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
