#include <cmath>

#include "kernels/op_cases/rows.h"

namespace strata::op_cases {
namespace {

constexpr std::array<const char*, 7> kMaskNames{"",          "padding",   "holes", "no keys",
                                                "documents", "scattered", "both"};

std::string NameFor(DType t, const AttentionRow& row) {
  return StrCat(Name(t), " b", row.batch, " q", row.q_len, " k", row.kv_len, " h", row.num_heads, "/",
                row.num_kv_heads, " d", row.head_dim,
                If(row.mask != Mask::kNone, kMaskNames[static_cast<size_t>(row.mask)]),
                If(!row.causal, "bidirectional"), If(row.q_offset != 0, StrCat("offset ", row.q_offset)),
                If(!row.lse, "no lse"), If(row.spread != 1, StrCat("spread ", row.spread)));
}

Accuracy AccuracyOf(const AttentionRow& row) {
  return {.terms = static_cast<double>(row.kv_len + row.head_dim),
          .floor = row.spread,
          .approximation = 16 + 8 * row.spread * row.spread,
          .through_t = true};
}

struct Qkv {
  HeadsView q, k, v;
};

// Columns of a matrix [batch · len, width] as heads.
HeadsView HeadsOf(const TensorView& matrix, int64_t len, int64_t column = 0) {
  const size_t offset = static_cast<size_t>(column) * SizeOf(matrix.dtype);
  return {static_cast<char*>(matrix.data) + offset, matrix.dtype, len * matrix.cols(), matrix.cols()};
}

// Columns of one matrix where the lengths agree; otherwise matrices of their own, those of keys and values
// with some rows to spare, as a cache has them. `make` makes a matrix of a name and a shape.
template <typename Make>
Qkv MakeQkv(const AttentionRow& row, Make make) {
  const int64_t width = row.num_heads * row.head_dim, kv_width = row.num_kv_heads * row.head_dim;
  if (row.q_len == row.kv_len) {
    const TensorView all = make("qkv", Shape{row.batch * row.q_len, width + 2 * kv_width});
    return {HeadsOf(all, row.q_len), HeadsOf(all, row.q_len, width),
            HeadsOf(all, row.q_len, width + kv_width)};
  }
  const int64_t capacity = row.kv_len + 3;
  const TensorView q = make("q", Shape{row.batch * row.q_len, width});
  const TensorView k = make("k", Shape{row.batch * capacity, kv_width});
  const TensorView v = make("v", Shape{row.batch * capacity, kv_width});
  return {HeadsOf(q, row.q_len), HeadsOf(k, capacity), HeadsOf(v, capacity)};
}

AttentionShape MakeShape(const AttentionRow& row, CaseTensors& tensors) {
  AttentionShape shape{row.batch,
                       row.q_len,
                       row.kv_len,
                       row.num_heads,
                       row.num_kv_heads,
                       row.head_dim,
                       1 / std::sqrt(static_cast<float>(row.head_dim)),
                       row.causal,
                       row.q_offset,
                       {},
                       {}};
  const Mask mask = row.mask;
  if (mask == Mask::kPadding || mask == Mask::kHoles || mask == Mask::kNoKeys || mask == Mask::kBoth) {
    std::vector<double> real;
    for (int64_t b = 0; b < row.batch; ++b) {
      for (int64_t j = 0; j < row.kv_len; ++j) {
        const bool hole = j < 2 || j % 3 == b % 3;  // the first queries see no key
        const bool padded = j >= row.kv_len - 3 * (b + 1);
        real.push_back(mask == Mask::kNoKeys ? b != 0 : mask == Mask::kHoles ? !hole : !padded);
      }
    }
    shape.key_mask = tensors.Given(DType::kU8, {row.batch, row.kv_len}, real);
  }
  if (mask == Mask::kDocuments || mask == Mask::kScattered || mask == Mask::kBoth) {
    std::vector<double> ids;
    for (int64_t b = 0; b < row.batch; ++b) {
      for (int64_t i = 0; i < row.q_len; ++i) {
        ids.push_back(static_cast<double>(mask == Mask::kScattered ? i % 3 : i * (b + 2) / 7));
      }
    }
    shape.segment_ids = tensors.Given(DType::kI32, {row.batch, row.q_len}, ids);
  }
  return shape;
}

// A forward pass in double on the host, which gives a backward case its out and lse.
struct HostAttention {
  std::vector<double> out, lse;

