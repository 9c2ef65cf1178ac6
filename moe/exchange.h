// ExpertExchange: the way of one micro-batch's rows to the ranks that hold their experts, and back.
//
// Every rank of the expert group learns how many rows each has for each expert; all-to-alls of uneven counts
// then bring a rank the rows of its experts, which are put in the order (expert, source rank, row of the
// source). Rows are sorted by expert where they come from, so what goes to one rank lies together there.
//
// Duplicate tokens (Singh et al., "A Hybrid Tensor-Expert-Data Parallelism Approach", ICS 2023, duplicate
// token dropping): the ranks of a tensor-parallel group have the same rows. With duplicates dropped each
// sends its share of what goes to each rank, and the group gathers the shares behind the all-to-all: every
// row crosses the expert group once, and what arrives is the same to the bit, in the same order.
//
// Ownership: refers to the mesh's communicators, which outlive it. Threading: the rank's thread; all ranks of
// the expert group, and of the tensor-parallel group, make the same calls in the same order.
#pragma once

#include <memory>
#include <vector>

#include "moe/routing.h"
#include "parallel/tensor_parallel.h"

namespace strata {

/// The ranks that share out a layer's experts.
struct ExpertRanks {
  ExpertRanks() = default;
  ExpertRanks(const ProcessMesh* mesh, bool drop_duplicates)
      : expert(mesh && mesh->shape().expert > 1 ? &mesh->ep() : nullptr),
        duplicates(expert && drop_duplicates ? TensorGroup(mesh) : TensorGroup()) {}
  bool alone() const { return expert == nullptr; }
  int64_t size() const { return alone() ? 1 : expert->size(); }
  int64_t rank() const { return alone() ? 0 : expert->rank(); }

  Communicator* expert = nullptr;  // null: this rank has every expert
  TensorGroup duplicates;          // ranks with the same rows, each of which sends a share of them
};

class ExpertExchange {
 public:
  /// Collective. Takes `routed.rows` and `routed.kept`.
  ExpertExchange(Tape& tape, const ExpertRanks& ranks, const Routed& routed);

  /// Whether rows stay where they are: nothing is communicated.
  bool alone() const { return ranks_.alone(); }
  /// Rows of this rank's tokens, sorted by expert.
  int64_t token_rows() const { return token_rows_; }
  /// Rows that this rank's experts take, in all and by expert ([experts here + 1] int32 in host memory).
  int64_t expert_rows() const { return offsets_.back(); }
  TensorView offsets() const {
    return {const_cast<int32_t*>(offsets_.data()), DType::kI32, {static_cast<int64_t>(offsets_.size())}};
  }

  // Not recorded on the tape: each is the gradient of the other.
  /// The rows of this rank's experts: [expert_rows, cols]. Row i of this rank's is x[index[i]]; x[i] without
  /// index.
  Tensor Send(const Tape& tape, const Tensor& x, const TensorView& index = {}) const;
  /// The rows of this rank's tokens, [token_rows, cols], from the rows of its experts.
  Tensor Return(const Tape& tape, const Tensor& y) const;

 private:
  // Sends rows, packed by destination; what the duplicates' group has received, its ranks' rows `longest`
  // apart.
  Tensor Exchange(const Tape& tape, const TensorView& rows, const std::vector<int64_t>& send_rows,
                  const std::vector<int64_t>& receive_rows, int64_t longest) const;

  ExpertRanks ranks_;
  int64_t token_rows_ = 0;
  std::vector<int32_t> offsets_;

  // Rows that this rank sends to and receives from each rank of the expert group, and the most that a rank
  // of the duplicates' group does in all.
  std::vector<int64_t> leaving_rows_, arriving_rows_;
  int64_t longest_leaving_ = 0, longest_arriving_ = 0;
  // Indices of rows, int32 on the device; undefined: 0, 1, 2 …
  Tensor sent_;          // those of the token rows that this rank sends
  Tensor expert_order_;  // the rows of this rank's experts, among all that the group has received
  Tensor arrived_;       // those of the experts' rows that this rank has received, and sends back
  Tensor token_order_;   // the token rows, among all that have come back to the group
};

/// The rows of x that each expert of this rank takes, from all ranks: [exchange.expert_rows(), cols].
Tensor Dispatch(Tape& tape, const Tensor& x, const Routed& routed,
                const std::shared_ptr<const ExpertExchange>& exchange);

}  // namespace strata
