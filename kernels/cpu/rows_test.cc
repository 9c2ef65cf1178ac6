// Kernels over rows against plain loops in double precision.
#include "kernels/cpu/kernel_testing.h"

namespace strata {
namespace {

using testing::CheckClose;
using testing::kFloatTypes;
using testing::OnEveryCpu;
using testing::TestTensor;

std::vector<int32_t> RandomIds(int64_t n, int32_t limit) {
  std::mt19937 random(9);
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < n; ++i)
    ids.push_back(static_cast<int32_t>(random() % static_cast<uint32_t>(limit)));
  return ids;
}

TEST_CASE("column_sum", "[rows]") {
  for (DType dtype : kFloatTypes) {
    for (const auto& [rows, cols] :
         {std::pair<int64_t, int64_t>{0, 9}, {1, 1}, {15, 16}, {17, 33}, {3000, 7}, {40, 9001}}) {
      INFO(Name(dtype) << " [" << rows << ", " << cols << "]");
      TestTensor x = TestTensor::Random(dtype, {rows, cols}, 1);
      TestTensor sum(DType::kF32, {cols}), added = TestTensor::Random(DType::kF32, {cols}, 2);
      std::vector<double> want(cols, 0.0), want_added = added.values();
      for (int64_t i = 0; i < x.size(); ++i) want[i % cols] += x[i], want_added[i % cols] += x[i];
      OnEveryCpu(
          {&sum, &added},
          [&](const KernelTable& k, const KernelContext& context) {
            k.column_sum(context, {x.view(), sum.view()});
            k.column_sum(context, {x.view(), added.view(), true});
          },
          [&] {
            CheckClose(sum, want, 1e-6 * std::sqrt(static_cast<double>(rows)));
            CheckClose(added, want_added, 1e-6 * std::sqrt(static_cast<double>(rows) + 1));
          });
    }
  }
}

TEST_CASE("embedding_forward", "[rows]") {
  constexpr int64_t kVocabulary = 11;
  for (DType dtype : kFloatTypes) {
    for (DType table_type : {dtype, DType::kF32}) {
      for (const auto& [n, cols] : {std::pair<int64_t, int64_t>{0, 4}, {1, 1}, {13, 37}, {900, 80}}) {
        INFO(Name(dtype) << " from " << Name(table_type) << " [" << n << ", " << cols << "]");
        const std::vector<int32_t> rows = RandomIds(n, kVocabulary);
        TestTensor ids = TestTensor::Ints(rows),
                   table = TestTensor::Random(table_type, {kVocabulary, cols}, 1);
        TestTensor out(dtype, {n, cols}), added = TestTensor::Random(dtype, {n, cols}, 2);
        std::vector<double> want, want_added;
        for (int64_t i = 0; i < n * cols; ++i) {
          want.push_back(table[rows[i / cols] * cols + i % cols]);
          want_added.push_back(want.back() + added[i]);
        }
        OnEveryCpu(
            {&out, &added},
            [&](const KernelTable& k, const KernelContext& context) {
              k.embedding_forward(context, {ids.view(), table.view(), out.view()});
              k.embedding_forward(context, {ids.view(), table.view(), added.view(), true});
            },
            [&] {
              CheckClose(out, want, 0, 0);
              CheckClose(added, want_added, 0);
            });
      }
    }
  }
}

TEST_CASE("embedding_backward adds in the order of the tokens", "[rows]") {
  constexpr int64_t kVocabulary = 11;
  for (DType dtype : kFloatTypes) {
    for (const auto& [n, cols] : {std::pair<int64_t, int64_t>{0, 4}, {1, 1}, {13, 37}, {300, 201}}) {
      INFO(Name(dtype) << " [" << n << ", " << cols << "]");
      const std::vector<int32_t> rows = RandomIds(n, kVocabulary);
      TestTensor ids = TestTensor::Ints(rows), dout = TestTensor::Random(dtype, {n, cols}, 1);
      TestTensor fresh(DType::kF32, {kVocabulary, cols});
      TestTensor added = TestTensor::Random(DType::kF32, {kVocabulary, cols}, 2);
      // The order is part of the contract, so plain fp32 sums must agree to the bit.
      std::vector<double> want(kVocabulary * cols, 0.0), want_added = added.values();
      for (int64_t i = 0; i < n * cols; ++i) {
        const int64_t to = rows[i / cols] * cols + i % cols;
        want[to] = static_cast<float>(want[to]) + static_cast<float>(dout[i]);
        want_added[to] = static_cast<float>(want_added[to]) + static_cast<float>(dout[i]);
      }
      OnEveryCpu(
          {&fresh, &added},
          [&](const KernelTable& k, const KernelContext& context) {
            k.embedding_backward(context, {ids.view(), dout.view(), fresh.view()});
            k.embedding_backward(context, {ids.view(), dout.view(), added.view(), true});
          },
          [&] {
            CHECK(fresh.values() == want);
            CHECK(added.values() == want_added);
          });
    }
  }
}

TEST_CASE("a table that holds some of the ids leaves the others out", "[rows]") {
  constexpr int64_t kCols = 37;
  TestTensor ids = TestTensor::Ints({9, 4, 3, 7, 0, 6, 4}),
             table = TestTensor::Random(DType::kF32, {3, kCols}, 1);
  TestTensor dout = TestTensor::Random(DType::kF32, {7, kCols}, 2), dtable(DType::kF32, {3, kCols});
  TestTensor out(DType::kF32, {7, kCols}), added = TestTensor::Random(DType::kF32, {7, kCols}, 3);
  const std::vector<int> row = {-1, 0, -1, -1, -1, 2, 0};  // of the table of ids 4, 5, 6
  std::vector<double> want(7 * kCols, 0.0), want_added = added.values(), want_dtable(3 * kCols, 0.0);
  for (int64_t i = 0; i < 7 * kCols; ++i) {
    if (row[i / kCols] < 0) continue;
    const int64_t at = row[i / kCols] * kCols + i % kCols;
    want[i] = table[at];
    want_added[i] += table[at];
    want_dtable[at] += dout[i];
  }
  OnEveryCpu(
      {&out, &added, &dtable},
      [&](const KernelTable& k, const KernelContext& context) {
        k.embedding_forward(context, {ids.view(), table.view(), out.view(), false, 4});
        k.embedding_forward(context, {ids.view(), table.view(), added.view(), true, 4});
        k.embedding_backward(context, {ids.view(), dout.view(), dtable.view(), false, 4});
      },
      [&] {
        CheckClose(out, want, 0, 0);
        CheckClose(added, want_added, 0);
        CheckClose(dtable, want_dtable, 1e-6);
      });
}

TEST_CASE("gather_rows and scatter_rows move rows of any type", "[rows]") {
  const std::vector<int32_t> order = {6, 0, 3, 5};  // row 1, 2 and 4 stay as they are
  TestTensor index = TestTensor::Ints(order), none = TestTensor::Ints({});
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kI32, DType::kF64}) {
    for (int64_t cols : {1, 5, 64, 20001}) {
      INFO(Name(dtype) << ", " << cols << " columns");
      TestTensor x = TestTensor::Random(dtype, {7, cols}, 1, -100, 100);
      TestTensor gathered(dtype, {4, cols}), back = TestTensor::Random(dtype, {7, cols}, 2, -100, 100);
      TestTensor empty(dtype, {0, cols});
      std::vector<double> want_gathered, want_back = back.values();
      for (int64_t i = 0; i < 4 * cols; ++i) {
        const int64_t at = order[i / cols] * cols + i % cols;
        want_gathered.push_back(x[at]);
        want_back[at] = x[at];
      }
      OnEveryCpu(
          {&gathered, &back},
          [&](const KernelTable& k, const KernelContext& context) {
            k.gather_rows(context, {x.view(), index.view(), gathered.view()});
            k.scatter_rows(context, {gathered.view(), index.view(), back.view()});
            k.gather_rows(context, {x.view(), none.view(), empty.view()});
            k.scatter_rows(context, {empty.view(), none.view(), back.view(), IsFloating(dtype)});
          },
          [&] {
            CHECK(gathered.values() == want_gathered);
            CHECK(back.values() == want_back);
          });
    }
  }
}

TEST_CASE("scatter_rows adds", "[rows]") {
  const std::vector<int32_t> order = {6, 0, 3, 5};
  TestTensor index = TestTensor::Ints(order);
  for (DType dtype : kFloatTypes) {
    for (int64_t cols : {1, 33}) {
      TestTensor x = TestTensor::Random(dtype, {4, cols}, 1), out = TestTensor::Random(dtype, {7, cols}, 2);
      std::vector<double> want = out.values();
      for (int64_t i = 0; i < 4 * cols; ++i) want[order[i / cols] * cols + i % cols] += x[i];
      OnEveryCpu(
          {&out},
          [&](const KernelTable& k, const KernelContext& context) {
            k.scatter_rows(context, {x.view(), index.view(), out.view(), true});
          },
          [&] { CheckClose(out, want, 1e-7); });
    }
  }
}

}  // namespace
}  // namespace strata
