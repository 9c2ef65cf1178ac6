#include "moe/exchange.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace strata {
namespace {

int64_t Sum(const std::vector<int64_t>& values) {
  return std::accumulate(values.begin(), values.end(), int64_t{0});
}

// The indices on the device; undefined when they are 0, 1, 2 …
Tensor IndexOf(const Tape& tape, std::vector<int32_t> index) {
  bool in_order = true;
  for (size_t i = 0; in_order && i < index.size(); ++i) in_order = index[i] == static_cast<int32_t>(i);
  if (in_order) return {};
  return tape.Upload({index.data(), DType::kI32, {static_cast<int64_t>(index.size())}});
}

// `count` rows of x, by an index that may be undefined.
Tensor Pick(const Tape& tape, const Tensor& x, const TensorView& index, int64_t count) {
  if (!index.defined()) return x.view().rows() == count ? x : x.Rows(0, count);
  Tensor rows = tape.Empty({count, x.view().cols()}, x.dtype());
  tape.executor().gather_rows({.x = x.view(), .index = index.Slice(0, count), .out = rows.view()});
  return rows;
}

TensorView ViewOf(const Tensor& tensor) { return tensor.defined() ? tensor.view() : TensorView(); }

// Blocks of rows, each cut into shares for the ranks of `group`. A rank has its shares of all blocks one
// after another; gathered, the ranks' rows lie `longest` apart.
class Shares {
 public:
  Shares(const TensorGroup& group, std::vector<int64_t> blocks) : group_(group), blocks_(std::move(blocks)) {
    for (int64_t rank = 0; rank < group_.size(); ++rank) {
      int64_t at = 0;
      for (int64_t rows : blocks_) {
        begin_.push_back(at);
        at += group_.ShareOf(rows, rank).count;
      }
      longest_ = std::max(longest_, at);
    }
  }

  /// This rank's rows of each block.
  std::vector<int64_t> Mine() const {
    std::vector<int64_t> counts;
    for (int64_t rows : blocks_) counts.push_back(group_.ShareOf(rows).count);
    return counts;
  }
  int64_t longest() const { return longest_; }
  bool IsMine(size_t block, int64_t i) const { return RankOf(block, i) == group_.rank(); }
  /// Where row i of a block lies among the rows of the rank that has it, and among all when gathered.
  int64_t PlaceAtRank(size_t block, int64_t i) const {
    const int64_t rank = RankOf(block, i);
    return begin_[static_cast<size_t>(rank) * blocks_.size() + block] + i -
           group_.ShareOf(blocks_[block], rank).begin;
  }
  int64_t Place(size_t block, int64_t i) const { return RankOf(block, i) * longest_ + PlaceAtRank(block, i); }

 private:
  int64_t RankOf(size_t block, int64_t i) const { return i / group_.ShareSize(blocks_[block]); }

  const TensorGroup& group_;
  std::vector<int64_t> blocks_, begin_;  // begin_: of each rank and block
  int64_t longest_ = 0;
};

// Rows of each expert, by source rank.
class AllRows {
 public:
  /// Collective. `routed.rows` stands for every rank's where nothing is communicated (a dry run).
  AllRows(Tape& tape, const ExpertRanks& ranks, const Routed& routed)
      : experts_(static_cast<int64_t>(routed.rows.size())) {
    const Tensor all = tape.StashOrReplay("expert_rows", {ranks.size(), experts_}, [&] {
      Tensor gathered = tape.Empty({ranks.size(), experts_}, DType::kI32);
      ranks.expert->AllGather(routed.kept.view(), gathered.view());
      return gathered;
    });
    for (int64_t r = 0; r < ranks.size(); ++r) {
      rows_.insert(rows_.end(), routed.rows.begin(), routed.rows.end());
    }
    Device& device = tape.executor().device();
    device.Copy(rows_.data(), all.view().data, all.view().num_bytes(), device.compute_stream());
    device.Synchronize(device.compute_stream());
  }

  int64_t At(int64_t source, int64_t expert) const {
    return rows_[static_cast<size_t>(source * experts_ + expert)];
  }
  /// Of experts [first, first + count).
  int64_t Sum(int64_t source, int64_t first, int64_t count) const {
    int64_t sum = 0;
    for (int64_t e = first; e < first + count; ++e) sum += At(source, e);
    return sum;
  }

 private:
  int64_t experts_;
  std::vector<int32_t> rows_;
};

}  // namespace

