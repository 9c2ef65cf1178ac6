// Differentiable collectives against their formulas, and the vocabulary-parallel loss against the loss of a
// rank alone. Whole models in every layout are in tests/tensor_test.cc.
#include "parallel/tensor_parallel.h"

#include <catch2/catch.hpp>
#include <mutex>

#include "parallel/host_communicator.h"
#include "runtime/autograd/resident_parameters.h"

namespace strata {
namespace {

using Matrix = std::vector<float>;

// Different for every rank, row and column, and exact in fp32 sums.
float Value(int64_t rank, int64_t row, int64_t col) {
  return static_cast<float>(100 * rank + 10 * row + col) / 8.0f;
}

Matrix Rows(int64_t rank, int64_t begin, int64_t count, int64_t cols) {
  Matrix values;
  for (int64_t i = begin; i < begin + count; ++i) {
    for (int64_t j = 0; j < cols; ++j) values.push_back(Value(rank, i, j));
  }
  return values;
}

Matrix Values(const TensorView& view) { return {view.f32(), view.f32() + view.num_elements()}; }

// One rank of a tensor-parallel job on the CPU's kernels.
struct Rank {
  explicit Rank(Transport& transport)
      : comm(transport, {}), mesh(comm, MeshShape{transport.size(), transport.size(), 1}) {}

