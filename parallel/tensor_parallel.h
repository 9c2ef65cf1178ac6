// Tensor parallelism: layers of which each rank of a group holds a share, and the collectives between them.
//
// Matrices are cut in pairs (Shoeybi et al., "Megatron-LM", 2019, section 3): the first by its outputs, the
// second by its inputs, so that what lies between them (attention heads, the MLP's inner features) needs no
// communication, and one all-reduce forward and one backward make a pair whole. Activations outside a pair
// are the same bits on every rank of the group, and so are the parameters that each has whole and their
// gradients.
//
// With sequence parallelism (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
// Models", 2022) a training pass keeps what lies outside a pair cut by rows: norms, dropout and residuals are
// each rank's share, and every all-reduce becomes a gather and a reduce-scatter.
//
// Parameters have the names, global shapes and starting values of a rank alone; Placement tells which rows
// or columns this rank holds. A default TensorGroup is a rank alone: everything here then is the plain
// operation, at no cost.
//
// Ownership: a group refers to the mesh's communicator, which outlives it. Threading: the rank's thread; all
// ranks of a group run the same operations in the same order.
#pragma once

#include <string>
#include <vector>

#include "parallel/process_mesh.h"
#include "runtime/autograd/ops.h"
#include "runtime/nn/module.h"

namespace strata {

/// The tensor-parallel group as layers see it.
class TensorGroup {
 public:
  TensorGroup() = default;
  explicit TensorGroup(const ProcessMesh* mesh, bool sequence_parallel = false)
      : ranks_(mesh && mesh->shape().tensor > 1 ? &mesh->tp() : nullptr),
        sequence_parallel_(sequence_parallel && ranks_) {}

  bool alone() const { return ranks_ == nullptr; }
  int64_t size() const { return alone() ? 1 : ranks_->size(); }
  int64_t rank() const { return alone() ? 0 : ranks_->rank(); }
  Communicator& ranks() const { return *ranks_; }
  /// Whether ranks have their shares of the rows outside pairs of matrices; equal shares.
  bool sequence_parallel() const { return sequence_parallel_; }
  bool SharesRows(const Tape& tape) const { return sequence_parallel_ && tape.options().training; }

  /// What each rank but the last ones has of `n` things: ⌈n / size⌉.
  int64_t ShareSize(int64_t n) const { return (n + size() - 1) / size(); }
  /// The stretch of them that a rank has.
  Placement::Segment ShareOf(int64_t n, int64_t rank) const;
  Placement::Segment ShareOf(int64_t n) const { return ShareOf(n, rank()); }

 private:
  Communicator* ranks_ = nullptr;
  bool sequence_parallel_ = false;
};

// ---- Collectives as operations of the tape, each with its backward ----

/// x, which every rank has whole and uses for its share of the work; backward: all-reduce.
Tensor CopyToTensor(Tape& tape, const TensorGroup& group, const Tensor& x);
/// All-reduce of the ranks' parts of a sum; backward: identity. Moved in, x gives its memory.
Tensor ReduceFromTensor(Tape& tape, const TensorGroup& group, Tensor x);
/// This rank's share of the rows of x, which every rank has whole; backward: all-gather.
Tensor ScatterRowsToTensor(Tape& tape, const TensorGroup& group, const Tensor& x);
/// All `rows` rows from the ranks' shares; backward: this rank's share. Not summed, since every rank goes on
/// with the same rows and brings the same gradient.
Tensor GatherRowsFromTensor(Tape& tape, const TensorGroup& group, const Tensor& x, int64_t rows);
/// All rows from the ranks' equal shares, which every rank uses for its share of the work; backward:
/// reduce-scatter.
Tensor GatherRowsToTensor(Tape& tape, const TensorGroup& group, const Tensor& x);
/// This rank's share of the rows of the sum of the ranks' x, whose rows the group's size divides; backward:
/// all-gather.
Tensor ReduceRowsFromTensor(Tape& tape, const TensorGroup& group, const Tensor& x);

/// Into a pair of matrices: the whole x that CopyToTensor or GatherRowsToTensor gives.
Tensor EnterTensor(Tape& tape, const TensorGroup& group, const Tensor& x);
/// Out of it: the sum that ReduceFromTensor or ReduceRowsFromTensor gives.
Tensor LeaveTensor(Tape& tape, const TensorGroup& group, Tensor x);

// ---- Layers ----

/// A module whose parameters are cut over the group.
class TensorParallelModule : public Module {
 protected:
  explicit TensorParallelModule(const TensorGroup& group) : group_(group) {}
  /// Declares this rank's part of a parameter: `segments` of dimension `dim`.
  Parameter& DeclareCut(std::string name, const Shape& global, int dim,
                        std::vector<Placement::Segment> segments, Initializer init, bool decay);
  /// This rank's share of each of the stacked `parts`, as stretches of the whole.
  std::vector<Placement::Segment> Shares(const std::vector<int64_t>& parts) const;

