#include "runtime/autograd/parameter.h"

#include <algorithm>

namespace strata {
namespace {

// A local position along one dimension: its global position (−1: padding), and how many positions from there
// on are contiguous in both.
struct Position {
  int64_t global, run;
};

Position Locate(const Placement& placement, int dim, int64_t local, int64_t extent) {
  for (const Placement::Cut& cut : placement.cuts) {
    if (cut.dim != dim) continue;
    int64_t at = local;
    for (const Placement::Segment& segment : cut.segments) {
      if (at < segment.count) return {segment.begin + at, segment.count - at};
      at -= segment.count;
    }
    return {-1, extent - local};
  }
  return {local, extent - local};
}

}  // namespace

void ForEachGlobalStretch(const Parameter& parameter, int64_t begin, int64_t count,
                          const std::function<void(int64_t, int64_t, int64_t)>& visit) {
  const Placement& placement = parameter.placement;
  if (placement.cuts.empty()) {
    if (count > 0) visit(begin, begin, count);
    return;
  }
  // From the innermost dimension that is cut on, elements are taken in blocks of `inner`.
  const Shape& shape = parameter.shape;
  const int last = placement.cuts.back().dim;
  int64_t inner = 1;
  for (int d = last + 1; d < shape.rank(); ++d) inner *= shape[d];
  for (int64_t local = begin; local < begin + count;) {
    const int64_t block = local / inner, inside = local % inner;
    const Position position = Locate(placement, last, block % shape[last], shape[last]);
    const int64_t n = std::min(position.run * inner - inside, begin + count - local);
    int64_t rest = block / shape[last], global = position.global, stride = parameter.global_shape[last];
    bool padding = position.global < 0;
    for (int d = last - 1; d >= 0; --d) {
      const Position outer = Locate(placement, d, rest % shape[d], shape[d]);
      padding = padding || outer.global < 0;
      global += outer.global * stride;
      stride *= parameter.global_shape[d];
      rest /= shape[d];
    }
    if (!padding) visit(local, global * inner + inside, n);
    local += n;
  }
}

}  // namespace strata
