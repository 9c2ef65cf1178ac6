#include "kernels/cpu/route_places.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "kernels/cpu/support.h"

namespace strata {
namespace {

constexpr int64_t kTokensPerPiece = 2048;

class Placement {
 public:
  Placement(const KernelContext& context, const RouteArgs& args)
      : context_(context),
        args_(args),
        n_(args.logits.rows()),
        experts_(args.logits.cols()),
        k_(args.top_k),
        pieces_((n_ + kTokensPerPiece - 1) / kTokensPerPiece),
        expert_(args.expert.as<int32_t>()),
        row_(args.row.as<int32_t>()),
        load_(args.load.as<int32_t>()),
        kept_(args.kept.as<int32_t>()),
        counts_memory_(context, pieces_ * k_ * experts_ * static_cast<int64_t>(sizeof(int32_t))),
        counts_(counts_memory_.as<int32_t>()) {}

  void Run() {
    Count([](int64_t) { return true; });
    const int64_t tokens = CountFirst();
    Scan(load_);
    const int64_t capacity = Capacity(tokens);
    const bool first_come = args_.top_k == 2 || (args_.top_k == 1 && !args_.random_selection);
    if (first_come || *std::max_element(load_, load_ + experts_) <= capacity) {
      Number(capacity, [](int64_t) { return true; });
      return;
    }
    Select(capacity);
    const auto selected = [this](int64_t at) { return row_[at] >= 0; };
    Count(selected);
    Scan(kept_);
    Number(capacity, selected);
  }

 private:
  int32_t* Counts(int64_t piece, int64_t j) const { return counts_ + (piece * k_ + j) * experts_; }

  // Calls body(piece, token) for all tokens, pieces in parallel.
  template <typename Body>
  void ForTokens(const Body& body) const {
    ParallelFor(context_, n_, kTokensPerPiece, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) body(begin / kTokensPerPiece, i);
    });
  }

  // Counts(piece, j)[e] = choices j of expert e in the piece, of those that `takes_part`.
  template <typename Filter>
  void Count(const Filter& takes_part) {
    std::fill(counts_, counts_ + pieces_ * k_ * experts_, 0);
    ForTokens([&](int64_t piece, int64_t i) {
      for (int64_t j = 0; j < k_; ++j) {
        const int64_t at = i * k_ + j;
        if (expert_[at] >= 0 && takes_part(at)) ++Counts(piece, j)[expert_[at]];
      }
    });
  }

  // first_load; returns the number of tokens that are routed at all.
  int64_t CountFirst() const {
    int64_t tokens = 0;
    for (int64_t e = 0; e < experts_; ++e) {
      int32_t first = 0;
      for (int64_t piece = 0; piece < pieces_; ++piece) first += Counts(piece, 0)[e];
      if (args_.first_load.defined()) args_.first_load.as<int32_t>()[e] = first;
      tokens += first;
    }
    return tokens;
  }

  // Counts become the places at which a piece's choices j begin: first choices come before second ones.
  void Scan(int32_t* totals) {
    for (int64_t e = 0; e < experts_; ++e) {
      int32_t total = 0;
      for (int64_t j = 0; j < k_; ++j) {
        for (int64_t piece = 0; piece < pieces_; ++piece) {
          int32_t& count = Counts(piece, j)[e];
          const int32_t begin = total;
          total += count;
          count = begin;
        }
      }
      totals[e] = total;
    }
  }

  int64_t Capacity(int64_t tokens) const {
    if (args_.capacity_factor == 0) return std::numeric_limits<int64_t>::max();
    const double share = static_cast<double>(tokens) / static_cast<double>(experts_);
    const auto places = static_cast<int64_t>(std::ceil(share * args_.capacity_factor * args_.top_k));
    return std::min(tokens, std::max(args_.min_capacity, places));
  }