  TensorGroup group_;
};

/// act(x · weightᵀ + bias), of which this rank makes its share of the outputs. `parts` are the heights of
/// stacked matrices (gate | up), each of which is shared out.
class ColumnParallelLinear : public TensorParallelModule {
 public:
  ColumnParallelLinear(const TensorGroup& group, int64_t in, const std::vector<int64_t>& parts, bool bias,
                       Initializer init);
  Tensor Forward(Tape& tape, const Tensor& x, Activation activation = Activation::kNone) const {
    return Linear(tape, EnterTensor(tape, group_, x), weight_, bias_, {.activation = activation});
  }
  Parameter& weight() const { return weight_; }

 private:
  Parameter& weight_;
  Parameter* bias_;
};

/// residual + x · weightᵀ + bias, of whose inputs x holds this rank's share: the products are summed over the
/// group, bias and residual added once. A product that recomputation finds stashed is not made again.
class RowParallelLinear : public TensorParallelModule {
 public:
  RowParallelLinear(const TensorGroup& group, int64_t in, int64_t out, bool bias, Initializer init);
  Tensor Forward(Tape& tape, const Tensor& x, const Tensor& residual = {}) const;

 private:
  Parameter& weight_;
  Parameter* bias_;
};

/// A block's MLP, or an expert's, and its starting values.
struct MlpShape {
  int64_t hidden_size = 0, ffn_hidden_size = 0;
  bool bias = false;
  Activation activation = Activation::kGeluTanh;
  bool gated = false;  // silu(gate) · up, whatever `activation`
  Initializer init_in, init_out;
};

/// residual + out(activation(in(x))), the inner width shared out among the ranks.
class ParallelMlp : public Module {
 public:
  ParallelMlp(const TensorGroup& group, const MlpShape& shape);
  Tensor Forward(Tape& tape, const Tensor& x, const Tensor& residual = {}) const;

 private:
  bool gated_;
  Activation activation_;
  ColumnParallelLinear in_;
  RowParallelLinear out_;
};

/// The projection to q | k | v, of which this rank makes its share of the heads. Fewer key/value heads than
/// ranks are held whole by each, which uses the one that its query heads look at; the gradient is summed
/// over the group (Placement::partial_over_tensor).
///   num_heads is a multiple of the group's size; of num_kv_heads and that size one is a multiple of the
///   other.
class QkvProjection : public TensorParallelModule {
 public:
  QkvProjection(const TensorGroup& group, int64_t in, int64_t num_heads, int64_t num_kv_heads,
                int64_t head_dim, bool bias, Initializer init);
  /// [rows, (num_heads() + 2 · num_kv_heads()) · head_dim]
  Tensor Forward(Tape& tape, const Tensor& x) const;
  int64_t num_heads() const { return num_heads_; }  // of this rank
  int64_t num_kv_heads() const { return num_kv_heads_; }

 private:
  int64_t num_heads_, num_kv_heads_, head_dim_;
  int64_t kv_head_ = 0;                                  // the one used, when all are held
  Parameter *weight_, *bias_ = nullptr;                  // of q | k | v, or of q alone when
  Parameter *kv_weight_ = nullptr, *kv_bias_ = nullptr;  // every rank has k | v whole
};

/// A table of token embeddings, of which this rank holds its share of the rows.
class VocabParallelEmbedding : public TensorParallelModule {
 public:
  VocabParallelEmbedding(const TensorGroup& group, int64_t vocab_size, int64_t hidden_size, Initializer init);
  /// As strata::Embedding; this rank's share of the rows, where rows are shared.
  Tensor Forward(Tape& tape, const Tensor& ids, const Tensor& positions, Parameter* position_table) const;
  Parameter& weight() const { return weight_; }

 private:
  Parameter& weight_;
};

/// LinearCrossEntropy of which this rank has its share of the vocabulary: of each chunk's logits only three
/// numbers a row and rank are exchanged (Shoeybi et al., section 3).
///   x: [rows, hidden], or this rank's share of the rows, where they are shared; weight: this rank's rows of
///   [vocab, hidden]; bias: its elements of [vocab], or null; targets: [rows] int32.
Tensor VocabParallelCrossEntropy(Tape& tape, const TensorGroup& group, const Tensor& x, Parameter& weight,
                                 Parameter* bias, const Tensor& targets, float grad_scale);
/// x · weightᵀ + bias over the whole vocabulary, on every rank: [rows, vocab] fp32, not recorded.
Tensor VocabParallelLogits(Tape& tape, const TensorGroup& group, const Tensor& x, const Parameter& weight,
                           const Parameter* bias);

}  // namespace strata
