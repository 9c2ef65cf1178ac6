// Every backward op is the gradient of its forward op: central differences on the reference kernels in fp64.

#include <catch2/catch.hpp>
#include <cmath>
#include <functional>
#include <vector>

#include "kernels/kernel_table.h"

namespace strata {
namespace {

using Doubles = std::vector<double>;

const KernelTable& kernels = ReferenceKernels();
const KernelContext context;

TensorView View(Doubles& values, Shape shape) { return {values.data(), DType::kF64, shape}; }

Doubles Random(int64_t n, uint32_t purpose, double mean = 0) {
  Doubles values(n);
  const RandomStream random{7, purpose, 0};
  for (int64_t i = 0; i < n; ++i) values[i] = mean + random.Normal(i);
  return values;
}

double Dot(const Doubles& a, const Doubles& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// `gradient` is ∂loss/∂x, loss being a function of what x holds. Steps of 1e-5 leave errors of about 1e-10.
void CheckGradient(const Doubles& gradient, Doubles& x, const std::function<double()>& loss) {
  constexpr double kStep = 1e-5;
  REQUIRE(gradient.size() == x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    const double kept = x[i];
    x[i] = kept + kStep;
    const double above = loss();
    x[i] = kept - kStep;
    const double below = loss();
    x[i] = kept;
    const double difference = (above - below) / (2 * kStep);
    if (std::abs(gradient[i] - difference) <= 1e-7 * std::max(1.0, std::abs(difference))) continue;
    FAIL_CHECK("element " << i << ": gradient " << gradient[i] << ", central difference " << difference);
  }
}

// alpha · op(a) · op(b), all fp64.
MatmulArgs Product(TensorView a, TensorView b, TensorView c, bool trans_a = false, bool trans_b = false,
                   float alpha = 1) {
  MatmulArgs args;
  args.a = a, args.b = b, args.c = c;
  args.trans_a = trans_a, args.trans_b = trans_b;
  args.alpha = alpha;
  return args;
}

TEST_CASE("gradients of a matrix product are products") {
  constexpr int64_t m = 4, n = 5, k = 3;
  Doubles a = Random(m * k, 1), b = Random(k * n, 2), bias = Random(n, 3), dout = Random(m * n, 4);
  const auto loss = [&] {
    Doubles c(m * n);
    MatmulArgs args = Product(View(a, {m, k}), View(b, {k, n}), View(c, {m, n}), false, false, 0.5f);
    args.bias = View(bias, {n});
    kernels.matmul(context, args);
    return Dot(c, dout);
  };
  Doubles da(m * k), db(k * n), dbias(n);
  const TensorView dout_view = View(dout, {m, n});
  kernels.matmul(context, Product(dout_view, View(b, {k, n}), View(da, {m, k}), false, true, 0.5f));
  kernels.matmul(context, Product(View(a, {m, k}), dout_view, View(db, {k, n}), true, false, 0.5f));
  kernels.column_sum(context, {dout_view, View(dbias, {n})});
  CheckGradient(da, a, loss);
  CheckGradient(db, b, loss);
  CheckGradient(dbias, bias, loss);
}

TEST_CASE("the epilogue activation_grad is the gradient of the epilogue activation") {
  const Activation activation = GENERATE(Activation::kNone, Activation::kGeluTanh, Activation::kGeluErf,
                                         Activation::kSilu, Activation::kRelu);
  constexpr int64_t m = 4, n = 5, k = 3;
  Doubles x = Random(m * k, 1), w1 = Random(k * n, 2), w2 = Random(n * k, 3), dout = Random(m * k, 4);
  Doubles z(m * n), residual = Random(m * k, 5);
  const auto loss = [&] {
    Doubles y(m * n), out(m * k);
    MatmulArgs first = Product(View(x, {m, k}), View(w1, {k, n}), View(y, {m, n}));
    first.activation = activation;
    first.pre_activation = View(z, {m, n});
    kernels.matmul(context, first);
    MatmulArgs second = Product(View(y, {m, n}), View(w2, {n, k}), View(out, {m, k}));
    second.residual = View(residual, {m, k});
    kernels.matmul(context, second);
    return Dot(out, dout);
  };
  loss();
  Doubles dz(m * n), dw1(k * n);
  MatmulArgs through = Product(View(dout, {m, k}), View(w2, {n, k}), View(dz, {m, n}), false, true);
  through.activation = activation;
  through.activation_grad = true;
  through.pre_activation = View(z, {m, n});
  kernels.matmul(context, through);
  kernels.matmul(context, Product(View(x, {m, k}), View(dz, {m, n}), View(dw1, {k, n}), true));
  CheckGradient(dw1, w1, loss);
  CheckGradient(dout, residual, loss);
}

enum class Mask { kNone, kKeys, kSegments };

TEST_CASE("attention_backward is the gradient of attention_forward") {
  const Mask mask = GENERATE(Mask::kNone, Mask::kKeys, Mask::kSegments);
  const bool causal = GENERATE(true, false);
  constexpr int64_t kBatch = 2, kLen = 5, kHeads = 4, kKvHeads = 2, kDim = 3;
  constexpr int64_t kWidth = (kHeads + 2 * kKvHeads) * kDim, kOutWidth = kHeads * kDim;
  std::vector<uint8_t> key_mask{0, 1, 1, 1, 0,
                                1, 1, 0, 1, 1};  // the first query of the first sequence sees none
  std::vector<int32_t> segment_ids{0, 0, 1, 1, 1, 3, 4, 4, 4, 3};
  AttentionShape shape{kBatch, kLen, kLen, kHeads, kKvHeads, kDim, 0.7f, causal, 0, {}, {}};
  if (mask == Mask::kKeys) shape.key_mask = {key_mask.data(), DType::kU8, {kBatch, kLen}};
  if (mask == Mask::kSegments) shape.segment_ids = {segment_ids.data(), DType::kI32, {kBatch, kLen}};
  const auto heads = [](Doubles& matrix, int64_t width, int64_t column) {
    return HeadsView{matrix.data() + column, DType::kF64, kLen * width, width};
  };
  constexpr int64_t kK = kHeads * kDim,
                    kV = kK + kKvHeads * kDim;  // first columns of the keys and of the values
  Doubles qkv = Random(kBatch * kLen * kWidth, 1), dout = Random(kBatch * kLen * kOutWidth, 2);
  Doubles out(dout.size()), lse(kBatch * kHeads * kLen), dqkv(qkv.size(), NAN);
  const TensorView lse_view = View(lse, {kBatch, kHeads, kLen});
  const auto loss = [&] {
    kernels.attention_forward(context, {shape, heads(qkv, kWidth, 0), heads(qkv, kWidth, kK),
                                        heads(qkv, kWidth, kV), heads(out, kOutWidth, 0), lse_view});
    return Dot(out, dout);
  };
  loss();
  kernels.attention_backward(
      context, {shape, heads(qkv, kWidth, 0), heads(qkv, kWidth, kK), heads(qkv, kWidth, kV),
                heads(out, kOutWidth, 0), heads(dout, kOutWidth, 0), lse_view, heads(dqkv, kWidth, 0),
                heads(dqkv, kWidth, kK), heads(dqkv, kWidth, kV)});
  CheckGradient(dqkv, qkv, loss);
}

TEST_CASE("attention_backward over a cache of more keys than queries") {
  constexpr int64_t kQueries = 3, kKeys = 7, kDim = 4;
  const AttentionShape shape{1,    kQueries, kKeys, 1,  1, kDim,
                             0.5f, true,     2,     {}, {}};  // keys 5 and 6 are not seen
  Doubles q = Random(kQueries * kDim, 1), k = Random(kKeys * kDim, 2), v = Random(kKeys * kDim, 3);
  Doubles dout = Random(kQueries * kDim, 4), out(dout.size()), lse(kQueries);
  Doubles dq(q.size(), NAN), dk(k.size(), NAN), dv(v.size(), NAN);
  const auto heads = [](Doubles& m) { return HeadsView{m.data(), DType::kF64, 0, kDim}; };
  const auto loss = [&] {
    kernels.attention_forward(context,
                              {shape, heads(q), heads(k), heads(v), heads(out), View(lse, {1, 1, kQueries})});
    return Dot(out, dout);
  };
  loss();
  kernels.attention_backward(context, {shape, heads(q), heads(k), heads(v), heads(out), heads(dout),
                                       View(lse, {1, 1, kQueries}), heads(dq), heads(dk), heads(dv)});
  CheckGradient(dq, q, loss);
  CheckGradient(dk, k, loss);
  CheckGradient(dv, v, loss);
}

TEST_CASE("rotary turned back is the gradient of rotary") {
  constexpr int64_t kBatch = 2, kLen = 3, kHeads = 2, kDim = 6;
  Doubles x = Random(kBatch * kLen * kHeads * kDim, 1), dout = Random(x.size(), 2), inv_freq{1, 0.3};
  std::vector<int32_t> positions{5, 0, 2, 7, 8, 9};
  const auto turn = [&](Doubles& data, bool inverse) {
    kernels.rotary(context, {{data.data(), DType::kF64, kLen * kHeads * kDim, kHeads * kDim},
                             kBatch,
                             kLen,
                             kHeads,
                             kDim,
                             View(inv_freq, {2}),
                             {positions.data(), DType::kI32, {kBatch * kLen}},
                             0,
                             inverse});
  };
  const auto loss = [&] {
    Doubles y = x;
    turn(y, false);
    return Dot(y, dout);
  };
  Doubles dx = dout;
  turn(dx, true);
  CheckGradient(dx, x, loss);
}

TEST_CASE("layer_norm_backward is the gradient of layer_norm_forward") {
  constexpr int64_t kRows = 4, kCols = 6;
  Doubles x = Random(kRows * kCols, 1, 0.5), gain = Random(kCols, 2, 1), bias = Random(kCols, 3);
  Doubles dy = Random(x.size(), 4), mean(kRows), rstd(kRows);
  const Shape shape{kRows, kCols};
  const auto loss = [&] {
    Doubles y(x.size());
    kernels.layer_norm_forward(context, {View(x, shape), View(gain, {kCols}), View(bias, {kCols}),
                                         View(y, shape), View(mean, {kRows}), View(rstd, {kRows})});
    return Dot(y, dy);
  };
  loss();
  Doubles dx(x.size()), dgain(kCols), dbias(kCols);
  kernels.layer_norm_backward(
      context, {View(dy, shape), View(x, shape), View(gain, {kCols}), View(mean, {kRows}),
                View(rstd, {kRows}), View(dx, shape), View(dgain, {kCols}), View(dbias, {kCols})});
  CheckGradient(dx, x, loss);
  CheckGradient(dgain, gain, loss);
  CheckGradient(dbias, bias, loss);
}

TEST_CASE("rms_norm_backward is the gradient of rms_norm_forward") {
  constexpr int64_t kRows = 4, kCols = 6;
  Doubles x = Random(kRows * kCols, 1, 0.5), gain = Random(kCols, 2, 1), dy = Random(x.size(), 4),
          rstd(kRows);
  const Shape shape{kRows, kCols};
  const auto loss = [&] {
    Doubles y(x.size());
    kernels.rms_norm_forward(context,
                             {View(x, shape), View(gain, {kCols}), View(y, shape), View(rstd, {kRows})});
    return Dot(y, dy);
  };
  loss();
  Doubles dx(x.size()), dgain(kCols);
  kernels.rms_norm_backward(context, {View(dy, shape), View(x, shape), View(gain, {kCols}),
                                      View(rstd, {kRows}), View(dx, shape), View(dgain, {kCols})});
  CheckGradient(dx, x, loss);
  CheckGradient(dgain, gain, loss);
}

TEST_CASE("activation_backward is the gradient of activation_forward") {
  const Activation activation = GENERATE(Activation::kNone, Activation::kGeluTanh, Activation::kGeluErf,
                                         Activation::kSilu, Activation::kRelu);
  Doubles x = Random(50, 1), dy = Random(50, 2), dx(50);
  const auto loss = [&] {
    Doubles y(50);
    kernels.activation_forward(context, {activation, View(x, {50}), View(y, {50})});
    return Dot(y, dy);
  };
  kernels.activation_backward(context, {activation, View(dy, {50}), View(x, {50}), View(dx, {50})});
  CheckGradient(dx, x, loss);
}

TEST_CASE("swiglu_backward is the gradient of swiglu_forward") {
  constexpr int64_t kRows = 3, kCols = 4;
  Doubles gate_up = Random(kRows * 2 * kCols, 1), dy = Random(kRows * kCols, 2), d_gate_up(gate_up.size());
  const auto loss = [&] {
    Doubles y(dy.size());
    kernels.swiglu_forward(context, {View(gate_up, {kRows, 2 * kCols}), View(y, {kRows, kCols})});
    return Dot(y, dy);
  };
  kernels.swiglu_backward(context, {View(dy, {kRows, kCols}), View(gate_up, {kRows, 2 * kCols}),
                                    View(d_gate_up, {kRows, 2 * kCols})});
  CheckGradient(d_gate_up, gate_up, loss);
}

TEST_CASE("embedding_backward is the gradient of embedding_forward") {
  constexpr int64_t kVocab = 4, kCols = 3, kTokens = 6;
  std::vector<int32_t> ids{2, 0, 2, 3, 2, 0};
  const TensorView ids_view(ids.data(), DType::kI32, {kTokens});
  Doubles table = Random(kVocab * kCols, 1), dout = Random(kTokens * kCols, 2), dtable(table.size(), NAN);
  const auto loss = [&] {
    Doubles out(dout.size());
    kernels.embedding_forward(context, {ids_view, View(table, {kVocab, kCols}), View(out, {kTokens, kCols})});
    return Dot(out, dout);
  };
  kernels.embedding_backward(context,
                             {ids_view, View(dout, {kTokens, kCols}), View(dtable, {kVocab, kCols})});
  CheckGradient(dtable, table, loss);
}

TEST_CASE("dropout is its own gradient") {
  constexpr int64_t kRows = 4, kCols = 5;
  const Shape shape{kRows, kCols};
  Doubles x = Random(kRows * kCols, 1), dy = Random(x.size(), 2), dx(x.size());
  const auto drop = [&](Doubles& from, Doubles& to) {
    kernels.dropout(context, {View(from, shape), View(to, shape), 0.4f, {11, 2, 5}, {3, {}, 1, 9}});
  };
  const auto loss = [&] {
    Doubles y(x.size());
    drop(x, y);
    return Dot(y, dy);
  };
  drop(dy, dx);
  CheckGradient(dx, x, loss);
}

TEST_CASE("softmax_cross_entropy gives the gradient of its loss") {
  constexpr int64_t kRows = 5, kVocab = 7;
  std::vector<int32_t> targets{3, -100, 0, 6, 7};
  const TensorView targets_view(targets.data(), DType::kI32, {kRows});
  Doubles logits = Random(kRows * kVocab, 1), ones(kRows, 1);
  const auto loss = [&] {
    Doubles copy = logits, losses(kRows);
    kernels.softmax_cross_entropy(context,
                                  {View(copy, {kRows, kVocab}), targets_view, View(losses, {kRows})});
    return 0.25 * Dot(losses, ones);
  };
  Doubles gradient = logits, losses(kRows);
  kernels.softmax_cross_entropy(
      context, {View(gradient, {kRows, kVocab}), targets_view, View(losses, {kRows}), 0.25f});
  CheckGradient(gradient, logits, loss);
}

TEST_CASE("gather_rows and scatter_rows are each other's gradients") {
  constexpr int64_t kRows = 5, kCols = 3, kPicked = 4;
  std::vector<int32_t> index{4, 0, 3, 1};
  const TensorView index_view(index.data(), DType::kI32, {kPicked});
  Doubles all = Random(kRows * kCols, 1), picked = Random(kPicked * kCols, 2);
  const auto gather = [&](Doubles& from, Doubles& to) {
    kernels.gather_rows(context, {View(from, {kRows, kCols}), index_view, View(to, {kPicked, kCols})});
  };
  const auto scatter = [&](Doubles& from, Doubles& to, bool accumulate) {
    kernels.scatter_rows(context,
                         {View(from, {kPicked, kCols}), index_view, View(to, {kRows, kCols}), accumulate});
  };
  Doubles d_picked = Random(picked.size(), 3), d_all = Random(all.size(), 4);
  const auto gathered_loss = [&] {
    Doubles out(picked.size());
    gather(all, out);
    return Dot(out, d_picked);
  };
  Doubles from_scatter(all.size());
  scatter(d_picked, from_scatter, true);
  CheckGradient(from_scatter, all, gathered_loss);

  const auto scattered_loss = [&] {
    Doubles out = all;
    scatter(picked, out, false);
    return Dot(out, d_all);
  };
  Doubles from_gather(picked.size());
  gather(d_all, from_gather);
  CheckGradient(from_gather, picked, scattered_loss);
}

TensorView View(std::vector<int32_t>& values, Shape shape) { return {values.data(), DType::kI32, shape}; }

TEST_CASE("gradients of a grouped product are grouped products") {
  constexpr int64_t kGroups = 3, kRows = 5, n = 4, k = 3;
  std::vector<int32_t> offsets{0, 2, 2, 5};
  Doubles a = Random(kRows * k, 1), b = Random(kGroups * n * k, 2), bias = Random(kGroups * n, 3);
  Doubles dout = Random(kRows * n, 4);
  const TensorView offsets_view = View(offsets, {kGroups + 1});
  const auto product = [&](GroupedMatmulArgs::Kind kind, TensorView x, TensorView y, TensorView z) {
    GroupedMatmulArgs args;
    args.kind = kind;
    args.a = x, args.b = y, args.c = z;
    args.offsets = offsets_view;
    if (kind == GroupedMatmulArgs::Kind::kForward) args.bias = View(bias, {kGroups, n});
    kernels.grouped_matmul(context, args);
  };
  const TensorView a_view = View(a, {kRows, k}), b_view = View(b, {kGroups, n, k});
  const TensorView dout_view = View(dout, {kRows, n});
  const auto loss = [&] {
    Doubles c(kRows * n);
    product(GroupedMatmulArgs::Kind::kForward, a_view, b_view, View(c, {kRows, n}));
    return Dot(c, dout);
  };
  Doubles da(a.size(), NAN), db(b.size(), NAN), dbias(bias.size(), NAN);
  product(GroupedMatmulArgs::Kind::kInput, dout_view, b_view, View(da, {kRows, k}));
  product(GroupedMatmulArgs::Kind::kWeight, dout_view, a_view, View(db, {kGroups, n, k}));
  kernels.grouped_column_sum(context, {dout_view, offsets_view, View(dbias, {kGroups, n})});
  CheckGradient(da, a, loss);
  CheckGradient(db, b, loss);
  CheckGradient(dbias, bias, loss);
}

TEST_CASE("route_backward is the gradient of weights, balance and z loss") {
  const int k = GENERATE(1, 2, 3);
  const double capacity_factor = GENERATE(0.0, 0.5);
  const bool renormalize = GENERATE(false, true);
  constexpr int64_t kTokens = 12, kExperts = 5;
  constexpr float kZ = 0.25f;
  Doubles logits = Random(kTokens * kExperts, 1), dweight = Random(kTokens * k, 2),
          balance = Random(kExperts, 3);
  std::vector<uint8_t> mask(kTokens, 1);
  mask[3] = mask[7] = 0;
  Doubles probabilities(logits.size()), weight(dweight.size()), means(kExperts + 2),
      dlogits(logits.size(), NAN);
  std::vector<int32_t> expert(dweight.size()), row(dweight.size()), token(dweight.size()), load(kExperts),
      kept(kExperts);
  const Shape all{kTokens, kExperts}, per_choice{kTokens, k};
  const auto loss = [&] {
    RouteArgs args;
    args.logits = View(logits, all);
    args.mask = {mask.data(), DType::kU8, {kTokens}};
    args.top_k = k;
    args.renormalize = renormalize;
    args.capacity_factor = capacity_factor;
    args.min_capacity = 1;
    args.probabilities = View(probabilities, all);
    args.expert = View(expert, per_choice), args.row = View(row, per_choice);
    args.weight = View(weight, per_choice), args.token = View(token, {kTokens * k});
    args.load = View(load, {kExperts}), args.kept = View(kept, {kExperts});
    args.means = View(means, {kExperts + 2});
    kernels.route(context, args);
    double total = Dot(weight, dweight) + double{kZ} * means[kExperts];
    for (int64_t e = 0; e < kExperts; ++e) total += balance[e] * means[e];
    return total;
  };
  loss();
  RouteBackwardArgs args;
  args.logits = View(logits, all);
  args.mask = {mask.data(), DType::kU8, {kTokens}};
  args.probabilities = View(probabilities, all);
  args.expert = View(expert, per_choice), args.row = View(row, per_choice);
  args.weight = View(weight, per_choice), args.dweight = View(dweight, per_choice);
  args.balance = View(balance, {kExperts}), args.dlogits = View(dlogits, all);
  args.top_k = k;
  args.renormalize = renormalize;
  args.z_scale = kZ;
  kernels.route_backward(context, args);
  CheckGradient(dlogits, logits, loss);
}

TEST_CASE("combine_rows_backward is the gradient of combine_rows") {
  constexpr int64_t kTokens = 4, kChoices = 2, kRows = 6, kCols = 3;
  std::vector<int32_t> row{4, 0, -1, 2, 5, -1, 3, 1};
  const TensorView row_view = View(row, {kTokens, kChoices});
  Doubles x = Random(kRows * kCols, 1), weight = Random(kTokens * kChoices, 2),
          dout = Random(kTokens * kCols, 3);
  Doubles dx(x.size(), NAN), dweight(weight.size(), NAN);
  const auto loss = [&] {
    Doubles out(dout.size());
    kernels.combine_rows(context, {View(x, {kRows, kCols}), row_view, View(weight, {kTokens, kChoices}),
                                   View(out, {kTokens, kCols})});
    return Dot(out, dout);
  };
  kernels.combine_rows_backward(context, {View(dout, {kTokens, kCols}), View(x, {kRows, kCols}), row_view,
                                          View(weight, {kTokens, kChoices}), View(dx, {kRows, kCols}),
                                          View(dweight, {kTokens, kChoices})});
  CheckGradient(dx, x, loss);
  CheckGradient(dweight, weight, loss);
}

TEST_CASE("cross entropy over parts of a vocabulary is that over the whole") {
  constexpr int64_t kRows = 5, kVocab = 11;
  const std::vector<int64_t> begins{0, 4, 5, kVocab};
  std::vector<int32_t> targets{3, -100, 4, 10, 11};
  const TensorView targets_view = View(targets, {kRows});
  Doubles logits = Random(kRows * kVocab, 1), whole = logits, losses(kRows);
  kernels.softmax_cross_entropy(context,
                                {View(whole, {kRows, kVocab}), targets_view, View(losses, {kRows}), 0.25f});

  std::vector<Doubles> parts;
  Doubles highest(kRows, -INFINITY), total(kRows), target(kRows, -INFINITY), lse(kRows);
  std::vector<Doubles> maxima, sums;
  for (size_t part = 0; part + 1 < begins.size(); ++part) {
    const int64_t begin = begins[part], cols = begins[part + 1] - begin;
    Doubles here(kRows * cols), max(kRows, NAN), sum(kRows, NAN), found(kRows, NAN);
    for (int64_t at = 0; at < kRows * cols; ++at) here[at] = logits[at / cols * kVocab + begin + at % cols];
    kernels.cross_entropy_partial(context, {View(here, {kRows, cols}), targets_view, View(max, {kRows}),
                                            View(sum, {kRows}), View(found, {kRows}), begin});
    for (int64_t i = 0; i < kRows; ++i) {
      highest[i] = std::max(highest[i], max[i]);
      target[i] = std::max(target[i], found[i]);
    }
    parts.push_back(here), maxima.push_back(max), sums.push_back(sum);
  }
  for (int64_t i = 0; i < kRows; ++i) {
    for (size_t part = 0; part < parts.size(); ++part) {
      total[i] += sums[part][i] * std::exp(maxima[part][i] - highest[i]);
    }
    lse[i] = highest[i] + std::log(total[i]);
    const bool counted = targets[i] >= 0 && targets[i] < kVocab;
    CHECK(std::isinf(target[i]) == !counted);
    if (counted) CHECK(lse[i] - target[i] == Approx(losses[i]).epsilon(1e-12));
  }
  for (size_t part = 0; part < parts.size(); ++part) {
    const int64_t begin = begins[part], cols = begins[part + 1] - begin;
    kernels.cross_entropy_grad(
        context, {View(parts[part], {kRows, cols}), targets_view, View(lse, {kRows}), begin, kVocab, 0.25f});
    for (int64_t at = 0; at < kRows * cols; ++at) {
      CHECK(parts[part][at] == Approx(whole[at / cols * kVocab + begin + at % cols]).margin(1e-14));
    }
  }
}

}  // namespace
}  // namespace strata
