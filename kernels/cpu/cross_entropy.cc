// Softmax cross entropy: two passes over the logits, the second only for the gradient. Over logits that
// several ranks share they are ops of their own.
//
// With a = log Σ e^x over all logits but the target's and d = a − x_target, the loss is log(1 + e^d) and the
// target's own gradient −1/(1 + e^−d). Leaving the target out keeps both accurate where it dominates and the
// difference of two nearly equal numbers would not.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/kernels.h"
#include "kernels/cpu/simd.h"

namespace strata::STRATA_CPU_ISA {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kBlock = 1024;  // elements that are read twice while they lie in the first-level cache

// Σ e^x = e^max · sum, taken in block by block (Milakov and Gimelshein, 2018). NaN carries through.
struct ExpSum {
  float max = -kInfinity;
  double sum = 0;

  template <typename T>
  void Add(const T* x, int64_t begin, int64_t end) {
    for (; begin < end; begin += kBlock) AddBlock(x, begin, end - begin < kBlock ? end : begin + kBlock);
  }

  template <typename T>
  void AddBlock(const T* x, int64_t begin, int64_t end) {
    Vec highest = Set(max);
    const auto raise = [&](int64_t i, auto lanes) STRATA_SIMD_LAMBDA {
      highest = Max(highest, KeepLanes(Load(x + i, lanes), Set(-kInfinity), lanes));
    };
    ForVectors(begin, end, raise, x);
    const float new_max = ReduceMax(highest);
    if (new_max > max) {
      sum *= std::exp(static_cast<double>(max) - new_max);
      max = new_max;
    }
    // While every x is -inf so is the maximum, which must not be subtracted from them.
    const Vec base = Set(max == -kInfinity ? 0.0f : max);
    Vec part = {};
    const auto add = [&](int64_t i, auto lanes) STRATA_SIMD_LAMBDA {
      part += KeepLanes(Exp(Load(x + i, lanes) - base), Vec{}, lanes);
    };
    ForVectors(begin, end, add);
    sum += ReduceAdd(part);
  }

  double Log() const { return (max == -kInfinity ? 0.0 : static_cast<double>(max)) + std::log(sum); }
};

// The loss of one row; its logits become their gradient when `grad_scale` is not zero.
template <typename T>
float Row(T* x, int64_t vocab, int32_t target, float grad_scale) {
  if (target < 0 || target >= vocab) {
    if (grad_scale != 0.0f) std::memset(static_cast<void*>(x), 0, static_cast<size_t>(vocab) * sizeof(T));
    return 0.0f;
  }
  ExpSum others;
  others.Add(x, 0, target);
  others.Add(x, target + 1, vocab);
  const double log_others = others.Log();
  const double x_target = LoadPartial(x + target, 1)[0];
  const double d = log_others - x_target;
  const double tail = std::log1p(std::exp(-std::abs(d)));
  if (grad_scale != 0.0f) {
    const Vec log_sum = Set(static_cast<float>((d > 0 ? log_others : x_target) + tail));
    const auto differentiate = [=](int64_t i, auto lanes) STRATA_SIMD_LAMBDA {
      Store(x + i, grad_scale * Exp(Load(x + i, lanes) - log_sum), lanes);
    };
    ForVectors(0, vocab, differentiate, x);
    StorePartial(x + target, Set(static_cast<float>(-grad_scale / (1.0 + std::exp(-d)))), 1);
  }
  return static_cast<float>((d > 0 ? d : 0.0) + tail);  // a NaN is in the tail
}

}  // namespace

void softmax_cross_entropy(const KernelContext& context, const SoftmaxCrossEntropyArgs& args) {
  const int64_t vocab = args.logits.cols(), rows = args.logits.rows();
  const int32_t* targets = Data<int32_t>(args.targets);
  float* loss = Data<float>(args.loss);
  DispatchFloat(args.logits.dtype, [&]<typename T>() {
    T* logits = static_cast<T*>(args.logits.data);
    ParallelFor(context, rows, RowsPerPiece(vocab), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        loss[i] = Row(logits + i * vocab, vocab, targets[i], args.grad_scale);
      }
    });
  });
}

void cross_entropy_partial(const KernelContext& context, const CrossEntropyPartialArgs& args) {
  const int64_t cols = args.logits.cols(), rows = args.targets.num_elements();
  const int32_t* targets = Data<int32_t>(args.targets);
  float *max = Data<float>(args.max), *sum = Data<float>(args.sum), *target = Data<float>(args.target);
  DispatchFloat(args.logits.dtype, [&]<typename T>() {
    const T* logits = Data<T>(args.logits);
    ParallelFor(context, rows, RowsPerPiece(cols), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const T* x = logits + i * cols;
        ExpSum all;
        all.Add(x, 0, cols);
        const int64_t here = targets[i] - args.vocab_begin;
        max[i] = all.max;
        sum[i] = static_cast<float>(all.sum);
        target[i] = here >= 0 && here < cols ? LoadPartial(x + here, 1)[0] : -kInfinity;
      }
    });
  });
}

void cross_entropy_grad(const KernelContext& context, const CrossEntropyGradArgs& args) {
  const int64_t cols = args.logits.cols(), rows = args.targets.num_elements();
  const int32_t* targets = Data<int32_t>(args.targets);
  const float* lse = Data<float>(args.lse);
  DispatchFloat(args.logits.dtype, [&]<typename T>() {
    T* logits = Data<T>(args.logits);
    ParallelFor(context, rows, RowsPerPiece(cols), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        T* x = logits + i * cols;
        if (targets[i] < 0 || targets[i] >= args.vocab_size) {
          std::memset(static_cast<void*>(x), 0, static_cast<size_t>(cols) * sizeof(T));
          continue;
        }
        const int64_t here = targets[i] - args.vocab_begin;
        const float scale = args.grad_scale, log_sum = lse[i];
        const float p = here >= 0 && here < cols ? Exp(LoadPartial(x + here, 1) - log_sum)[0] : 0.0f;
        const auto differentiate = [=](int64_t j, auto lanes) STRATA_SIMD_LAMBDA {
          Store(x + j, scale * Exp(Load(x + j, lanes) - log_sum), lanes);
        };
        ForVectors(0, cols, differentiate, x);
        if (here >= 0 && here < cols) StorePartial(x + here, Set(scale * (p - 1.0f)), 1);
      }
    });
  });
}

}  // namespace strata::STRATA_CPU_ISA
