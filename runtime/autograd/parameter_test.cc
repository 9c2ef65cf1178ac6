#include "runtime/autograd/parameter.h"

#include <catch2/catch.hpp>

namespace strata {
namespace {

// The global index of every local element, −1 for padding, by the definition of a cut.
std::vector<int64_t> Plainly(const Parameter& p) {
  std::vector<int64_t> result;
  const int rank = p.shape.rank();
  for (int64_t local = 0; local < p.shape.num_elements(); ++local) {
    std::vector<int64_t> index(static_cast<size_t>(rank));
    int64_t rest = local;
    for (int d = rank - 1; d >= 0; --d) {
      index[static_cast<size_t>(d)] = rest % p.shape[d];
      rest /= p.shape[d];
    }
    int64_t global = 0;
    bool padding = false;
    for (int d = 0; d < rank; ++d) {
      int64_t at = index[static_cast<size_t>(d)];
      for (const auto& cut : p.placement.cuts) {
        if (cut.dim != d) continue;
        std::vector<int64_t> positions;
        for (const auto& s : cut.segments) {
          for (int64_t i = 0; i < s.count; ++i) positions.push_back(s.begin + i);
        }
        padding = padding || at >= std::ssize(positions);
        at = padding ? 0 : positions[static_cast<size_t>(at)];
      }
      global = global * p.global_shape[d] + at;
    }
    result.push_back(padding ? -1 : global);
  }
  return result;
}

TEST_CASE("stretches of a cut parameter are those of the definition") {
  struct Case {
    Shape local, global;
    std::vector<Placement::Cut> cuts;
  };
  const Case cases[] = {
      {{7, 3}, {7, 3}, {}},
      {{4, 3}, {12, 3}, {{0, {{4, 4}}}}},
      {{5, 3}, {12, 3}, {{0, {{10, 2}}}}},                     // padding rows
      {{6, 3}, {18, 3}, {{0, {{2, 2}, {8, 2}, {14, 2}}}}},     // q | k | v
      {{4, 5}, {4, 10}, {{1, {{5, 5}}}}},                      // row-parallel
      {{2, 4, 3}, {8, 4, 6}, {{0, {{4, 2}}}, {2, {{3, 3}}}}},  // an expert's, row-parallel
      {{2, 4, 3}, {8, 8, 3}, {{0, {{4, 2}}}, {1, {{0, 2}, {4, 2}}}}},
      {{3, 4}, {3, 6}, {{1, {{1, 1}, {4, 2}}}}},  // padding columns
  };
  for (const Case& c : cases) {
    Parameter p;
    p.shape = c.local;
    p.global_shape = c.global;
    p.placement.cuts = c.cuts;
    const std::vector<int64_t> expected = Plainly(p);
    const int64_t n = p.shape.num_elements();
    for (int64_t begin = 0; begin <= n; ++begin) {
      for (int64_t count = 0; begin + count <= n; ++count) {
        std::vector<int64_t> found(static_cast<size_t>(n), -1);
        int64_t last = begin;
        bool ordered = true;
        ForEachGlobalStretch(p, begin, count, [&](int64_t local, int64_t global, int64_t run) {
          ordered = ordered && local >= last && run > 0 && local + run <= begin + count;
          last = local + run;
          for (int64_t i = 0; i < run; ++i) found[static_cast<size_t>(local + i)] = global + i;
        });
        std::vector<int64_t> wanted(static_cast<size_t>(n), -1);
        std::copy_n(expected.begin() + begin, count, wanted.begin() + begin);
        REQUIRE(ordered);
        REQUIRE(found == wanted);
      }
    }
  }
}

}  // namespace
}  // namespace strata
