// The mix of two matrices by a softmax of two logits a row.
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/simd.h"

namespace strata::STRATA_CPU_ISA {

namespace {

// The share of the first of two logits.
STRATA_SIMD Vec FirstShare(float first, float second) { return Sigmoid(Set(first - second)); }

}  // namespace

void mix_rows(const KernelContext& context, const MixRowsArgs& args) {
  DispatchFloat(args.out.dtype, [&]<typename T>() {
    const T *a = Data<T>(args.a), *b = Data<T>(args.b);
    const float* logits = Data<float>(args.logits);
    T* out = Data<T>(args.out);
    const int64_t cols = args.out.cols();
    ParallelFor(context, args.logits.rows(), RowsPerPiece(cols), [=](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const Vec first = FirstShare(logits[2 * i], logits[2 * i + 1]);
        const Vec second = FirstShare(logits[2 * i + 1], logits[2 * i]);
        ForVectors(
            i * cols, (i + 1) * cols,
            [=](int64_t at, auto lanes) STRATA_SIMD_LAMBDA {
              Store(out + at, Fma(first, Load(a + at, lanes), second * Load(b + at, lanes)), lanes);
            },
            a, b, out);
      }
    });
  });
}

void mix_rows_backward(const KernelContext& context, const MixRowsBackwardArgs& args) {
  DispatchFloat(args.dout.dtype, [&]<typename T>() {
    const T *dout = Data<T>(args.dout), *a = Data<T>(args.a), *b = Data<T>(args.b);
    const float* logits = Data<float>(args.logits);
    T *da = Data<T>(args.da), *db = Data<T>(args.db);
    float* dlogits = Data<float>(args.dlogits);
    const int64_t cols = args.dout.cols();
    ParallelFor(context, args.logits.rows(), RowsPerPiece(cols), [=](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const Vec first = FirstShare(logits[2 * i], logits[2 * i + 1]);
        const Vec second = FirstShare(logits[2 * i + 1], logits[2 * i]);
        Vec difference = {};
        ForVectors(
            i * cols, (i + 1) * cols,
            [=, &difference](int64_t at, auto lanes) STRATA_SIMD_LAMBDA {
              const Vec d = Load(dout + at, lanes);
              difference = Fma(d, Load(a + at, lanes) - Load(b + at, lanes), difference);
              Store(da + at, first * d, lanes);
              Store(db + at, second * d, lanes);
            },
            dout, a, b, da, db);
        dlogits[2 * i] = (first * second)[0] * ReduceAdd(difference);
        dlogits[2 * i + 1] = -dlogits[2 * i];
      }
    });
  });
}

}  // namespace strata::STRATA_CPU_ISA
