// Softmax cross entropy against long double sums, and where a plain formula would lose its digits.
#include "kernels/cpu/kernel_testing.h"

namespace strata {
namespace {

using testing::CheckClose;
using testing::OnEveryCpu;
using testing::TestTensor;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Answer {
  std::vector<double> loss, gradient;
};

// −log of the target's share, with the others summed apart: exact where the share is near 1.
Answer Plain(const TestTensor& logits, const std::vector<int32_t>& targets, int64_t vocab,
             double grad_scale) {
  Answer answer;
  for (size_t i = 0; i < targets.size(); ++i) {
    const int64_t row = static_cast<int64_t>(i) * vocab, target = targets[i];
    const bool ignored = target < 0 || target >= vocab;
    const auto ratio = [&](int64_t j, int64_t to) {
      return std::exp(static_cast<long double>(logits[row + j]) - static_cast<long double>(logits[row + to]));
    };
    long double others = 0;
    for (int64_t j = 0; j < vocab && !ignored; ++j) others += j == target ? 0 : ratio(j, target);
    answer.loss.push_back(ignored ? 0 : static_cast<double>(std::log1p(others)));
    for (int64_t j = 0; j < vocab; ++j) {
      const long double p = ignored       ? 0
                            : j == target ? -others / (1 + others)
                                          : ratio(j, target) / (1 + others);
      answer.gradient.push_back(static_cast<double>(grad_scale * p));
    }
  }
  return answer;
}

void Check(TestTensor logits, const std::vector<int32_t>& target_list, int64_t vocab, float grad_scale) {
  const auto rows = static_cast<int64_t>(target_list.size());
  TestTensor targets = TestTensor::Ints(target_list);
  TestTensor loss(DType::kF32, {rows}), loss_alone(DType::kF32, {rows}), untouched = logits;
  const Answer want = Plain(logits, target_list, vocab, grad_scale);
  OnEveryCpu(
      {&logits, &loss, &loss_alone, &untouched},
      [&](const KernelTable& kernels, const KernelContext& context) {
        kernels.softmax_cross_entropy(context, {logits.view(), targets.view(), loss.view(), grad_scale});
        kernels.softmax_cross_entropy(context, {untouched.view(), targets.view(), loss_alone.view(), 0.0f});
      },
      [&] {
        INFO("loss");
        CheckClose(loss, want.loss, 0, 1e-6);
        CHECK(loss.bytes() == loss_alone.bytes());
        INFO("gradient");
        CheckClose(logits, want.gradient, 1e-30, 3e-6);
      });
}

TEST_CASE("softmax_cross_entropy: loss to 1e-6, gradient in place, ignored rows zero", "[cross_entropy]") {
  for (DType dtype : testing::kFloatTypes) {
    for (int64_t vocab : {1, 2, 16, 33, 1023, 1025, 5003}) {
      INFO(Name(dtype) << " V " << vocab);
      std::vector<int32_t> targets = {0, static_cast<int32_t>(vocab - 1), -100, static_cast<int32_t>(vocab),
                                      static_cast<int32_t>(vocab / 2)};
      Check(TestTensor::Random(dtype, {5, vocab}, 3, -8, 8), targets, vocab, 0.125f);
    }
  }
  Check(TestTensor(DType::kF32, {0, 7}), {}, 7, 1.0f);
}

TEST_CASE("softmax_cross_entropy of GPT-2's odd vocabulary", "[cross_entropy]") {
  Check(TestTensor::Random(DType::kF32, {3, 50257}, 5, -4, 4), {50256, 17, -1}, 50257, 1.0f);
}

TEST_CASE("softmax_cross_entropy keeps its digits where the target dominates", "[cross_entropy]") {
  TestTensor logits = TestTensor::Random(DType::kF32, {3, 100}, 5, -1, 1);
  logits.Set(5, 30);          // loss about 1e-11
  logits.Set(100 + 6, 90);    // the others' shares are not even normal floats
  logits.Set(200 + 7, -500);  // the target's is not
  Check(logits, {5, 6, 7}, 100, 1.0f);
}

TEST_CASE("softmax_cross_entropy takes logits of -inf and carries NaN", "[cross_entropy]") {
  constexpr int64_t kVocab = 2100;
  TestTensor logits = TestTensor::Random(DType::kF32, {3, kVocab}, 5, -1, 1), loss(DType::kF32, {3});
  for (int64_t j = 0; j < 1500; ++j) logits.Set(j, -kInfinity);  // masked, a whole block of them
  for (int64_t j = 0; j < kVocab - 1; ++j) logits.Set(kVocab + j, -kInfinity);  // all but the target
  logits.Set(2 * kVocab + 900, std::nan(""));
  const std::vector<int32_t> target_list = {2000, kVocab - 1, 3};
  TestTensor targets = TestTensor::Ints(target_list);
  const Answer want = Plain(logits, target_list, kVocab, 1);
  OnEveryCpu(
      {&logits, &loss},
      [&](const KernelTable& kernels, const KernelContext& context) {
        kernels.softmax_cross_entropy(context, {logits.view(), targets.view(), loss.view(), 1.0f});
      },
      [&] {
        CHECK(loss[0] == Approx(want.loss[0]).epsilon(1e-6));
        CHECK(loss[1] == 0);
        CHECK(std::isnan(loss[2]));
        int64_t wrong = 0;
        for (int64_t j = 0; j < 2 * kVocab; ++j)
          wrong += std::abs(logits[j] - want.gradient[j]) < 1e-6 ? 0 : 1;
        for (int64_t j = 2 * kVocab; j < 3 * kVocab; ++j) wrong += std::isnan(logits[j]) ? 0 : 1;
        CHECK(wrong == 0);
      });
}

}  // namespace
}  // namespace strata
