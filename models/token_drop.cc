#include "models/token_drop.h"

#include <algorithm>

namespace strata {
namespace {

int64_t FirstSequence(const Tape& tape, int64_t seq_len) {
  const int64_t row = tape.options().row_offset;
  STRATA_CHECK(row % seq_len == 0) << "row " << row << " begins no sequence of " << seq_len << " tokens";
  return row / seq_len;
}

}  // namespace

std::vector<int32_t> DrawKeptTokens(const RandomStream& random, int64_t first_sequence, int64_t batch,
                                    int64_t seq_len, int64_t kept) {
  STRATA_CHECK(kept > 0 && kept <= seq_len) << "keeping " << kept << " of " << seq_len << " tokens";
  // Those with the smallest random words; a word's token below it tells equal ones apart.
  std::vector<uint64_t> keys(static_cast<size_t>(seq_len));
  std::vector<int32_t> rows;
  rows.reserve(static_cast<size_t>(batch * kept));
  for (int64_t b = 0; b < batch; ++b) {
    const auto first = static_cast<uint64_t>((first_sequence + b) * seq_len);
    std::array<uint32_t, 4> words{};
    for (uint64_t t = 0; t < keys.size(); ++t) {
      const uint64_t element = first + t;
      if (t == 0 || element % 4 == 0) words = random.Block(element / 4);
      keys[t] = uint64_t{words[element % 4]} << 32 | t;
    }
    std::nth_element(keys.begin(), keys.begin() + (kept - 1), keys.end());
    for (int64_t i = 0; i < kept; ++i) {
      rows.push_back(static_cast<int32_t>(b * seq_len + static_cast<int64_t>(keys[i] & 0xffffffffu)));
    }
    std::sort(rows.end() - kept, rows.end());
  }
  return rows;
}

KeptTokens::KeptTokens(const Tape& tape, int64_t layer, int64_t batch, int64_t seq_len, int64_t kept)
    : batch_(batch), kept_(kept), first_sequence_(FirstSequence(tape, seq_len)) {
  std::vector<int32_t> rows = DrawKeptTokens(tape.random(Purpose("random_ltd", static_cast<uint32_t>(layer))),
                                             first_sequence_, batch, seq_len, kept);
  index_ = tape.Upload({rows.data(), DType::kI32, {batch * kept}});
}

Tensor KeptTokens::Select(const Tape& tape, const Tensor& values) const {
  if (!values.defined()) return {};
  Tensor selected = tape.Empty({batch_, kept_}, values.dtype());
  tape.executor().gather_rows({.x = values.view().Reshaped({values.view().num_elements(), 1}),
                               .index = index_.view(),
                               .out = selected.view().Reshaped({batch_ * kept_, 1})});
  return selected;
}

Tensor KeptTokens::Apply(Tape& tape, const Tensor& x,
                         const std::function<Tensor(const Tensor&)>& layer) const {
  const Tensor y =
      tape.WithRowOffset(first_sequence_ * kept_, [&] { return layer(GatherRows(tape, x, index_)); });
  return ScatterRows(tape, x, y, index_);
}

}  // namespace strata
