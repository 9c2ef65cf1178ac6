#include "parallel/tensor_parallel.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <tuple>
#include <utility>

namespace strata {
namespace {

void Copy(const Executor& run, const TensorView& from, const TensorView& to) {
  if (to.num_elements() > 0) run.axpby({.a = from, .b = {}, .out = to});
}

Tensor Copied(const Tape& tape, const Tensor& x) {
  Tensor copy = tape.Empty(x.shape(), x.dtype());
  Copy(tape.executor(), x.view(), copy.view());
  return copy;
}

Tensor ShareOfRows(const TensorGroup& group, const Tensor& x) {
  const Placement::Segment share = group.ShareOf(x.view().rows());
  return x.Rows(share.begin, share.count);
}

// All rows from the ranks' shares. Only the last shares are short, so what fills them up lies behind the
// rows.
Tensor AllGathered(const Tape& tape, const TensorGroup& group, const TensorView& share, int64_t rows) {
  const int64_t size = group.ShareSize(rows), cols = share.cols();
  Tensor all = tape.Empty({size * group.size(), cols}, share.dtype);
  const TensorView mine = all.view().Rows(group.rank() * size, size);
  Copy(tape.executor(), share, mine.Rows(0, share.rows()));
  const TensorView rest = mine.Rows(share.rows(), size - share.rows());
  if (rest.num_elements() > 0) tape.executor().fill({.out = rest});
  group.ranks().AllGather(mine, all.view());
  return all.view().rows() == rows ? all : all.Rows(0, rows);
}

}  // namespace

Placement::Segment TensorGroup::ShareOf(int64_t n, int64_t rank) const {
  const int64_t size = ShareSize(n), begin = std::min(n, rank * size);
  return {begin, std::min(size, n - begin)};
}

Tensor CopyToTensor(Tape& tape, const TensorGroup& group, const Tensor& x) {
  if (group.alone()) return x;
  Tensor y = x.Detached();
  tape.SetRecipe(y, [saved = tape.Save(x)] { return saved.Get(); });
  tape.Record("copy_to_tensor", {x}, {}, {&y}, [&tape, group](Backprop& bp) {
    Tensor dx = bp.TakeDout();
    if (!dx.Unique()) dx = Copied(tape, dx);
    group.ranks().AllReduce(dx.view());
    bp.GiveDin(0, std::move(dx));
  });
  return y;
}

Tensor ReduceFromTensor(Tape& tape, const TensorGroup& group, Tensor x) {
  if (group.alone()) return x;
  Tensor y = tape.StashOrReplay("reduce_from_tensor", x.shape(), [&] {
    Tensor sum = x.Unique() ? x.Detached() : Copied(tape, x);
    group.ranks().AllReduce(sum.view());
    return sum;
  });
  tape.Record("reduce_from_tensor", {x}, {}, {&y}, [](Backprop& bp) { bp.GiveDin(0, bp.TakeDout()); });
  return y;
}

Tensor ScatterRowsToTensor(Tape& tape, const TensorGroup& group, const Tensor& x) {
  if (group.alone()) return x;
  Tensor y = ShareOfRows(group, x);
  tape.Record("scatter_rows_to_tensor", {x}, {}, {&y}, [&tape, group, rows = x.view().rows()](Backprop& bp) {
    bp.GiveDin(0, AllGathered(tape, group, bp.dout().view(), rows));
  });
  return y;
}

Tensor GatherRowsFromTensor(Tape& tape, const TensorGroup& group, const Tensor& x, int64_t rows) {
  if (group.alone()) return x;
  Tensor y = tape.StashOrReplay("gather_rows_from_tensor", {rows, x.view().cols()},
                                [&] { return AllGathered(tape, group, x.view(), rows); });
  tape.Record("gather_rows_from_tensor", {x}, {}, {&y},
              [group](Backprop& bp) { bp.GiveDin(0, ShareOfRows(group, bp.dout())); });
  return y;
}

namespace {

// This rank's share of the rows of the sum of all x.
Tensor ReduceScattered(const Tape& tape, const TensorGroup& group, const TensorView& x) {
  if (x.rows() % group.size() != 0) {
    throw ConfigError(StrCat("parallel.sequence_parallel: a micro-batch has ", x.rows(),
                             " tokens, no multiple of parallel.tensor ", group.size()),
                      "choose data.seq_len or train.micro_batch_size as a multiple of parallel.tensor");
  }
  Tensor share = tape.Empty({x.rows() / group.size(), x.cols()}, x.dtype);
  group.ranks().ReduceScatter(x, share.view());
  return share;
}

}  // namespace

Tensor GatherRowsToTensor(Tape& tape, const TensorGroup& group, const Tensor& x) {
  if (group.alone()) return x;
  const int64_t rows = x.view().rows() * group.size();
  Tensor y = tape.StashOrReplay("gather_rows_to_tensor", {rows, x.view().cols()},
                                [&] { return AllGathered(tape, group, x.view(), rows); });
  tape.Record("gather_rows_to_tensor", {x}, {}, {&y}, [&tape, group](Backprop& bp) {
    bp.GiveDin(0, ReduceScattered(tape, group, bp.dout().view()));
  });
  return y;
}

Tensor ReduceRowsFromTensor(Tape& tape, const TensorGroup& group, const Tensor& x) {
  if (group.alone()) return x;
  const int64_t rows = x.view().rows();
  Tensor y = tape.StashOrReplay("reduce_rows_from_tensor", {rows / group.size(), x.view().cols()},
                                [&] { return ReduceScattered(tape, group, x.view()); });
  tape.Record("reduce_rows_from_tensor", {x}, {}, {&y}, [&tape, group, rows](Backprop& bp) {
    bp.GiveDin(0, AllGathered(tape, group, bp.dout().view(), rows));
  });
  return y;
}

Tensor EnterTensor(Tape& tape, const TensorGroup& group, const Tensor& x) {
  return group.SharesRows(tape) ? GatherRowsToTensor(tape, group, x) : CopyToTensor(tape, group, x);
}

Tensor LeaveTensor(Tape& tape, const TensorGroup& group, Tensor x) {
  return group.SharesRows(tape) ? ReduceRowsFromTensor(tape, group, x)
                                : ReduceFromTensor(tape, group, std::move(x));
}

// ---- Layers ----

Parameter& TensorParallelModule::DeclareCut(std::string name, const Shape& global, int dim,
                                            std::vector<Placement::Segment> segments, Initializer init,
                                            bool decay) {
  if (group_.alone()) return Declare(std::move(name), global, {init, decay, {}, {}});
  Shape local = global;
  local[dim] = 0;
  for (const Placement::Segment& segment : segments) local[dim] += segment.count;
  Placement placement;
  placement.cuts.push_back({dim, std::move(segments)});
  placement.over_tensor = true;
  return Declare(std::move(name), local, {init, decay, std::move(placement), global});
}

std::vector<Placement::Segment> TensorParallelModule::Shares(const std::vector<int64_t>& parts) const {
  std::vector<Placement::Segment> shares;
  int64_t begin = 0;
  for (int64_t part : parts) {
    const Placement::Segment share = group_.ShareOf(part);
    shares.push_back({begin + share.begin, share.count});
    begin += part;
  }
  return shares;
}

ColumnParallelLinear::ColumnParallelLinear(const TensorGroup& group, int64_t in,
                                           const std::vector<int64_t>& parts, bool bias, Initializer init)
    : TensorParallelModule(group),
      weight_(DeclareCut("weight", {std::accumulate(parts.begin(), parts.end(), int64_t{0}), in}, 0,
                         Shares(parts), init, true)),
      bias_(bias ? &DeclareCut("bias", {weight_.global_shape[0]}, 0, Shares(parts), Initializer::Constant(0),
                               false)
                 : nullptr) {}

RowParallelLinear::RowParallelLinear(const TensorGroup& group, int64_t in, int64_t out, bool bias,
                                     Initializer init)
    : TensorParallelModule(group),
      weight_(DeclareCut("weight", {out, in}, 1, Shares({in}), init, true)),
      bias_(bias ? &Declare("bias", {out}, {Initializer::Constant(0), false, {}, {}}) : nullptr) {}

Tensor RowParallelLinear::Forward(Tape& tape, const Tensor& x, const Tensor& residual) const {
  LinearOptions options;
  options.adds_bias = group_.rank() == 0;
  if (group_.SharesRows(tape)) {
    const Tensor y = ReduceRowsFromTensor(tape, group_, Linear(tape, x, weight_, bias_, options));
    return residual.defined() ? Add(tape, residual, y) : y;
  }
  options.residual = residual;
  if (!group_.alone()) {
    options.sum_over_ranks = [&](const TensorView& product) { group_.ranks().AllReduce(product); };
  }
  return Linear(tape, x, weight_, bias_, options);
}

ParallelMlp::ParallelMlp(const TensorGroup& group, const MlpShape& shape)
    : gated_(shape.gated),
      activation_(shape.activation),
      in_(group, shape.hidden_size, std::vector<int64_t>(shape.gated ? 2 : 1, shape.ffn_hidden_size),
          shape.bias, shape.init_in),
      out_(group, shape.ffn_hidden_size, shape.hidden_size, shape.bias, shape.init_out) {
  Register("in", in_);
  Register("out", out_);
}

Tensor ParallelMlp::Forward(Tape& tape, const Tensor& x, const Tensor& residual) const {
  const Tensor inner = gated_ ? Swiglu(tape, in_.Forward(tape, x)) : in_.Forward(tape, x, activation_);
  return out_.Forward(tape, inner, residual);
}

namespace {

// Rows of a weight, or elements of a bias.
struct RowsOf {
  Parameter* parameter;
  int64_t begin, count;
  int64_t cols() const { return parameter->shape.num_elements() / parameter->shape[0]; }
  TensorView In(const TensorView& whole) const {
    return whole.Slice(begin * cols(), count * cols()).Reshaped({count, cols()});
  }
};

// One matrix of stretches of rows, in the type of the parameters.
Tensor Stacked(const Tape& tape, const std::vector<RowsOf>& stack) {
  int64_t rows = 0;
  for (const RowsOf& part : stack) rows += part.count;
  Tensor whole = tape.Empty({rows, stack.front().cols()}, stack.front().parameter->data.dtype);
  int64_t at = 0;
  for (const RowsOf& part : stack) {
    Copy(tape.executor(), part.In(part.parameter->data), whole.view().Rows(at, part.count));
    at += part.count;
  }
  return whole;
}

// Adds the gradient of a Stacked matrix to those of the parameters.
void AddStackedGradient(Tape& tape, const std::vector<RowsOf>& stack, const TensorView& gradient) {
  int64_t at = 0;
  for (const RowsOf& part : stack) {
    const TensorView from = gradient.Rows(at, part.count);
    at += part.count;
    if (!part.parameter->requires_grad) continue;
    const GradTarget target = tape.WeightGrad(*part.parameter);
    if (!target.accumulate) tape.executor().fill({.out = target.view});
    const TensorView to = part.In(target.view);
    tape.executor().axpby({.a = to, .b = from, .out = to});
  }
}

// x · stacked weightᵀ + stacked bias. The stack is put together for each use: it is small beside the product.
Tensor StackedLinear(Tape& tape, const Tensor& x, const std::vector<RowsOf>& weights,
                     const std::vector<RowsOf>& biases) {
  const Tensor weight = Stacked(tape, weights);
  Tensor y = tape.Empty({x.view().rows(), weight.shape()[0]});
  MatmulArgs product;
  product.a = x.view();
  product.b = weight.view();
  product.c = y.view();
  product.trans_b = true;
  Tensor bias;
  if (!biases.empty()) {
    bias = Stacked(tape, biases);
    product.bias = bias.view().Slice(0, y.shape()[1]);
  }
  tape.executor().matmul(product);
  std::vector<Parameter*> parameters;
  for (const auto* stack : {&weights, &biases}) {
    for (const RowsOf& part : *stack) parameters.push_back(part.parameter);
  }
  tape.Record("stacked_linear", {x}, parameters, {&y},
              [&tape, saved_x = tape.Save(x), weights, biases](Backprop& bp) {
                const Executor& run = tape.executor();
                const Tensor dy = bp.TakeDout(), x = saved_x.Get();
                const int64_t out = dy.view().cols(), in = x.view().cols();
                if (!biases.empty()) {
                  const Tensor db = tape.Empty({out, 1}, DType::kF32);
                  run.column_sum({.x = dy.view(), .sum = db.view().Reshaped({out})});
                  AddStackedGradient(tape, biases, db.view());
                }
                const Tensor dw = tape.Empty({out, in}, DType::kF32);
                MatmulArgs product;
                product.a = dy.view();
                product.b = x.view();
                product.c = dw.view();
                product.trans_a = true;
                run.matmul(product);
                AddStackedGradient(tape, weights, dw.view());
                if (!bp.Needs(0)) return;
                const GradTarget dx = bp.Din(0);
                const Tensor weight = Stacked(tape, weights);
                product = MatmulArgs();
                product.a = dy.view();
                product.b = weight.view();
                product.c = dx.view;
                product.accumulate = dx.accumulate;
                run.matmul(product);
              });
  return y;
}

}  // namespace

QkvProjection::QkvProjection(const TensorGroup& group, int64_t in, int64_t num_heads, int64_t num_kv_heads,
                             int64_t head_dim, bool bias, Initializer init)
    : TensorParallelModule(group),
      num_heads_(num_heads / group.size()),
      num_kv_heads_(std::max<int64_t>(num_kv_heads / group.size(), 1)),
      head_dim_(head_dim) {
  const int64_t q_rows = num_heads * head_dim, kv_rows = num_kv_heads * head_dim;
  const int64_t rows = q_rows + 2 * kv_rows;
  const Initializer zero = Initializer::Constant(0);
  if (num_kv_heads % group.size() == 0) {
    const auto shares = Shares({q_rows, kv_rows, kv_rows});
    weight_ = &DeclareCut("weight", {rows, in}, 0, shares, init, true);
    if (bias) bias_ = &DeclareCut("bias", {rows}, 0, shares, zero, false);
    return;
  }
  kv_head_ = group.rank() * num_heads_ / (num_heads / num_kv_heads);
  auto declare = [&](const char* name, const Shape& global, Initializer start, bool decay) {
    Parameter* q = &DeclareCut(name, global, 0, Shares({q_rows}), start, decay);
    Parameter* kv = &DeclareCut(name, global, 0, {{q_rows, 2 * kv_rows}}, start, decay);
    kv->placement.over_tensor = false;
    kv->placement.partial_over_tensor = true;
    return std::pair(q, kv);
  };
  std::tie(weight_, kv_weight_) = declare("weight", {rows, in}, init, true);
  if (bias) std::tie(bias_, kv_bias_) = declare("bias", {rows}, zero, false);
}

Tensor QkvProjection::Forward(Tape& tape, const Tensor& x) const {
  const Tensor input = EnterTensor(tape, group_, x);
  if (!kv_weight_) return Linear(tape, input, *weight_, bias_);
  auto stack = [&](Parameter* q, Parameter* kv) {
    const int64_t v_rows = kv->shape[0] / 2, head = kv_head_ * head_dim_;
    return std::vector<RowsOf>{{q, 0, q->shape[0]}, {kv, head, head_dim_}, {kv, v_rows + head, head_dim_}};
  };
  return StackedLinear(tape, input, stack(weight_, kv_weight_),
                       bias_ ? stack(bias_, kv_bias_) : std::vector<RowsOf>());
}

// ---- The vocabulary ----

VocabParallelEmbedding::VocabParallelEmbedding(const TensorGroup& group, int64_t vocab_size,
                                               int64_t hidden_size, Initializer init)
    : TensorParallelModule(group),
      weight_(DeclareCut("weight", {vocab_size, hidden_size}, 0, Shares({vocab_size}), init, false)) {}

Tensor VocabParallelEmbedding::Forward(Tape& tape, const Tensor& ids, const Tensor& positions,
                                       Parameter* position_table) const {
  if (group_.alone()) return Embedding(tape, ids, weight_, positions, position_table);
  const int64_t first_id = group_.ShareOf(weight_.global_shape[0]).begin;
  // One rank has a row, and the others zeros.
  Tensor x = LeaveTensor(tape, group_, Embedding(tape, ids, weight_, {}, nullptr, first_id));
  if (!position_table) return x;
  Tensor place = Embedding(tape, positions, *position_table, {}, nullptr);
  if (group_.SharesRows(tape)) place = ScatterRowsToTensor(tape, group_, place);
  return Add(tape, x, place);
}

namespace {

// Each rank's statistics of a chunk of rows, in rank order: [ranks, 3, rows].
class ChunkStatistics {
 public:
  ChunkStatistics(const TensorGroup& group, int64_t rows)
      : ranks_(group.size()), rows_(rows), values_(static_cast<size_t>(ranks_ * kKinds * rows)) {}

