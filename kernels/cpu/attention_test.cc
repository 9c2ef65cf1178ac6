// Attention against PyTorch's numbers in double, plain double loops, central differences, and its contract at
// the edges: empty rows, NaN, memory.
#include <array>

#include "kernels/cpu/kernel_testing.h"
#include "tests/golden.h"

namespace strata {
namespace {

using testing::CheckClose;
using testing::Golden;
using testing::OnEveryCpu;
using testing::TestTensor;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Case {
  int64_t batch, q_len, kv_len, num_heads, num_kv_heads, head_dim;
  bool causal = true;
  int64_t q_offset = 0;
  bool key_mask = false, segments = false;
};

// [batch, len, heads, dim] in double.
struct Dense {
  int64_t len = 0, heads = 0, dim = 0;
  std::vector<double> x;

  Dense(int64_t batch, int64_t len, int64_t heads, int64_t dim)
      : len(len), heads(heads), dim(dim), x(static_cast<size_t>(batch * len * heads * dim)) {}
  double& operator()(int64_t b, int64_t t, int64_t h, int64_t d) {
    return x[static_cast<size_t>(((b * len + t) * heads + h) * dim + d)];
  }
  double operator()(int64_t b, int64_t t, int64_t h, int64_t d) const {
    return const_cast<Dense&>(*this)(b, t, h, d);
  }
};

// Heads as columns [column, column + heads · dim) of a matrix of `len` rows for each sequence.
struct Heads {
  TestTensor* matrix;
  int64_t batch, len, width, column, heads, dim;

  HeadsView view() const {
    const TensorView all = matrix->view();
    return {static_cast<char*>(all.data) + static_cast<size_t>(column) * SizeOf(all.dtype), all.dtype,
            len * width, width};
  }
  template <typename Body>  // body(index in matrix, b, t, h, d)
  void ForEach(const Body& body) const {
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t t = 0; t < len; ++t) {
        for (int64_t i = 0; i < heads * dim; ++i)
          body((b * len + t) * width + column + i, b, t, i / dim, i % dim);
      }
    }
  }
  void Set(const Dense& from) const {
    ForEach(
        [&](int64_t at, int64_t b, int64_t t, int64_t h, int64_t d) { matrix->Set(at, from(b, t, h, d)); });
  }
  Dense Get() const {
    Dense to(batch, len, heads, dim);
    ForEach([&](int64_t at, int64_t b, int64_t t, int64_t h, int64_t d) { to(b, t, h, d) = (*matrix)[at]; });
    return to;
  }
};

// q, k and v, or their gradients: columns of one matrix where the lengths are equal, with columns between
// them that belong to somebody else; else two matrices.
struct PackedHeads {
  TestTensor queries, keys;
  Heads q, k, v;

  PackedHeads(const Case& c, DType dtype) {
    const int64_t dim = c.head_dim, wide = c.num_heads * dim, narrow = c.num_kv_heads * dim;
    const bool one = c.q_len == c.kv_len;
    const int64_t k_column = one ? wide + 1 : 0, key_width = k_column + 2 * narrow + 2;
    const int64_t query_width = one ? key_width : wide + 1;
    queries = TestTensor(dtype, {c.batch * c.q_len, query_width});
    if (!one) keys = TestTensor(dtype, {c.batch * c.kv_len, key_width});
    TestTensor* key_matrix = one ? &queries : &keys;
    q = {&queries, c.batch, c.q_len, query_width, 0, c.num_heads, dim};
    k = {key_matrix, c.batch, c.kv_len, key_width, k_column, c.num_kv_heads, dim};
    v = {key_matrix, c.batch, c.kv_len, key_width, k_column + narrow + 1, c.num_kv_heads, dim};
  }
  PackedHeads(const PackedHeads&) = delete;

  int64_t CountNaN() const {
    int64_t n = 0;
    for (const TestTensor* matrix : {&queries, &keys}) {
      for (double x : matrix->values()) n += std::isnan(x) ? 1 : 0;
    }
    return n;
  }
};

// One attention: its case, inputs and masks, and the answers by plain loops over every query and key.
struct Problem {
  Case c;
  AttentionShape shape;
  std::vector<uint8_t> key_mask;
  std::vector<int32_t> segment_ids;
  Dense q, k, v, dout;      // inputs
  Dense out, dq, dk, dv;    // answers
  std::vector<double> lse;  // [batch, heads, q_len]