  std::unique_ptr<Device> device = NewCpuDevice(1);
  Executor executor{*device, CpuKernels()};
  CommEngine comm;
  ProcessMesh mesh;
  TensorGroup group{&mesh};
};

struct Passed {
  Matrix y, dx;
};

// Runs op on x, and gives it dy back.
template <typename Op>
Passed Pass(Rank& rank, int64_t rows, int64_t cols, const Matrix& x, const Matrix& dy, Op op) {
  Parameter trained;
  Parameter* const parameters[] = {&trained};
  ResidentParameters none(rank.executor, {}, DType::kF32);
  Tape tape(rank.executor, none, {});
  Passed passed;
  auto upload = [&](const Matrix& values) {
    Tensor tensor = tape.Empty({static_cast<int64_t>(values.size()) / cols, cols});
    std::copy(values.begin(), values.end(), tensor.view().f32());
    return tensor;
  };
  Tensor in = upload(x);
  STRATA_CHECK(in.shape()[0] == rows) << in.shape().ToString();
  tape.Record("source", {}, parameters, {&in}, [&](Backprop& bp) { passed.dx = Values(bp.dout().view()); });
  Tensor out = op(tape, std::move(in));
  passed.y = Values(out.view());
  Tensor end = tape.Empty({1});
  tape.Record("sink", {out}, {}, {&end}, [&](Backprop& bp) { bp.GiveDin(0, upload(dy)); });
  tape.Backward(std::span(&end, 1));
  return passed;
}

TEST_CASE("collectives and their gradients are their formulas") {
  constexpr int64_t kCols = 3;
  for (int size : {1, 2, 4}) {
    for (int64_t rows : {1, 5, 8}) {
      ThreadJob::Run(size, [&](Transport& transport) {
        Rank rank(transport);
        const int64_t me = transport.rank(), share = (rows + size - 1) / size;
        const int64_t begin = std::min(rows, me * share), count = std::min(share, rows - begin);
        const Matrix mine = Rows(me, 0, rows, kCols), common = Rows(0, 0, rows, kCols);
        Matrix sum(mine.size(), 0.0f);
        for (int64_t r = 0; r < size; ++r) {
          const Matrix other = Rows(r, 0, rows, kCols);
          for (size_t i = 0; i < sum.size(); ++i) sum[i] += other[i];
        }

        const Passed copied = Pass(rank, rows, kCols, common, mine, [&](Tape& tape, const Tensor& x) {
          return CopyToTensor(tape, rank.group, x);
        });
        const Passed reduced = Pass(rank, rows, kCols, mine, common, [&](Tape& tape, Tensor x) {
          return ReduceFromTensor(tape, rank.group, std::move(x));
        });
        const Passed scattered =
            Pass(rank, rows, kCols, common, Rows(0, begin, count, kCols),
                 [&](Tape& tape, const Tensor& x) { return ScatterRowsToTensor(tape, rank.group, x); });
        const Passed gathered = Pass(
            rank, count, kCols, Rows(0, begin, count, kCols), common,
            [&](Tape& tape, const Tensor& x) { return GatherRowsFromTensor(tape, rank.group, x, rows); });
        Passed gathered_to, reduced_rows;
        if (rows % size == 0) {
          gathered_to =
              Pass(rank, count, kCols, Rows(0, begin, count, kCols), mine,
                   [&](Tape& tape, const Tensor& x) { return GatherRowsToTensor(tape, rank.group, x); });
          reduced_rows =
              Pass(rank, rows, kCols, mine, Rows(0, begin, count, kCols),
                   [&](Tape& tape, const Tensor& x) { return ReduceRowsFromTensor(tape, rank.group, x); });
        }
        static std::mutex checks;  // Catch's macros take one thread at a time
        std::lock_guard lock(checks);
        INFO(size << " ranks, " << rows << " rows, rank " << me);
        CHECK(copied.y == common);
        CHECK(copied.dx == sum);
        CHECK(reduced.y == sum);
        CHECK(reduced.dx == common);
        CHECK(scattered.y == Rows(0, begin, count, kCols));
        CHECK(scattered.dx == common);
        CHECK(gathered.y == common);
        CHECK(gathered.dx == Rows(0, begin, count, kCols));
        if (rows % size != 0) return;
        const Matrix my_sum(sum.begin() + begin * kCols, sum.begin() + (begin + count) * kCols);
        CHECK(gathered_to.y == common);
        CHECK(gathered_to.dx == my_sum);
        CHECK(reduced_rows.y == my_sum);
        CHECK(reduced_rows.dx == common);
      });
    }
  }
}

// What a head gives: each row's loss, the gradients of x and of the whole weight and bias, and the logits.
struct HeadResult {
  Matrix loss, dx, logits, dweight, dbias;
};

constexpr int64_t kHidden = 8, kHeadRows = 700;  // more than a chunk

HeadResult RunHead(int ranks, int64_t vocab) {
  HeadResult result;
  result.dweight.resize(static_cast<size_t>(vocab * kHidden));
  result.dbias.resize(static_cast<size_t>(vocab));
  std::mutex mutex;
  ThreadJob::Run(ranks, [&](Transport& transport) {
    Rank rank(transport);
    ColumnParallelLinear head(rank.group, kHidden, {vocab}, true, Initializer::Constant(0));
    Parameter &weight = head.weight(), &bias = *head.Parameters().back();
    ResidentParameters resident(rank.executor, {&weight, &bias}, DType::kF32);
    // Logits of up to some hundreds: exponentials need their maximum.
    for (Parameter* parameter : {&weight, &bias}) {
      ForEachGlobalStretch(
          *parameter, 0, parameter->shape.num_elements(), [&](int64_t local, int64_t global, int64_t n) {
            for (int64_t i = 0; i < n; ++i) {
              parameter->data.f32()[local + i] = std::sin(static_cast<float>(global + i)) * 9;
            }
          });
    }
    Parameter trained;
    Parameter* const parameters[] = {&trained};
    Matrix dx;
    Tape tape(rank.executor, resident, {});
    Tensor x = tape.Empty({kHeadRows, kHidden}), targets = tape.Empty({kHeadRows}, DType::kI32);
    for (int64_t i = 0; i < kHeadRows * kHidden; ++i) {
      x.view().f32()[i] = std::cos(static_cast<float>(3 * i)) * 5;
    }
    for (int64_t i = 0; i < kHeadRows; ++i) {
      const bool ignored = i % 7 == 3;
      targets.view().as<int32_t>()[i] = ignored ? -100 : static_cast<int32_t>(i * 5 % vocab);
    }
    tape.Record("source", {}, parameters, {&x}, [&](Backprop& bp) { dx = Values(bp.dout().view()); });
    const Tensor loss = VocabParallelCrossEntropy(tape, rank.group, x, weight, &bias, targets, 0.5f);
    tape.Backward(std::span(&loss, 1));
    const Tensor logits = VocabParallelLogits(tape, rank.group, x, weight, &bias);

    std::lock_guard lock(mutex);
    for (auto [parameter, all] : {std::pair(&weight, &result.dweight), std::pair(&bias, &result.dbias)}) {
      ForEachGlobalStretch(*parameter, 0, parameter->shape.num_elements(),
                           [&](int64_t local, int64_t global, int64_t n) {
                             const float* from = resident.Gradient(*parameter).f32() + local;
                             std::copy(from, from + n, all->begin() + global);
                           });
    }
    // The same bits on every rank.
    for (auto [all, own] : {std::pair(&result.loss, Values(loss.view())), std::pair(&result.dx, dx),
                            std::pair(&result.logits, Values(logits.view()))}) {
      if (all->empty()) *all = own;
      CHECK(*all == own);
    }
  });
  return result;
}

double LargestDifference(const Matrix& a, const Matrix& b) {
  double worst = a.size() == b.size() ? 0 : 1e30;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    worst = std::max(worst, std::abs(double{a[i]} - double{b[i]}));
  }
  return worst;
}

TEST_CASE("the vocabulary-parallel head is the head of a rank alone, for any vocabulary") {
  for (int64_t vocab : {13, 29, 64}) {
    const HeadResult alone = RunHead(1, vocab);
    CHECK(alone.loss[3] == 0.0f);
    for (int ranks : {2, 3, 4}) {
      const HeadResult cut = RunHead(ranks, vocab);
      INFO(ranks << " ranks, vocabulary " << vocab);
      CHECK(LargestDifference(cut.loss, alone.loss) < 1e-4);        // of losses up to 150
      CHECK(LargestDifference(cut.dx, alone.dx) < 2e-5);            // of weights up to 9
      CHECK(LargestDifference(cut.dweight, alone.dweight) < 2e-3);  // sums over 600 rows
      CHECK(LargestDifference(cut.dbias, alone.dbias) < 2e-3);
      CHECK(LargestDifference(cut.logits, alone.logits) < 1e-4);
    }
  }
}

TEST_CASE("a rank's parts have the whole's names, shapes and places") {
  ThreadJob::Run(4, [](Transport& transport) {
    Rank rank(transport);
    QkvProjection qkv(rank.group, 8, 4, 2, 2, true, Initializer::Constant(0));
    qkv.AssignNames("qkv.");
    static std::mutex checks;
    std::lock_guard lock(checks);
    const std::vector<Parameter*> parts = qkv.Parameters();
    REQUIRE(parts.size() == 4);
    CHECK(qkv.num_heads() == 1);
    CHECK(qkv.num_kv_heads() == 1);
    for (const Parameter* part : parts) {
      const bool is_bias = part->name == "qkv.bias", is_q = part->placement.over_tensor;
      CHECK((is_bias || part->name == "qkv.weight"));
      CHECK(part->global_shape == (is_bias ? Shape{16} : Shape{16, 8}));
      CHECK(part->shape[0] == (is_q ? 2 : 8));
      CHECK(part->placement.partial_over_tensor == !is_q);
      const Placement::Segment& segment = part->placement.cuts.at(0).segments.at(0);
      CHECK(segment.begin == (is_q ? 2 * transport.rank() : 8));
    }
  });
}

}  // namespace
}  // namespace strata