ExpertExchange::ExpertExchange(Tape& tape, const ExpertRanks& ranks, const Routed& routed)
    : ranks_(ranks), token_rows_(std::accumulate(routed.rows.begin(), routed.rows.end(), int64_t{0})) {
  offsets_.push_back(0);
  if (alone()) {
    for (int32_t rows : routed.rows) offsets_.push_back(offsets_.back() + rows);
    return;
  }
  const AllRows all(tape, ranks_, routed);
  const int64_t here = static_cast<int64_t>(routed.rows.size()) / ranks_.size();  // experts of a rank
  const int64_t me = ranks_.rank(), first = me * here;
  std::vector<int64_t> leaving_blocks, arriving_blocks;
  for (int64_t r = 0; r < ranks_.size(); ++r) {
    leaving_blocks.push_back(all.Sum(me, r * here, here));
    arriving_blocks.push_back(all.Sum(r, first, here));
  }
  const Shares leaving(ranks_.duplicates, leaving_blocks), arriving(ranks_.duplicates, arriving_blocks);
  leaving_rows_ = leaving.Mine();
  arriving_rows_ = arriving.Mine();
  longest_leaving_ = leaving.longest();
  longest_arriving_ = arriving.longest();

  std::vector<int32_t> sent, token_order;
  for (size_t r = 0; r < leaving_blocks.size(); ++r) {
    for (int64_t i = 0; i < leaving_blocks[r]; ++i) {
      if (leaving.IsMine(r, i)) sent.push_back(static_cast<int32_t>(token_order.size()));
      token_order.push_back(static_cast<int32_t>(leaving.Place(r, i)));
    }
  }
  std::vector<int32_t> expert_order, arrived(static_cast<size_t>(Sum(arriving_rows_)));
  for (int64_t e = first; e < first + here; ++e) {
    for (int64_t r = 0; r < ranks_.size(); ++r) {
      const auto block = static_cast<size_t>(r);
      const int64_t before = all.Sum(r, first, e - first);
      for (int64_t i = before; i < before + all.At(r, e); ++i) {
        if (arriving.IsMine(block, i)) {
          arrived[static_cast<size_t>(arriving.PlaceAtRank(block, i))] =
              static_cast<int32_t>(expert_order.size());
        }
        expert_order.push_back(static_cast<int32_t>(arriving.Place(block, i)));
      }
    }
    offsets_.push_back(static_cast<int32_t>(expert_order.size()));
  }
  sent_ = IndexOf(tape, std::move(sent));
  token_order_ = IndexOf(tape, std::move(token_order));
  expert_order_ = IndexOf(tape, std::move(expert_order));
  arrived_ = IndexOf(tape, std::move(arrived));
}

Tensor ExpertExchange::Exchange(const Tape& tape, const TensorView& rows,
                                const std::vector<int64_t>& send_rows,
                                const std::vector<int64_t>& receive_rows, int64_t longest) const {
  const TensorGroup& group = ranks_.duplicates;
  const int64_t cols = rows.cols();
  auto elements = [cols](std::vector<int64_t> counts) {
    for (int64_t& count : counts) count *= cols;
    return counts;
  };
  Tensor all = tape.Empty({group.size() * longest, cols}, rows.dtype);
  const TensorView mine = all.view().Rows(group.rank() * longest, longest);
  ranks_.expert->AllToAll(rows, elements(send_rows), mine.Rows(0, Sum(receive_rows)), elements(receive_rows));
  if (!group.alone() && longest > 0) group.ranks().AllGather(mine, all.view());
  return all;
}

Tensor ExpertExchange::Send(const Tape& tape, const Tensor& x, const TensorView& index) const {
  if (alone()) return Pick(tape, x, index, token_rows_);
  Tensor rows;
  if (sent_.defined() && index.defined()) {
    const Tensor of_sent = tape.Empty(sent_.shape(), DType::kI32);
    tape.executor().gather_rows({.x = index.Reshaped({index.num_elements(), 1}),
                                 .index = sent_.view(),
                                 .out = of_sent.view().Reshaped({of_sent.shape()[0], 1})});
    rows = Pick(tape, x, of_sent.view(), Sum(leaving_rows_));
  } else {
    rows = Pick(tape, x, sent_.defined() ? sent_.view() : index, Sum(leaving_rows_));
  }
  const Tensor all = Exchange(tape, rows.view(), leaving_rows_, arriving_rows_, longest_arriving_);
  return Pick(tape, all, ViewOf(expert_order_), expert_rows());
}

Tensor ExpertExchange::Return(const Tape& tape, const Tensor& y) const {
  if (alone()) return y;
  const Tensor rows = Pick(tape, y, ViewOf(arrived_), Sum(arriving_rows_));
  const Tensor all = Exchange(tape, rows.view(), arriving_rows_, leaving_rows_, longest_leaving_);
  return Pick(tape, all, ViewOf(token_order_), token_rows_);
}

Tensor Dispatch(Tape& tape, const Tensor& x, const Routed& routed,
                const std::shared_ptr<const ExpertExchange>& exchange) {
  auto send = [&tape, exchange, token = routed.token](const Tensor& from) {
    return exchange->Send(tape, from, token.view());
  };
  Tensor rows;
  if (exchange->alone()) {
    rows = send(x);
    tape.SetRecipe(rows, [send, saved = tape.Save(x)] { return send(saved.Get()); });
  } else {
    rows =
        tape.StashOrReplay("dispatch", {exchange->expert_rows(), x.view().cols()}, [&] { return send(x); });
  }
  tape.Record("dispatch", {x}, {}, {&rows}, [&tape, exchange, row = routed.row](Backprop& bp) {
    const Tensor drows = exchange->Return(tape, bp.TakeDout());
    const GradTarget dx = bp.Din(0);
    tape.executor().combine_rows(
        {.x = drows.view(), .row = row.view(), .weight = {}, .out = dx.view, .accumulate = dx.accumulate});
  });
  return rows;
}

}  // namespace strata
