#include "kernels/op_cases/rows.h"

namespace strata::op_cases {
namespace {

constexpr RandomStream kStream{20240229, Purpose("op case rows"), 3};

// Parts of a larger matrix: 0 all of it, 1 an offset, 2 rows by index, 3 elements beyond 2³², 4 rows by index
// and an offset which leave blocks of four whole.
GlobalIndex MakeIndex(CaseTensors& tensors, int part, int64_t rows, int64_t cols) {
  GlobalIndex index;
  if (part == 1) index = {7, {}, 3, cols + 5};
  if (part == 2) index = {0, Integers(tensors, rows, [](int64_t i) { return i * 17 % 1009; }), 2, cols + 3};
  if (part == 4) index = {0, Integers(tensors, rows, [](int64_t i) { return i * 17 % 1009; }), 4, cols + 8};
  if (part == 3) index = {int64_t{1} << 31, {}, 1, cols + 2};
  return index;
}

OpCase Dropout(DType t, int64_t rows, int64_t cols, float p, int part, bool accumulate, bool in_place) {
  const std::string name = StrCat(Name(t), " ", rows, "x", cols, " p ", p, " part ", part,
                                  If(accumulate, "accumulate"), If(in_place, "in place"));
  return {"dropout", name, [=](CaseTensors& tensors) {
            DropoutArgs args;
            args.y = tensors.Accumulated("y", t, {rows, cols}, {.floor = 1}, accumulate || in_place);
            args.x = in_place ? args.y : tensors.Random(t, {rows, cols});
            args.p = p;
            args.random = kStream;
            args.index = MakeIndex(tensors, part, rows, cols);
            args.accumulate = accumulate;
            return Bind(&KernelTable::dropout, args);
          }};
}

OpCase Jitter(DType x, DType y, int64_t rows, int64_t cols, int part, bool accumulate) {
  const std::string name =
      StrCat(Name(x), "->", Name(y), " ", rows, "x", cols, " part ", part, If(accumulate, "accumulate"));
  return {"jitter", name, [=](CaseTensors& tensors) {
            JitterArgs args;
            args.x = tensors.Random(x, {rows, cols});
            args.y = tensors.Accumulated("y", y, {rows, cols}, {.terms = 3, .floor = 1}, accumulate);
            args.amplitude = 0.01f;
            args.random = kStream;
            args.index = MakeIndex(tensors, part, rows, cols);
            args.accumulate = accumulate;
            return Bind(&KernelTable::jitter, args);
          }};
}

OpCase RandomNormal(DType t, int64_t rows, int64_t cols, int part) {
  return {"random_normal", StrCat(Name(t), " ", rows, "x", cols, " part ", part), [=](CaseTensors& tensors) {
            RandomNormalArgs args;
            args.out = tensors.Result("out", t, {rows, cols}, {.floor = 1, .approximation = 8});
            args.random = kStream;
            args.index = MakeIndex(tensors, part, rows, cols);
            args.mean = 0.25f;
            args.std = 0.5f;
            return Bind(&KernelTable::random_normal, args);
          }};
}

}  // namespace

void AddRandom(std::vector<OpCase>& cases) {
  constexpr int64_t kShapes[][2] = {{0, 4}, {1, 1}, {3, 7}, {5, 64}, {41, 1777}};
  for (DType t : kTypes) {
    for (const auto& [rows, cols] : kShapes) {
      for (int part = 0; part < 5; ++part) {
        cases.push_back(Dropout(t, rows, cols, 0.1f, part, false, false));
        cases.push_back(Dropout(t, rows, cols, 0.5f, part, true, false));
        cases.push_back(RandomNormal(t, rows, cols, part));
        cases.push_back(Jitter(t, kF32, rows, cols, part, false));
        cases.push_back(Jitter(kF32, t, rows, cols, part, true));
      }
      cases.push_back(Dropout(t, rows, cols, 0.3f, 1, false, true));
      cases.push_back(Dropout(t, rows, cols, 0.0f, 1, false, false));
      cases.push_back(Dropout(t, rows, cols, 1.0f, 1, false, false));
    }
    for (DType y : {kBF16, kF16}) {
      cases.push_back(Jitter(t, y, 3, 7, 1, false));
      cases.push_back(Jitter(t, y, 5, 64, 4, true));
    }
  }
}

}  // namespace strata::op_cases
