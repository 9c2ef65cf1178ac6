#include <cmath>
#include <limits>
#include <vector>

#include "kernels/reference/elements.h"
#include "kernels/reference/kernels.h"

namespace strata::reference {
namespace {

// Element (b, t, h, d) of a HeadsView.
class Heads {
 public:
  Heads(const HeadsView& view, int64_t head_dim)
      : elements_(view.data, view.dtype), view_(view), head_dim_(head_dim) {}
  Elements::Element operator()(int64_t b, int64_t t, int64_t h, int64_t d) const {
    return elements_[b * view_.batch_stride + t * view_.row_stride + h * head_dim_ + d];
  }

 private:
  Elements elements_;
  HeadsView view_;
  int64_t head_dim_;
};

// The keys that query i of sequence b sees.
std::vector<int64_t> VisibleKeys(const AttentionShape& shape, int64_t b, int64_t i) {
  std::vector<int64_t> keys;
  for (int64_t j = 0; j < shape.kv_len; ++j) {
    if (shape.causal && j > shape.q_offset + i) continue;
    if (shape.key_mask.defined() && shape.key_mask.as<uint8_t>()[b * shape.kv_len + j] == 0) continue;
    if (shape.segment_ids.defined()) {
      const int32_t* segments = shape.segment_ids.as<int32_t>() + b * shape.q_len;
      if (segments[i] != segments[j]) continue;
    }
    keys.push_back(j);
  }
  return keys;
}

// Calls body(b, h, kv_head, i) for every query of every head.
template <typename Body>
void ForEachQuery(const AttentionShape& shape, Body body) {
  for (int64_t b = 0; b < shape.batch; ++b) {
    for (int64_t h = 0; h < shape.num_heads; ++h) {
      for (int64_t i = 0; i < shape.q_len; ++i) body(b, h, h / (shape.num_heads / shape.num_kv_heads), i);
    }
  }
}

}  // namespace

void attention_forward(const KernelContext&, const AttentionForwardArgs& args) {
  const AttentionShape& shape = args.shape;
  const int64_t head_dim = shape.head_dim;
  const Heads q(args.q, head_dim), k(args.k, head_dim), v(args.v, head_dim), out(args.out, head_dim);
  const Elements lse(args.lse);
  ForEachQuery(shape, [&](int64_t b, int64_t h, int64_t kv_head, int64_t i) {
    const std::vector<int64_t> keys = VisibleKeys(shape, b, i);
    std::vector<double> scores;
    double highest = -std::numeric_limits<double>::infinity();
    for (int64_t j : keys) {
      double dot = 0;
      for (int64_t d = 0; d < head_dim; ++d) dot += q(b, i, h, d) * k(b, j, kv_head, d);
      scores.push_back(shape.scale * dot);
      highest = std::max(highest, scores.back());
    }
    double sum = 0;
    for (double score : scores) sum += std::exp(score - highest);
    for (int64_t d = 0; d < head_dim; ++d) {
      double mean = 0;
      for (size_t n = 0; n < keys.size(); ++n) {
        mean += std::exp(scores[n] - highest) / sum * v(b, keys[n], kv_head, d);
      }
      out(b, i, h, d) = mean;
    }
    if (lse.defined()) {
      lse[(b * shape.num_heads + h) * shape.q_len + i] = keys.empty() ? highest : highest + std::log(sum);
    }
  });
}

// With P = softmax(scale · q kᵀ) and out = P v: dv = Pᵀ dout, dS = P ∘ (dout vᵀ − rowsum(dout ∘ out)),
// dq = scale · dS k, dk = scale · dSᵀ q (FlashAttention, appendix B.2).
void attention_backward(const KernelContext&, const AttentionBackwardArgs& args) {
  const AttentionShape& shape = args.shape;
  const int64_t head_dim = shape.head_dim;
  const Heads q(args.q, head_dim), k(args.k, head_dim), v(args.v, head_dim), out(args.out, head_dim);
  const Heads dout(args.dout, head_dim), dq(args.dq, head_dim), dk(args.dk, head_dim), dv(args.dv, head_dim);
  const Elements lse(args.lse);
  const auto at_key = [&](int64_t b, int64_t j, int64_t kv_head, int64_t d) {
    return ((b * shape.kv_len + j) * shape.num_kv_heads + kv_head) * head_dim + d;
  };
  const int64_t key_elements = at_key(shape.batch, 0, 0, 0);
  std::vector<double> dk_sum(key_elements), dv_sum(key_elements);
  ForEachQuery(shape, [&](int64_t b, int64_t h, int64_t kv_head, int64_t i) {
    double out_dot = 0;
    for (int64_t d = 0; d < head_dim; ++d) out_dot += dout(b, i, h, d) * out(b, i, h, d);
    std::vector<double> dq_sum(head_dim);
    for (int64_t j : VisibleKeys(shape, b, i)) {
      double score = 0, dp = 0;
      for (int64_t d = 0; d < head_dim; ++d) {
        score += q(b, i, h, d) * k(b, j, kv_head, d);
        dp += dout(b, i, h, d) * v(b, j, kv_head, d);
      }
      const double p = std::exp(shape.scale * score - lse[(b * shape.num_heads + h) * shape.q_len + i]);
      const double ds = p * (dp - out_dot);
      for (int64_t d = 0; d < head_dim; ++d) {
        dq_sum[d] += shape.scale * ds * k(b, j, kv_head, d);
        dk_sum[at_key(b, j, kv_head, d)] += shape.scale * ds * q(b, i, h, d);
        dv_sum[at_key(b, j, kv_head, d)] += p * dout(b, i, h, d);
      }
    }
    for (int64_t d = 0; d < head_dim; ++d) dq(b, i, h, d) = dq_sum[d];
  });
  for (int64_t b = 0; b < shape.batch; ++b) {
    for (int64_t j = 0; j < shape.kv_len; ++j) {
      for (int64_t h = 0; h < shape.num_kv_heads; ++h) {
        for (int64_t d = 0; d < head_dim; ++d) {
          dk(b, j, h, d) = dk_sum[at_key(b, j, h, d)];
          dv(b, j, h, d) = dv_sum[at_key(b, j, h, d)];
        }
      }
    }
  }
}

void rotary(const KernelContext&, const RotaryArgs& args) {
  const Heads x(args.x, args.head_dim);
  const Elements inv_freq(args.inv_freq);
  const int64_t n = args.inv_freq.num_elements();
  for (int64_t b = 0; b < args.batch; ++b) {
    for (int64_t t = 0; t < args.len; ++t) {
      const int64_t position = args.positions.defined() ? args.positions.as<int32_t>()[b * args.len + t]
                                                        : args.position_offset + t;
      for (int64_t h = 0; h < args.num_heads; ++h) {
        for (int64_t i = 0; i < n; ++i) {
          const double angle = (args.inverse ? -1.0 : 1.0) * static_cast<double>(position) * inv_freq[i];
          const double first = x(b, t, h, i), second = x(b, t, h, i + n);
          x(b, t, h, i) = first * std::cos(angle) - second * std::sin(angle);
          x(b, t, h, i + n) = first * std::sin(angle) + second * std::cos(angle);
        }
      }
    }
  }
}

}  // namespace strata::reference
