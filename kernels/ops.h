// The arguments of every kernel: shapes, types and formulas. This page is the contract that reference/, cpu/
// and cuda/ share.
//
// Conventions
// - "T" is fp32, bf16 or fp16; all T of one call are the same type unless said otherwise. Statistics, losses,
// weight gradients and
//   optimiser state are fp32. Sums run in fp32 or better whatever T is.
// - A view left undefined is an optional argument not given.
// - `accumulate` adds to what the output holds instead of overwriting it. Outputs are otherwise never read:
// they may hold NaN.
// - Zero rows are legal everywhere and do nothing (reductions give zero).
// - Results do not depend on the number of threads.
// - Outputs do not overlap inputs, except where "may be" says so.
//
// Ownership: arguments are views; kernels keep nothing. Threading: kernels of one context run one after
// another.
#pragma once

#include <cstdint>

#include "runtime/base/device.h"
#include "runtime/base/rng.h"
#include "runtime/base/tensor_view.h"

namespace strata {

/// What a kernel runs with. `scratch` gives temporary memory on the device (tag `buffers`).
struct KernelContext {
  ThreadPool* pool = nullptr;
  Stream stream;
  Allocator* scratch = nullptr;
};

enum class Activation : uint8_t { kNone, kGeluTanh, kGeluErf, kSilu, kRelu };

/// c = residual + epilogue(alpha · op(a) · op(b) + bias), or, with `accumulate`, that added to c.
///   a: [M, K], or [K, M] with trans_a. b: [K, N], or [N, K] with trans_b. c: [M, N]. Each of a, b, c has its
///   own T. epilogue, one of:
///     activation alone: z = value, rounded to the T of c; value becomes act(z); z is also stored when
///       `pre_activation` ([M, N], T of c) is given. (Rounded so that activation_forward makes the same
///       again.)
///     activation_grad: value becomes value · act'(pre_activation), pre_activation being an input.
///   bias: [N], T or fp32. residual: [M, N], T of c; may be c itself.
struct MatmulArgs {
  TensorView a, b, c;
  bool trans_a = false, trans_b = false;
  bool accumulate = false;
  float alpha = 1.0f;
  TensorView bias;
  Activation activation = Activation::kNone;
  bool activation_grad = false;
  TensorView pre_activation;
  TensorView residual;
};

/// sum[j] (+)= Σ_i x[i, j]. x: [rows, cols] T; sum: [cols] fp32.
struct ColumnSumArgs {
  TensorView x, sum;
  bool accumulate = false;
};

/// Heads inside a larger matrix: element (b, t, h, d) is data[b·batch_stride + t·row_stride + h·head_dim +
/// d]. So q, k and v may be columns of one packed matrix, or rows of a cache.
struct HeadsView {
  void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t batch_stride = 0, row_stride = 0;
};

/// The geometry and masks of one attention, shared by forward and backward.
/// Query i sees key j when all of these hold: not causal, or j ≤ q_offset + i; key_mask[b, j] ≠ 0;
/// segment_ids[b, i] = segment_ids[b, j]. A query that sees no key gives zero output, lse = -inf, and takes
/// and gives no gradient. Query head h uses key/value head h / (num_heads / num_kv_heads).
struct AttentionShape {
  int64_t batch = 0, q_len = 0, kv_len = 0, num_heads = 0, num_kv_heads = 0, head_dim = 0;
  float scale = 1.0f;
  bool causal = true;
  int64_t q_offset = 0;
  TensorView key_mask;     // [batch, kv_len] uint8, optional
  TensorView segment_ids;  // [batch, q_len] int32, optional; needs q_len = kv_len
};

/// out = softmax(scale · q kᵀ + mask) v, without the q_len × kv_len matrix (Dao et al., "FlashAttention",
/// 2022; Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018).
///   out: T like q; lse: [batch, num_heads, q_len] fp32, the log of each row's sum of exponentials
///   (optional).
struct AttentionForwardArgs {
  AttentionShape shape;
  HeadsView q, k, v, out;
  TensorView lse;
};

/// Gradients of the above from dout, out and lse. dq, dk, dv are overwritten; they may lie in one packed
/// matrix.
struct AttentionBackwardArgs {
  AttentionShape shape;
  HeadsView q, k, v, out, dout;
  TensorView lse;
  HeadsView dq, dk, dv;
};

/// Rotates the first 2·n features of every head in place, n = inv_freq elements: the pair (x[i], x[i + n])
/// turns by position · inv_freq[i] (Su et al., "RoFormer", 2021; pairs by halves, as Llama checkpoints have
/// them).
///   positions: [batch · len] int32; when not given, position t is position_offset + t. inverse turns back:
///   the gradient.
struct RotaryArgs {
  HeadsView x;
  int64_t batch = 0, len = 0, num_heads = 0, head_dim = 0;
  TensorView inv_freq;  // [n] fp32
  TensorView positions;
  int64_t position_offset = 0;
  bool inverse = false;
};

/// y = (x − mean) · rstd · gain + bias, over the last dimension (Ba et al., "Layer Normalization", 2016).
///   x, y: [rows, cols] T; gain, bias: [cols], T or fp32 (bias optional); mean, rstd: [rows] fp32 (optional
///   in evaluation).
struct LayerNormForwardArgs {
  TensorView x, gain, bias, y, mean, rstd;
  float eps = 1e-5f;
};

/// dx (+)= gradient of x; dgain, dbias (+)= gradients of gain and bias, fp32, each optional (a frozen norm).
struct LayerNormBackwardArgs {
  TensorView dy, x, gain, mean, rstd, dx, dgain, dbias;
  bool accumulate_dx = false;
  bool accumulate_dgain = false, accumulate_dbias = false;
};

/// y = x · rstd · gain, rstd = 1/√(mean(x²) + eps) (Zhang and Sennrich, "Root Mean Square Layer
/// Normalization", 2019).
struct RmsNormForwardArgs {
  TensorView x, gain, y, rstd;
  float eps = 1e-5f;
};
struct RmsNormBackwardArgs {
  TensorView dy, x, gain, rstd, dx, dgain;
  bool accumulate_dx = false;
  bool accumulate_dgain = false;
};

/// y = act(x), any shape. y may be x.
///   GELU by tanh: ½x(1 + tanh(√(2/π)(x + 0.044715x³))); by erf: ½x(1 + erf(x/√2)) (Hendrycks and Gimpel,
///   2016).
struct ActivationForwardArgs {
  Activation activation = Activation::kNone;
  TensorView x, y;
};
/// dx (+)= dy · act'(x). dx may be dy.
struct ActivationBackwardArgs {
  Activation activation = Activation::kNone;
  TensorView dy, x, dx;
  bool accumulate = false;
};

/// y = silu(gate) · up. gate_up: [rows, 2·cols] T, the row's first half is gate; y: [rows, cols] (Shazeer,
/// "GLU Variants", 2020).
struct SwigluForwardArgs {
  TensorView gate_up, y;
};
/// d_gate_up is overwritten.
struct SwigluBackwardArgs {
  TensorView dy, gate_up, d_gate_up;
};

/// out[i] (+)= table[ids[i] − first_id], zero for an id outside [first_id, first_id + V): another rank's.
///   ids: [n] int32; table: [V, cols], T or fp32; out: [n, cols] T.
struct EmbeddingForwardArgs {
  TensorView ids, table, out;
  bool accumulate = false;
  int64_t first_id = 0;
};
/// dtable[ids[i] − first_id] += dout[i], in the order of i for each row, leaving out ids outside. dout: [n,
/// cols] T; dtable: [V, cols] fp32. accumulate = false clears dtable first.
struct EmbeddingBackwardArgs {
  TensorView ids, dout, dtable;
  bool accumulate = false;
  int64_t first_id = 0;
};

/// Where the elements of a local matrix lie in the global one, so that random numbers are the same in every
/// layout: local (i, j) is global element (row_index ? row_index[i] : row_offset + i) · global_cols +
/// col_offset + j.
struct GlobalIndex {
  int64_t row_offset = 0;
  TensorView row_index;  // [rows] int32, optional
  int64_t col_offset = 0;
  int64_t global_cols = 0;  // 0: the local number of columns
};

/// y (+)= x · keep / (1 − p), keep = Uniform(global element) ≥ p. x, y: [rows, cols] T. The backward is the
/// same call on dy. y may be x.
struct DropoutArgs {
  TensorView x, y;
  float p = 0.0f;
  RandomStream random;
  GlobalIndex index;
  bool accumulate = false;
};

/// loss[i] = logsumexp(logits[i]) − logits[i, target[i]], 0 where target[i] is not in [0, V) (an ignored
/// position). With `grad_scale` ≠ 0, logits[i] is overwritten by grad_scale · ∂loss[i]/∂logits[i] (zero rows
/// where ignored).
///   logits: [rows, V] T; targets: [rows] int32; loss: [rows] fp32.
struct SoftmaxCrossEntropyArgs {
  TensorView logits, targets, loss;
  float grad_scale = 0.0f;
};

/// out[i] = x[index[i]]. x: [n, cols]; index: [m] int32; out: [m, cols]; any one dtype.
struct GatherRowsArgs {
  TensorView x, index, out;
};
/// out[index[i]] (+)= x[i]; the indices are distinct. Rows of out not named keep what they hold.
struct ScatterRowsArgs {
  TensorView x, index, out;
  bool accumulate = false;
};

/// Which experts take which tokens (Shazeer et al., "Outrageously Large Neural Networks", 2017; Lepikhin et
/// al., "GShard", 2021; Fedus et al., "Switch Transformers", 2022). n tokens, E experts, k choices a token.
///   p = softmax(logits). The choices are those of the largest scores, lowest index on ties: scores are the
///   logits, with Gumbel noise on the first choice (`noisy_first`), or on the second, when k = 2
///   (`noisy_second`). Noise is keyed by (token_offset + i) · E + e.
///   Capacity, unless dropless (capacity_factor 0): C = min(tokens, max(min_capacity, ceil(tokens / E ·
///   capacity_factor · k))), tokens being those that mask ([n] uint8, optional) marks real. Places in an
///   expert go by token, all first choices before all second ones; k ≥ 3: to the C largest p of an expert,
///   lower token on ties; `random_selection` (k = 1): to the C tokens of the largest bits of `random`, with
///   the next purpose, element token_offset + i. What finds no place is dropped.
///   weight: k = 1: p of the choice; k ≥ 2, or `renormalize`: p over the sum of the token's surviving p (at
///   least 2⁻²³). 0 where dropped.
/// Kept choices are numbered by expert, in an expert first choices before second ones, in the order of
/// tokens: `row` [n, k] int32 is a choice's number, −1 when dropped or masked; `token` [n·k] int32 is the
/// token of each number, −1 beyond the last.
///   logits: [n, E] fp32; probabilities: [n, E] fp32; expert: [n, k] int32, −1 where masked; weight: [n, k]
///   fp32; load: [E] int32, choices before dropping; kept: [E] int32, after; first_load: [E] int32, first
///   choices before dropping (optional; what the auxiliary loss of k = 2 counts).
///   means: [E + 2] fp32: Σ p of each expert over real tokens, Σ (logsumexp logits)², real tokens.
struct RouteArgs {
  TensorView logits, mask;
  int top_k = 1;
  bool noisy_first = false, noisy_second = false, random_selection = false, renormalize = false;
  RandomStream random;
  int64_t token_offset = 0;
  double capacity_factor = 0;
  int64_t min_capacity = 4;
  TensorView probabilities, expert, row, weight, token, load, kept, means, first_load;
};
/// dlogits = Σ over choices of dweight · ∂weight/∂logits, plus, for real tokens, the auxiliary losses:
/// softmax's backward of `balance` [E] fp32 (∂loss/∂p, the same for every token; optional), and z_scale ·
/// ∂(logsumexp²).
///   dweight: [n, k] fp32, optional; dlogits: [n, E] fp32.
struct RouteBackwardArgs {
  TensorView logits, mask, probabilities, expert, row, weight, dweight, balance, dlogits;
  int top_k = 1;
  bool renormalize = false;
  float z_scale = 0;
};

/// Products of ragged groups: rows [offsets[g], offsets[g+1]) of the tall matrices belong to group g.
///   kForward: c[r] = epilogue(a[r] · b[g]ᵀ + bias[g]); a: [rows, K], b: [G, N, K], c: [rows, N].
///   kInput:   c[r] = epilogue(a[r] · b[g]);            a: [rows, N], b: [G, N, K], c: [rows, K].
///   kWeight:  c[g] (+)= a[rows of g]ᵀ · b[rows of g];  a: [rows, N], b: [rows, K], c: [G, N, K] fp32. Groups
///   without rows give zero. offsets: [G + 1] int32 in host memory. bias: [G, N], T or fp32. activation,
///   activation_grad and pre_activation as in MatmulArgs (pre_activation: [rows, columns of c]).
struct GroupedMatmulArgs {
  enum class Kind : uint8_t { kForward, kInput, kWeight } kind = Kind::kForward;
  TensorView a, b, c, offsets;
  bool accumulate = false;  // kWeight and kInput
  TensorView bias;
  Activation activation = Activation::kNone;
  bool activation_grad = false;
  TensorView pre_activation;
};
/// sum[g, j] (+)= Σ over rows of g of x[i, j]. x: [rows, cols] T; sum: [G, cols] fp32; offsets as above.
struct GroupedColumnSumArgs {
  TensorView x, offsets, sum;
  bool accumulate = false;
};

/// out[i] (+)= Σ_j weight[i, j] · x[row[i, j]], leaving out row −1, in the order of j.
///   x: [rows, cols] T; row: [n, k] int32; weight: [n, k] fp32, optional (1); out: [n, cols] T.
struct CombineRowsArgs {
  TensorView x, row, weight, out;
  bool accumulate = false;
};
/// dx[row[i, j]] = weight[i, j] · dout[i]; dweight[i, j] = dout[i] · x[row[i, j]], 0 for row −1. Each row of
/// x is named once. x, dweight optional together; dx: [rows, cols] T.
struct CombineRowsBackwardArgs {
  TensorView dout, x, row, weight, dx, dweight;
};

/// y (+)= x · (1 + amplitude · (2 · Uniform(global element) − 1)): the jitter of a router's input (Fedus et
/// al., "Switch Transformers", 2021). x, y: [rows, cols], each with its own T. The backward is the same call
/// on dy.
struct JitterArgs {
  TensorView x, y;
  float amplitude = 0.0f;
  RandomStream random;
  GlobalIndex index;
  bool accumulate = false;
};

/// out[i] = w₀ · a[i] + w₁ · b[i], w = softmax(logits[i]) (Rajbhandari et al., "DeepSpeed-MoE", 2022, section
/// 4.1). a, b, out: [n, cols] T; logits: [n, 2] fp32.
struct MixRowsArgs {
  TensorView a, b, logits, out;
};
/// da[i] = w₀ · dout[i], db[i] = w₁ · dout[i]; dlogits[i] = ±w₀ · w₁ · dout[i] · (a[i] − b[i]), [n, 2] fp32.
struct MixRowsBackwardArgs {
  TensorView dout, a, b, logits, da, db, dlogits;
};

/// Statistics of logits of which this rank holds columns [vocab_begin, vocab_begin + V) (Shoeybi et al.,
/// "Megatron-LM", 2019, section 3): max[i], sum[i] = Σ exp(logit − max[i]), target[i] = the target's logit,
/// or −inf where it is not here. logits: [rows, V] T; targets: [rows] int32; max, sum, target: [rows] fp32.
struct CrossEntropyPartialArgs {
  TensorView logits, targets, max, sum, target;
  int64_t vocab_begin = 0;
};
/// logits[i] becomes grad_scale · (exp(logit − lse[i]) − [here is the target]), zero where the target is not
/// in [0, vocab_size). lse: [rows] fp32.
struct CrossEntropyGradArgs {
  TensorView logits, targets, lse;
  int64_t vocab_begin = 0, vocab_size = 0;
  float grad_scale = 0;
};

/// out = alpha · a + beta · b, any shape, each with its own T; b optional. out may be a or b. Also the way to
/// convert types.
struct AxpbyArgs {
  TensorView a, b, out;
  float alpha = 1.0f, beta = 1.0f;
};

/// Every element of out (T) becomes value.
struct FillArgs {
  TensorView out;
  float value = 0.0f;
};

/// out = mean + std · Normal(global element), [rows, cols], T. The same bits on every instruction set.
struct RandomNormalArgs {
  TensorView out;
  RandomStream random;
  GlobalIndex index;
  float mean = 0.0f, std = 1.0f;
};

/// out[0] = Σ x², in double. x: any shape, T; out: [1] fp64. Infinities and NaN carry through.
struct SumSquaresArgs {
  TensorView x, out;
};

/// One AdamW step over a flat range, one pass over memory (Kingma and Ba, 2015; Loshchilov and Hutter, 2019):
///   g = grad · grad_scale (grad_scale unscales and clips); decoupled: p −= lr·wd·p, else g += wd·p;
///   m = β1·m + (1−β1)·g; v = β2·v + (1−β2)·g²; p −= lr · (m/bias_correction1) / (√(v/bias_correction2) +
///   eps). param, m, v: [n] fp32, updated; grad: [n] fp32; param_out: [n] bf16 or fp16, a rounded copy of
///   param (optional).
struct AdamWArgs {
  TensorView param, grad, m, v, param_out;
  float lr = 0, beta1 = 0.9f, beta2 = 0.999f, eps = 1e-8f, weight_decay = 0;
  float bias_correction1 = 1, bias_correction2 = 1;  // 1 − βᵗ
  float grad_scale = 1;
  bool decoupled = true;
};

/// g = grad · grad_scale + wd·p; m = momentum·m + g; p −= lr·m. momentum: [n] fp32, zero at first.
struct SgdArgs {
  TensorView param, grad, momentum, param_out;
  float lr = 0, momentum_factor = 0, weight_decay = 0;
  float grad_scale = 1;
};

/// Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023):
///   c = β1·m + (1−β1)·g; p −= lr·(sign(c) + wd·p) with p before the step; m = β2·m + (1−β2)·g. sign(0) = 0.
struct LionArgs {
  TensorView param, grad, m, param_out;
  float lr = 0, beta1 = 0.9f, beta2 = 0.99f, weight_decay = 0;
  float grad_scale = 1;
};

}  // namespace strata