  explicit Problem(const Case& c)
      : c(c),
        q(c.batch, c.q_len, c.num_heads, c.head_dim),
        k(c.batch, c.kv_len, c.num_kv_heads, c.head_dim),
        v(k),
        dout(q),
        out(q),
        dq(q),
        dk(k),
        dv(k),
        lse(static_cast<size_t>(c.batch * c.num_heads * c.q_len)) {
    shape.batch = c.batch, shape.q_len = c.q_len, shape.kv_len = c.kv_len;
    shape.num_heads = c.num_heads, shape.num_kv_heads = c.num_kv_heads, shape.head_dim = c.head_dim;
    shape.causal = c.causal, shape.q_offset = c.q_offset;
    shape.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(c.head_dim)));
  }
  Problem(const Problem&) = delete;

  // Random inputs that dtype can hold, and random masks; the first sequence of a key mask hides every key.
  void Randomise(DType dtype) {
    uint32_t seed = 1;
    for (Dense* x : {&q, &k, &v, &dout}) {
      x->x = TestTensor::Random(dtype, {static_cast<int64_t>(x->x.size())}, ++seed).values();
    }
    std::mt19937 random(99);
    if (c.key_mask) {
      for (int64_t i = 0; i < c.batch * c.kv_len; ++i) key_mask.push_back(i >= c.kv_len && random() % 3 != 0);
    }
    if (c.segments) {
      for (int64_t i = 0; i < c.batch * c.kv_len; ++i)
        segment_ids.push_back(static_cast<int32_t>(i / 13 % 3));
    }
    SetMasks();
  }
  void SetMasks() {
    if (!key_mask.empty()) shape.key_mask = {key_mask.data(), DType::kU8, {c.batch, c.kv_len}};
    if (!segment_ids.empty()) shape.segment_ids = {segment_ids.data(), DType::kI32, {c.batch, c.kv_len}};
  }

  bool Sees(int64_t b, int64_t i, int64_t j) const {
    if (c.causal && j > c.q_offset + i) return false;
    if (!key_mask.empty() && key_mask[b * c.kv_len + j] == 0) return false;
    return segment_ids.empty() || segment_ids[b * c.kv_len + i] == segment_ids[b * c.kv_len + j];
  }
  double Score(int64_t b, int64_t i, int64_t h, int64_t j) const {
    double dot = 0;
    for (int64_t d = 0; d < c.head_dim; ++d) dot += q(b, i, h, d) * k(b, j, KvHead(h), d);
    return dot * double{shape.scale};
  }
  int64_t KvHead(int64_t h) const { return h / (c.num_heads / c.num_kv_heads); }
  double& Lse(int64_t b, int64_t i, int64_t h) { return lse[(b * c.num_heads + h) * c.q_len + i]; }

  template <typename Body>
  void ForEachQuery(const Body& body) {
    for (int64_t b = 0; b < c.batch; ++b) {
      for (int64_t i = 0; i < c.q_len; ++i) {
        for (int64_t h = 0; h < c.num_heads; ++h) body(b, i, h);
      }
    }
  }

  void Forward() {
    std::fill(out.x.begin(), out.x.end(), 0.0);
    ForEachQuery([&](int64_t b, int64_t i, int64_t h) {
      double max = -kInfinity, sum = 0;
      for (int64_t j = 0; j < c.kv_len; ++j) {
        if (Sees(b, i, j)) max = std::max(max, Score(b, i, h, j));
      }
      for (int64_t j = 0; j < c.kv_len; ++j) {
        if (!Sees(b, i, j)) continue;
        const double p = std::exp(Score(b, i, h, j) - max);
        sum += p;
        for (int64_t d = 0; d < c.head_dim; ++d) out(b, i, h, d) += p * v(b, j, KvHead(h), d);
      }
      for (int64_t d = 0; d < c.head_dim && sum > 0; ++d) out(b, i, h, d) /= sum;
      Lse(b, i, h) = sum > 0 ? max + std::log(sum) : -kInfinity;
    });
  }

  // From `out` and `lse` as they stand.
  void Backward() {
    ForEachQuery([&](int64_t b, int64_t i, int64_t h) {
      double delta = 0;
      for (int64_t d = 0; d < c.head_dim; ++d) delta += dout(b, i, h, d) * out(b, i, h, d);
      for (int64_t j = 0; j < c.kv_len; ++j) {
        if (!Sees(b, i, j)) continue;
        const double p = std::exp(Score(b, i, h, j) - Lse(b, i, h));
        double dp = 0;
        for (int64_t d = 0; d < c.head_dim; ++d) dp += dout(b, i, h, d) * v(b, j, KvHead(h), d);
        const double ds = p * (dp - delta) * double{shape.scale};
        for (int64_t d = 0; d < c.head_dim; ++d) {
          dq(b, i, h, d) += ds * k(b, j, KvHead(h), d);
          dk(b, j, KvHead(h), d) += ds * q(b, i, h, d);
          dv(b, j, KvHead(h), d) += p * dout(b, i, h, d);
        }
      }
    });
  }

  // Loss Σ dout · out, for central differences.
  double Loss() {
    Forward();
    double loss = 0;
    for (size_t i = 0; i < out.x.size(); ++i) loss += out.x[i] * dout.x[i];
    return loss;
  }
};