  static constexpr int64_t kKinds = 3;  // the maximum, the sum of exponentials over it, the target's logit
  float* data() { return values_.data(); }

  // Sets lse = log Σ exp(logit) over the vocabulary, and loss = lse − the target's logit, 0 without target.
  void Combine(int64_t row, float& lse, float& loss) const {
    constexpr float kNone = -std::numeric_limits<float>::infinity();
    float max = kNone, target = kNone;
    for (int64_t r = 0; r < ranks_; ++r) {
      max = std::max(max, At(r, 0, row));
      if (At(r, 2, row) != kNone) target = At(r, 2, row);
    }
    double sum = 0;
    for (int64_t r = 0; r < ranks_; ++r) sum += At(r, 1, row) * std::exp(double{At(r, 0, row)} - max);
    const double log_sum = max + std::log(sum);
    lse = static_cast<float>(log_sum);
    loss = target == kNone ? 0.0f : static_cast<float>(log_sum - target);
  }

 private:
  float At(int64_t rank, int64_t kind, int64_t row) const {
    return values_[static_cast<size_t>((rank * kKinds + kind) * rows_ + row)];
  }
  int64_t ranks_, rows_;
  std::vector<float> values_;
};

// The softmax_cross_entropy of a chunk of logits of which this rank has the columns of `here`.
void LossOfShare(const Tape& tape, const TensorGroup& group, Placement::Segment here, int64_t vocab_size,
                 const SoftmaxCrossEntropyArgs& chunk) {
  const Executor& run = tape.executor();
  const int64_t rows = chunk.targets.num_elements();
  ChunkStatistics statistics(group, rows);
  const Tensor all = tape.Empty({group.size(), ChunkStatistics::kKinds, rows}, DType::kF32);
  const TensorView mine = all.view().Rows(group.rank() * ChunkStatistics::kKinds, ChunkStatistics::kKinds);
  run.cross_entropy_partial({.logits = chunk.logits,
                             .targets = chunk.targets,
                             .max = mine.Slice(0, rows),
                             .sum = mine.Slice(rows, rows),
                             .target = mine.Slice(2 * rows, rows),
                             .vocab_begin = here.begin});
  group.ranks().AllGather(mine, all.view());

  // A few numbers a row: the host combines them, the same on every rank.
  Device& device = run.device();
  const Stream stream = device.compute_stream();
  std::vector<float> lse(static_cast<size_t>(rows)), loss(lse.size());
  const Tensor lse_there = tape.Empty({rows}, DType::kF32);
  device.Copy(statistics.data(), all.view().data, all.view().num_bytes(), stream);
  device.Synchronize(stream);
  for (size_t i = 0; i < lse.size(); ++i) statistics.Combine(static_cast<int64_t>(i), lse[i], loss[i]);
  device.Copy(lse_there.view().data, lse.data(), lse_there.view().num_bytes(), stream);
  device.Copy(chunk.loss.data, loss.data(), chunk.loss.num_bytes(), stream);
  device.Synchronize(stream);
  if (chunk.grad_scale == 0.0f) return;
  run.cross_entropy_grad({.logits = chunk.logits,
                          .targets = chunk.targets,
                          .lse = lse_there.view(),
                          .vocab_begin = here.begin,
                          .vocab_size = vocab_size,
                          .grad_scale = chunk.grad_scale});
}

}  // namespace

Tensor VocabParallelCrossEntropy(Tape& tape, const TensorGroup& group, const Tensor& x, Parameter& weight,
                                 Parameter* bias, const Tensor& targets, float grad_scale) {
  if (group.alone()) return LinearCrossEntropy(tape, x, weight, bias, targets, grad_scale);
  const int64_t vocab_size = weight.global_shape[0];
  return LinearCrossEntropy(tape, EnterTensor(tape, group, x), weight, bias, targets, grad_scale,
                            [&, here = group.ShareOf(vocab_size)](const SoftmaxCrossEntropyArgs& chunk) {
                              LossOfShare(tape, group, here, vocab_size, chunk);
                            });
}

Tensor VocabParallelLogits(Tape& tape, const TensorGroup& group, const Tensor& x, const Parameter& weight,
                           const Parameter* bias) {
  const int64_t rows = x.view().rows(), vocab_size = weight.global_shape[0];
  Tensor logits = tape.Empty({rows, vocab_size}, DType::kF32);
  MatmulArgs product;
  product.a = x.view();
  product.b = weight.data;
  product.c = logits.view();
  product.trans_b = true;
  if (bias) product.bias = bias->data;
  if (group.alone()) {
    tape.executor().matmul(product);
    return logits;
  }
  // The ranks' matrices, each [rows, its share] and then what is missing to the longest.
  const int64_t longest = rows * group.ShareSize(vocab_size);
  const Tensor parts = tape.Empty({group.size(), longest}, DType::kF32);
  const TensorView mine = parts.view().Rows(group.rank(), 1);
  tape.executor().fill({.out = mine});
  product.c = mine.Slice(0, rows * weight.shape[0]).Reshaped({rows, weight.shape[0]});
  tape.executor().matmul(product);
  group.ranks().AllGather(mine, parts.view());
  Device& device = tape.executor().device();
  for (int64_t r = 0; r < group.size(); ++r) {
    const Placement::Segment share = group.ShareOf(vocab_size, r);
    for (int64_t row = 0; row < rows; ++row) {
      const TensorView from = parts.view().Slice(r * longest + row * share.count, share.count);
      const TensorView to = logits.view().Slice(row * vocab_size + share.begin, share.count);
      device.Copy(to.data, from.data, to.num_bytes(), device.compute_stream());
    }
  }
  return logits;
}

}  // namespace strata