  HostAttention(const AttentionRow& row, const CaseTensors& tensors, const AttentionShape& device_shape,
                const std::vector<TensorView>& matrices)
      : out(row.batch * row.q_len * row.num_heads * row.head_dim),
        lse(row.batch * row.num_heads * row.q_len) {
    AttentionForwardArgs args;
    args.shape = device_shape;
    std::vector<uint8_t> mask;
    std::vector<int32_t> segments;
    if (args.shape.key_mask.defined()) {
      for (double m : tensors.Values(args.shape.key_mask)) mask.push_back(m != 0);
      args.shape.key_mask.data = mask.data();
    }
    if (args.shape.segment_ids.defined()) {
      for (double s : tensors.Values(args.shape.segment_ids)) segments.push_back(static_cast<int32_t>(s));
      args.shape.segment_ids.data = segments.data();
    }
    std::vector<std::vector<double>> host;
    for (const TensorView& matrix : matrices) host.push_back(tensors.Values(matrix));
    size_t next = 0;
    const Qkv qkv = MakeQkv(row, [&](const char*, const Shape& shape) {
      return TensorView(host[next++].data(), DType::kF64, shape);
    });
    args.q = qkv.q, args.k = qkv.k, args.v = qkv.v;
    const int64_t width = row.num_heads * row.head_dim;
    args.out = {out.data(), DType::kF64, row.q_len * width, width};
    args.lse = TensorView(lse.data(), DType::kF64, {row.batch, row.num_heads, row.q_len});
    ReferenceKernels().attention_forward({}, args);
  }
};

struct RotaryRow {
  int64_t batch, len, num_heads, head_dim, pairs;
  bool positions = false;
  int64_t position_offset = 0;
  bool inverse = false;
  int64_t others = 3;  // columns of x that belong to someone else
};

OpCase Rotary(DType t, const RotaryRow& row) {
  const std::string name = StrCat(
      Name(t), " b", row.batch, " t", row.len, " h", row.num_heads, " d", row.head_dim, " pairs ", row.pairs,
      If(row.positions, "positions"), If(row.position_offset != 0, StrCat("offset ", row.position_offset)),
      If(row.inverse, "inverse"), If(row.others != 3, StrCat("of ", row.others, " more")));
  return {"rotary", name, [=](CaseTensors& tensors) {
            const auto position = [](int64_t i) { return i * 37 % 101; };
            const int64_t farthest = row.positions ? 100 : row.position_offset + row.len;
            // The angle itself is a product in fp32.
            const Accuracy accuracy{.approximation = 16 + 2 * static_cast<double>(farthest)};
            const int64_t width = row.num_heads * row.head_dim + row.others;
            const TensorView x = tensors.Updated("x", t, {row.batch * row.len, width}, accuracy);
            std::vector<double> inv_freq;
            for (int64_t i = 0; i < row.pairs; ++i) {
              inv_freq.push_back(std::pow(10000.0, -static_cast<double>(i) / static_cast<double>(row.pairs)));
            }
            RotaryArgs args{HeadsOf(x, row.len), row.batch,  row.len, row.num_heads, row.head_dim, {}, {},
                            row.position_offset, row.inverse};
            args.inv_freq = tensors.Given(kF32, {row.pairs}, inv_freq);
            if (row.positions) args.positions = Integers(tensors, row.batch * row.len, position);
            return Bind(&KernelTable::rotary, args);
          }};
}

}  // namespace

OpCase AttentionForward(DType t, const AttentionRow& row) {
  return {"attention_forward", NameFor(t, row), [=](CaseTensors& tensors) {
            AttentionForwardArgs args;
            args.shape = MakeShape(row, tensors);
            const Qkv qkv = MakeQkv(
                row, [&](const char*, const Shape& shape) { return tensors.Random(t, shape, row.spread); });
            args.q = qkv.q, args.k = qkv.k, args.v = qkv.v;
            const int64_t width = row.num_heads * row.head_dim;
            args.out =
                HeadsOf(tensors.Result("out", t, {row.batch * row.q_len, width}, AccuracyOf(row)), row.q_len);
            if (row.lse) {
              args.lse = tensors.Result("lse", kF32, {row.batch, row.num_heads, row.q_len}, AccuracyOf(row));
            }
            return Bind(&KernelTable::attention_forward, args);
          }};
}

OpCase AttentionBackward(DType t, const AttentionRow& row) {
  return {"attention_backward", NameFor(t, row), [=](CaseTensors& tensors) {
            AttentionBackwardArgs args;
            args.shape = MakeShape(row, tensors);
            std::vector<TensorView> matrices;
            const Qkv qkv = MakeQkv(row, [&](const char*, const Shape& shape) {
              matrices.push_back(tensors.Random(t, shape, row.spread));
              return matrices.back();
            });
            args.q = qkv.q, args.k = qkv.k, args.v = qkv.v;
            const HostAttention forward(row, tensors, args.shape, matrices);
            const Shape out_shape{row.batch * row.q_len, row.num_heads * row.head_dim};
            args.out = HeadsOf(tensors.Given(t, out_shape, forward.out), row.q_len);
            args.dout = HeadsOf(tensors.Random(t, out_shape), row.q_len);
            args.lse = tensors.Given(kF32, {row.batch, row.num_heads, row.q_len}, forward.lse);
            const Qkv grads = MakeQkv(row, [&](const char* name, const Shape& shape) {
              return tensors.Result(StrCat("d", name), t, shape, AccuracyOf(row));
            });
            args.dq = grads.q, args.dk = grads.k, args.dv = grads.v;
            return Bind(&KernelTable::attention_backward, args);
          }};
}

void AddAttention(std::vector<OpCase>& cases) {
  const AttentionRow rows[] = {
      {1, 1, 1, 1, 1, 1},
      {2, 7, 7, 3, 3, 5},
      {1, 17, 17, 2, 1, 8},
      {2, 33, 33, 4, 2, 16},
      {1, 48, 48, 1, 1, 7},
      {1, 65, 65, 2, 2, 64},
      {1, 130, 130, 2, 1, 32},
      {1, 70, 70, 1, 1, 80},
      {1, 33, 33, 2, 1, 96},
      {1, 40, 40, 1, 1, 128},
      {1, 19, 19, 1, 1, 256},
      {0, 5, 5, 2, 2, 8},
      {2, 0, 4, 2, 2, 8},
      {2, 4, 0, 2, 2, 8},
      {2, 0, 0, 2, 2, 8},
      {3, 21, 21, 2, 2, 16, Mask::kPadding},
      {2, 21, 21, 2, 1, 16, Mask::kHoles},
      {2, 21, 21, 2, 2, 16, Mask::kNoKeys},
      {3, 37, 37, 2, 1, 16, Mask::kDocuments},
      {2, 23, 23, 2, 2, 16, Mask::kScattered},
      {2, 75, 75, 2, 2, 24, Mask::kBoth},
      {2, 35, 35, 2, 2, 16, Mask::kPadding, false},
      {2, 67, 67, 2, 2, 64, Mask::kDocuments, false},
      {2, 75, 75, 2, 2, 24, Mask::kBoth, false},
      {2, 70, 70, 2, 2, 136, Mask::kPadding, false},
      {2, 9, 21, 4, 2, 8, Mask::kNone, false},
      {2, 70, 133, 2, 1, 16, Mask::kPadding, false},
      {3, 1, 40, 4, 1, 64, Mask::kNone, true, 39},
      {2, 1, 300, 2, 2, 32, Mask::kNone, true, 250},
      {2, 5, 12, 2, 1, 16, Mask::kNone, true, 7},
      {2, 9, 12, 2, 1, 16, Mask::kHoles, true, 0},
      {2, 12, 9, 2, 1, 16, Mask::kNone, true, 0},
      {1, 33, 33, 2, 2, 16, Mask::kNone, true, 0, true, 4},
      {1, 33, 33, 2, 2, 16, Mask::kNone, false, 0, false},
  };
  for (DType t : kTypes) {
    for (const AttentionRow& row : rows) cases.push_back(AttentionForward(t, row));
  }
  for (DType t : kTypes) {
    for (const AttentionRow& row : rows) {
      if (row.lse) cases.push_back(AttentionBackward(t, row));
    }
  }
  for (DType t : kTypes) {
    for (const RotaryRow& row : {RotaryRow{1, 1, 1, 2, 1},
                                 {2, 7, 3, 16, 8},
                                 {2, 5, 2, 20, 3},
                                 {0, 4, 2, 8, 4},
                                 {3, 0, 2, 8, 4},
                                 {1, 40, 2, 64, 32},
                                 {2, 9, 2, 10, 5, true},
                                 {2, 3, 2, 32, 16, false, 150},
                                 {1, 2, 1, 8, 4, false, 5000},
                                 {2, 7, 9, 40, 16, true, 0, false, 8}}) {
      cases.push_back(Rotary(t, row));
      RotaryRow inverse = row;
      inverse.inverse = true;
      cases.push_back(Rotary(t, inverse));
    }
  }
}

}  // namespace strata::op_cases