void CheckDense(const Heads& got, const Dense& want, double absolute, double relative = 1e-6) {
  TestTensor flat(got.matrix->dtype(), {static_cast<int64_t>(want.x.size())});
  const Dense values = got.Get();
  for (size_t i = 0; i < values.x.size(); ++i) flat.Set(static_cast<int64_t>(i), values.x[i]);
  CheckClose(flat, want.x, absolute, relative);
}

void CheckLse(const TestTensor& got, const std::vector<double>& want) {
  for (int64_t i = 0; i < got.size(); ++i) {
    if (!(got[i] == want[i] || std::abs(got[i] - want[i]) <= 3e-6 * (1 + std::abs(want[i])))) {
      FAIL("lse " << i << " is " << got[i] << ", not " << want[i]);
    }
  }
}

// Runs both kernels on the problem's inputs in `dtype` and compares with its answers. The backward is given
// the answers' out and lse, rounded.
void CheckProblem(Problem& problem, DType dtype, double absolute, double gradient_absolute) {
  const Case& c = problem.c;
  PackedHeads inputs(c, dtype), gradients(c, dtype);
  inputs.q.Set(problem.q), inputs.k.Set(problem.k), inputs.v.Set(problem.v);
  const auto output_like = [&](TestTensor& matrix) {
    const int64_t width = c.num_heads * c.head_dim + 1;
    matrix = TestTensor(dtype, {c.batch * c.q_len, width});
    return Heads{&matrix, c.batch, c.q_len, width, 0, c.num_heads, c.head_dim};
  };
  TestTensor matrices[3];
  const Heads out = output_like(matrices[0]), given_out = output_like(matrices[1]),
              dout = output_like(matrices[2]);
  TestTensor lse(DType::kF32, {c.batch, c.num_heads, c.q_len}), given_lse = lse;
  problem.Forward();
  given_out.Set(problem.out);
  dout.Set(problem.dout);
  for (int64_t i = 0; i < lse.size(); ++i) given_lse.Set(i, problem.lse[i]);
  const Dense exact_out = problem.out;
  const std::vector<double> exact_lse = problem.lse;
  problem.out = given_out.Get();
  problem.lse = given_lse.values();
  problem.Backward();

  const int64_t foreign =
      gradients.CountNaN() - static_cast<int64_t>(problem.dq.x.size() + 2 * problem.dk.x.size());
  OnEveryCpu(
      {&matrices[0], &lse, &gradients.queries, &gradients.keys},
      [&](const KernelTable& kernels, const KernelContext& context) {
        kernels.attention_forward(context, {problem.shape, inputs.q.view(), inputs.k.view(), inputs.v.view(),
                                            out.view(), lse.view()});
        kernels.attention_backward(context, {problem.shape, inputs.q.view(), inputs.k.view(), inputs.v.view(),
                                             given_out.view(), dout.view(), given_lse.view(),
                                             gradients.q.view(), gradients.k.view(), gradients.v.view()});
      },
      [&] {
        INFO("out");
        CheckDense(out, exact_out, absolute);
        CheckLse(lse, exact_lse);
        INFO("gradients");
        CheckDense(gradients.q, problem.dq, gradient_absolute);
        CheckDense(gradients.k, problem.dk, gradient_absolute);
        CheckDense(gradients.v, problem.dv, gradient_absolute);
        CHECK(gradients.CountNaN() == foreign);  // columns of others are as they were
      });
}