  // row = 0 for the `capacity` best choices of each expert, −1 for the others.
  void Select(int64_t capacity) {
    const Scratch memory(context_, n_ * k_ * static_cast<int64_t>(sizeof(int32_t)));
    const Scratch begins(context_, experts_ * static_cast<int64_t>(sizeof(int64_t)));
    int32_t* const sorted = memory.as<int32_t>();  // choices, those of an expert side by side
    int64_t* const begin = begins.as<int64_t>();
    int64_t end = 0;
    for (int64_t e = 0; e < experts_; ++e) {
      begin[e] = end;
      end += load_[e];
    }
    ForTokens([&](int64_t piece, int64_t i) {
      for (int64_t j = 0; j < k_; ++j) {
        const int64_t at = i * k_ + j;
        row_[at] = -1;
        if (expert_[at] < 0) continue;
        sorted[begin[expert_[at]] + Counts(piece, j)[expert_[at]]++] = static_cast<int32_t>(at);
      }
    });

    RandomStream random = args_.random;
    ++random.purpose;
    const float* const p = args_.probabilities.f32();
    ParallelFor(context_, experts_, 1, [&](int64_t first, int64_t last) {
      for (int64_t e = first; e < last; ++e) {
        int32_t *const choices = sorted + begin[e], *const choices_end = choices + load_[e];
        const int64_t places = std::min<int64_t>(capacity, load_[e]);
        const auto bits = [&](int32_t at) {
          return random.Bits(static_cast<uint64_t>(args_.token_offset + at));
        };
        const auto before = [&](int32_t a, int32_t b) {
          if (k_ == 1) return bits(a) != bits(b) ? bits(a) > bits(b) : a < b;
          // As bits, which order them all, NaN too.
          const auto share = [&](int32_t at) { return std::bit_cast<uint32_t>(p[at / k_ * experts_ + e]); };
          return share(a) != share(b) ? share(a) > share(b) : a < b;
        };
        if (places < load_[e]) std::nth_element(choices, choices + places, choices_end, before);
        for (int64_t i = 0; i < places; ++i) row_[choices[i]] = 0;
      }
    });
  }

  // Numbers the choices that `takes_part` and have a place below `capacity`; counts are places (Scan).
  template <typename Filter>
  void Number(int64_t capacity, const Filter& takes_part) {
    const Scratch memory(context_, experts_ * static_cast<int64_t>(sizeof(int64_t)));
    int64_t* const begin = memory.as<int64_t>();
    int32_t* const token = args_.token.as<int32_t>();
    int64_t end = 0;
    for (int64_t e = 0; e < experts_; ++e) {
      begin[e] = end;
      kept_[e] = static_cast<int32_t>(std::min<int64_t>(capacity, load_[e]));
      end += kept_[e];
    }
    ForTokens([&](int64_t piece, int64_t i) {
      for (int64_t j = 0; j < k_; ++j) {
        const int64_t at = i * k_ + j, e = expert_[at];
        const bool placed = e >= 0 && takes_part(at) && Counts(piece, j)[e] < capacity;
        const int64_t number = placed ? begin[e] + Counts(piece, j)[e]++ : -1;
        row_[at] = static_cast<int32_t>(number);
        if (placed) token[number] = static_cast<int32_t>(i);
      }
      Weigh(i);
    });
    std::fill(token + end, token + n_ * k_, -1);
  }

  void Weigh(int64_t i) const {
    const float* const p = args_.probabilities.f32() + i * experts_;
    float* const weight = args_.weight.f32() + i * k_;
    const int32_t *const row = row_ + i * k_, *const expert = expert_ + i * k_;
    float sum = 0;
    for (int64_t j = 0; j < k_; ++j) sum += weight[j] = row[j] < 0 ? 0.0f : p[expert[j]];
    if (k_ == 1 && !args_.renormalize) return;
    for (int64_t j = 0; j < k_; ++j) weight[j] /= std::max(sum, kSmallestShare);
  }

  const KernelContext& context_;
  const RouteArgs& args_;
  const int64_t n_, experts_, k_, pieces_;
  const int32_t* const expert_;
  int32_t *const row_, *const load_, *const kept_;
  const Scratch counts_memory_;
  int32_t* const counts_;
};

}  // namespace

void AssignPlaces(const KernelContext& context, const RouteArgs& args) { Placement(context, args).Run(); }

}  // namespace strata
