#include <cmath>

#include "kernels/reference/elements.h"
#include "kernels/reference/kernels.h"

namespace strata::reference {

namespace {

// The share of the first of two logits.
double FirstShare(double first, double second) { return 1 / (1 + std::exp(second - first)); }

}  // namespace

void mix_rows(const KernelContext&, const MixRowsArgs& args) {
  const Elements a(args.a), b(args.b), logits(args.logits), out(args.out);
  const int64_t n = args.logits.rows(), cols = args.out.cols();
  for (int64_t i = 0; i < n; ++i) {
    const double first = FirstShare(logits[2 * i], logits[2 * i + 1]);
    const double second = FirstShare(logits[2 * i + 1], logits[2 * i]);
    for (int64_t at = i * cols; at < (i + 1) * cols; ++at) out[at] = first * a[at] + second * b[at];
  }
}

void mix_rows_backward(const KernelContext&, const MixRowsBackwardArgs& args) {
  const Elements dout(args.dout), a(args.a), b(args.b), logits(args.logits);
  const Elements da(args.da), db(args.db), dlogits(args.dlogits);
  const int64_t n = args.logits.rows(), cols = args.dout.cols();
  for (int64_t i = 0; i < n; ++i) {
    const double first = FirstShare(logits[2 * i], logits[2 * i + 1]);
    const double second = FirstShare(logits[2 * i + 1], logits[2 * i]);
    double difference = 0;
    for (int64_t at = i * cols; at < (i + 1) * cols; ++at) {
      difference += dout[at] * (a[at] - b[at]);
      da[at] = first * dout[at];
      db[at] = second * dout[at];
    }
    dlogits[2 * i] = first * second * difference;
    dlogits[2 * i + 1] = -first * second * difference;
  }
}

}  // namespace strata::reference
