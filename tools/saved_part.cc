#include "tools/saved_part.h"

#include <algorithm>

namespace strata {

bool SavedPart::FitsInto(const Shape& whole) const {
  if (cuts.empty()) return true;
  if (shape.rank() != whole.rank()) return false;
  auto cut = cuts.begin();
  int64_t elements = 1;
  for (int d = 0; d < whole.rank(); ++d) {
    if (shape[d] < 0 || __builtin_mul_overflow(elements, shape[d], &elements)) return false;
    if (cut == cuts.end() || cut->dim != d) {
      if (shape[d] != whole[d]) return false;
      continue;
    }
    int64_t room = shape[d];
    for (const Placement::Segment& s : cut->segments) {
      if (s.begin < 0 || s.count < 1 || s.begin > whole[d] - s.count || s.count > room) return false;
      room -= s.count;
    }
    ++cut;
  }
  return cut == cuts.end();  // else one is of no dimension, or out of order
}

int64_t SavedPart::NumElements(const Shape& whole) const {
  return cuts.empty() ? whole.num_elements() : shape.num_elements();
}

SavedPart::Place SavedPart::Find(const Shape& whole, int64_t element) const {
  if (cuts.empty()) return {element, whole.num_elements() - element};
  // From the innermost dimension that is cut on, elements are contiguous in blocks of `inner`.
  const int last = cuts.back().dim;
  int64_t inner = 1;
  for (int d = last + 1; d < whole.rank(); ++d) inner *= whole[d];
  Place place{element % inner, inner - element % inner};
  int64_t rest = element / inner, stride = inner;
  auto cut = cuts.rbegin();
  for (int d = last; d >= 0; --d) {
    int64_t at = rest % whole[d];
    rest /= whole[d];
    if (cut != cuts.rend() && cut->dim == d) {
      int64_t before = 0;
      auto s = cut->segments.begin();
      for (; s != cut->segments.end() && (at < s->begin || at >= s->begin + s->count); ++s)
        before += s->count;
      if (s == cut->segments.end()) return {};
      if (d == last) place.run += (s->begin + s->count - at - 1) * inner;
      at += before - s->begin;
      ++cut;
    }
    place.local += at * stride;
    stride *= shape[d];
  }
  return place;
}

bool SavedPart::operator==(const SavedPart& other) const {
  return shape == other.shape &&
         std::ranges::equal(cuts, other.cuts, [](const Placement::Cut& a, const Placement::Cut& b) {
           return a.dim == b.dim &&
                  std::ranges::equal(a.segments, b.segments, [](const auto& x, const auto& y) {
                    return x.begin == y.begin && x.count == y.count;
                  });
         });
}

}  // namespace strata