TEST_CASE("attention agrees with PyTorch in double", "[attention]") {
  const Golden golden = Golden::Open("attention.safetensors");
  for (const std::string& key : golden.names()) {
    if (!key.ends_with(".q")) continue;
    const std::string name = key.substr(0, key.size() - 1);
    INFO(name);
    const std::vector<int64_t> q_shape = golden.shape(key), k_shape = golden.shape(name + "k");
    Problem problem(Case{q_shape[0], q_shape[2], q_shape[2], q_shape[1], k_shape[1], q_shape[3]});
    const auto read = [&](const std::string& tensor, Dense& to) {
      const std::vector<double> values = golden.f64(name + tensor).values;  // [batch, heads, len, dim]
      for (size_t i = 0; i < values.size(); ++i) {
        const auto at = static_cast<int64_t>(i);
        to(at / (to.heads * to.len * to.dim), at / to.dim % to.len, at / (to.len * to.dim) % to.heads,
           at % to.dim) = values[i];
      }
    };
    read("q", problem.q), read("k", problem.k), read("v", problem.v), read("do", problem.dout);
    Dense out(problem.out), dq(problem.dq), dk(problem.dk), dv(problem.dv);
    read("o", out), read("dq", dq), read("dk", dk), read("dv", dv);
    std::vector<double> lse = golden.f64(name + "lse").values;
    if (golden.Has(name + "padding_mask")) {
      for (int64_t real : golden.i64(name + "padding_mask").values) problem.key_mask.push_back(real != 0);
    }
    if (golden.Has(name + "segment_ids")) problem.segment_ids = golden.i32(name + "segment_ids").values;
    problem.SetMasks();

    // The plain loops first, which then judge the kernels.
    problem.Forward();
    problem.Backward();
    const auto real = [&](int64_t b, int64_t i) {
      return problem.key_mask.empty() || problem.key_mask[b * problem.c.kv_len + i] != 0;
    };
    double worst = 0;
    problem.ForEachQuery([&](int64_t b, int64_t i, int64_t h) {
      if (!real(b, i)) return;
      worst = std::max(worst, std::abs(problem.Lse(b, i, h) - lse[(b * out.heads + h) * out.len + i]));
      for (int64_t d = 0; d < out.dim; ++d)
        worst = std::max(worst, std::abs(problem.out(b, i, h, d) - out(b, i, h, d)));
    });
    const std::array<std::pair<Dense*, Dense*>, 3> pairs = {
        {{&problem.dq, &dq}, {&problem.dk, &dk}, {&problem.dv, &dv}}};
    for (const auto& [mine, theirs] : pairs) {
      for (size_t i = 0; i < mine->x.size(); ++i)
        worst = std::max(worst, std::abs(mine->x[i] - theirs->x[i]));
      std::fill(mine->x.begin(), mine->x.end(), 0.0);
    }
    CHECK(worst < 2e-7);  // `scale` is rounded to fp32
    CheckProblem(problem, DType::kF32, 5e-6, 5e-6);
  }
}

TEST_CASE("attention agrees with plain loops on any shape and mask", "[attention]") {
  const Case cases[] = {
      {1, 1, 1, 1, 1, 1},
      {2, 17, 17, 3, 3, 5},
      {1, 65, 65, 2, 1, 16},
      {1, 130, 130, 4, 2, 80},
      {1, 40, 40, 2, 2, 256},
      {1, 600, 600, 1, 1, 8},                 // several tasks, in queries and in keys
      {1, 300, 300, 4, 1, 7},                 // the same, of rows that are four heads
      {1, 1, 777, 6, 2, 64, true, 776},       // generation from a cache
      {2, 5, 70, 2, 1, 24, true, 30},         // a prompt's continuation
      {2, 9, 70, 2, 1, 24, true, -3},         // the first three see nothing
      {2, 19, 90, 2, 2, 40, false, 0, true},  // one sequence without any key
      {2, 19, 19, 2, 2, 33, false},
      {2, 70, 70, 2, 1, 24, true, 0, true, true},
      {1, 150, 150, 1, 1, 16, false, 0, false, true},
      {2, 0, 3, 2, 1, 4},
      {2, 3, 0, 2, 1, 4},
  };
  for (const Case& c : cases) {
    for (DType dtype : testing::kFloatTypes) {
      if (dtype != DType::kF32 && c.q_len > 100) continue;
      INFO(Name(dtype) << " batch " << c.batch << ", q_len " << c.q_len << ", kv_len " << c.kv_len
                       << ", heads " << c.num_heads << "/" << c.num_kv_heads << ", head_dim " << c.head_dim);
      Problem problem(c);
      problem.Randomise(dtype);
      CheckProblem(problem, dtype, 3e-6, 2e-5);
    }
  }
}

TEST_CASE("attention's gradients are the slopes of its output", "[attention]") {
  Problem problem(Case{2, 5, 5, 2, 1, 3, true, 0, true, true});
  problem.Randomise(DType::kF32);
  problem.key_mask.assign({1, 0, 1, 1, 1, 0, 1, 1, 1, 1});
  const std::array<std::pair<Dense*, Dense*>, 3> pairs = {
      {{&problem.q, &problem.dq}, {&problem.k, &problem.dk}, {&problem.v, &problem.dv}}};
  std::vector<std::vector<double>> slopes;
  for (const auto& [x, dx] : pairs) {
    slopes.emplace_back();
    for (double& element : x->x) {
      const double at = element;
      slopes.back().push_back(testing::Slope(
          [&](double value) {
            element = value;
            return problem.Loss();
          },
          at));
      element = at;
    }
  }
  CheckProblem(problem, DType::kF32, 3e-6, 1e-5);  // kernels equal the loops, and these the slopes:
  for (size_t n = 0; n < pairs.size(); ++n) {
    for (size_t i = 0; i < slopes[n].size(); ++i) {
      CHECK(pairs[n].second->x[i] == Approx(slopes[n][i]).margin(1e-6));
    }
  }
}

TEST_CASE("attention leaves a query that sees no key at zero, and its lse at -inf", "[attention]") {
  Problem problem(Case{1, 3, 3, 1, 1, 4, true, -2});
  problem.Randomise(DType::kF32);
  problem.Forward();
  CHECK(problem.lse == std::vector<double>({-kInfinity, -kInfinity, problem.Score(0, 2, 0, 0)}));
  CheckProblem(problem, DType::kF32, 3e-6, 1e-5);
}

TEST_CASE("attention carries a NaN to the outputs that depend on it and no other", "[attention]") {
  constexpr int64_t kLen = 40, kDim = 8;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  TestTensor q = TestTensor::Random(DType::kF32, {kLen, kDim}, 1),
             k = TestTensor::Random(DType::kF32, {kLen, kDim}, 2);
  TestTensor v = TestTensor::Random(DType::kF32, {kLen, kDim}, 3), out(DType::kF32, {kLen, kDim});
  q.Set(7 * kDim + 3, nan);
  k.Set(30 * kDim, nan);
  const auto heads = [](TestTensor& x) { return HeadsView{x.view().data, DType::kF32, kLen * kDim, kDim}; };
  AttentionShape shape;
  shape.batch = shape.num_heads = shape.num_kv_heads = 1;
  shape.q_len = shape.kv_len = kLen;
  shape.head_dim = kDim;
  OnEveryCpu(
      {&out},
      [&](const KernelTable& kernels, const KernelContext& context) {
        kernels.attention_forward(context, {shape, heads(q), heads(k), heads(v), heads(out), {}});
      },
      [&] {
        for (int64_t i = 0; i < kLen; ++i) {
          for (int64_t d = 0; d < kDim; ++d) CHECK(std::isnan(out[i * kDim + d]) == (i == 7 || i >= 30));
        }
      });
}

TEST_CASE("attention's scratch memory is linear in the length", "[attention]") {
  const auto peak = [](int64_t len) {
    constexpr int64_t kHeads = 4, kDim = 4, kWidth = kHeads * kDim;
    const auto device = NewCpuDevice(2);
    const KernelContext context{&device->pool(), device->compute_stream(), &device->allocator()};
    AttentionShape shape;
    shape.batch = 1, shape.q_len = shape.kv_len = len;
    shape.num_heads = shape.num_kv_heads = kHeads, shape.head_dim = kDim;
    TestTensor x = TestTensor::Random(DType::kF32, {len, kWidth}, 1), lse(DType::kF32, {kHeads, len});
    TestTensor out(DType::kF32, {len, kWidth}), dq = out, dk = out, dv = out;
    const auto heads = [&](TestTensor& t) {
      return HeadsView{t.view().data, DType::kF32, len * kWidth, kWidth};
    };
    CpuKernels().attention_forward(context, {shape, heads(x), heads(x), heads(x), heads(out), lse.view()});
    CpuKernels().attention_backward(context, {shape, heads(x), heads(x), heads(x), heads(out), heads(x),
                                              lse.view(), heads(dq), heads(dk), heads(dv)});
    return static_cast<double>(device->allocator().stats().total_peak);
  };
  CHECK(peak(2048) < 2.2 * peak(1024));
}

}  // namespace
}  // namespace strata
