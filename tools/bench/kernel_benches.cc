// bench gemm, attention, adamw: single kernels against the ceilings that bound them.
#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <cmath>

#include "kernels/cpu/peak.h"
#include "tools/bench/bench.h"

namespace strata {
namespace {

struct KernelBench {
  explicit KernelBench(int threads) : device(NewCpuDevice(threads)), run(*device, CpuKernels()) {}

  // Memory with values in it, so that no product meets denormals or NaN.
  TensorView Make(Shape shape, DType dtype, float std = 1.0f) {
    buffers.push_back(device->allocator().Allocate(static_cast<size_t>(shape.num_elements()) * SizeOf(dtype),
                                                   MemoryTag::kBuffers));
    const TensorView view(buffers.back().data(), dtype, shape);
    RandomNormalArgs args;
    args.out = view.Reshaped({view.rows(), view.cols()});
    args.random = {1, static_cast<uint32_t>(buffers.size()), 0};
    args.std = std;
    run.random_normal(args);
    return view;
  }
  void Free() { buffers.clear(); }

  std::unique_ptr<Device> device;
  Executor run;
  std::vector<Buffer> buffers;
};

struct Product {
  const char* name;
  int64_t m, n, k;
  bool trans_a, trans_b, accumulate;
};

}  // namespace

void BenchGemm(BenchSetup& setup) {
  setup.arguments.Finish();
  KernelBench bench(setup.threads);
  ThreadPool& pool = bench.device->pool();
  BenchReport report("gemm", setup.threads, bench.device->description(),
                     "fp32 FMA rate, measured between the rounds of each case");
  constexpr int64_t kRows = 1024;
  std::vector<Product> products;
  struct Layer {
    const char *forward, *dx, *dw;
    int64_t in, out;
  };
  constexpr Layer kLayers[] = {{"qkv forward", "qkv dx", "qkv dw", 768, 2304},
                               {"attention out forward", "attention out dx", "attention out dw", 768, 768},
                               {"mlp in forward", "mlp in dx", "mlp in dw", 768, 3072},
                               {"mlp out forward", "mlp out dx", "mlp out dw", 3072, 768},
                               {"head forward", "head dx", "head dw", 768, 50304}};
  for (const Layer& layer : kLayers) {
    const int64_t rows = layer.out > 50000 ? 512 : kRows;  // the head takes its rows in chunks
    products.push_back({layer.forward, rows, layer.out, layer.in, false, true, false});
    products.push_back({layer.dx, rows, layer.in, layer.out, false, false, false});
    products.push_back({layer.dw, layer.out, layer.in, rows, true, false, true});
  }
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    double flops = 0, seconds = 0, ceiling_seconds = 0;
    for (const Product& p : products) {
      MatmulArgs args;
      args.a = bench.Make(p.trans_a ? Shape{p.k, p.m} : Shape{p.m, p.k}, dtype);
      args.b = bench.Make(p.trans_b ? Shape{p.n, p.k} : Shape{p.k, p.n}, dtype);
      args.c = bench.Make({p.m, p.n}, p.accumulate ? DType::kF32 : dtype);
      args.trans_a = p.trans_a;
      args.trans_b = p.trans_b;
      args.accumulate = p.accumulate;
      double peak = 0;
      const double best = BestSeconds(
          7, [&] { bench.run.matmul(args); }, [&] { peak = std::max(peak, MeasureFmaPeak(pool, 0.01)); });
      const double work =
          2.0 * static_cast<double>(p.m) * static_cast<double>(p.n) * static_cast<double>(p.k);
      report.Add({fmt::format("{} {} [{}x{}x{}]", Name(dtype), p.name, p.m, p.n, p.k), work / best / 1e9,
                  "GFLOP/s", peak, ""});
      flops += work;
      seconds += best;
      ceiling_seconds += work / (peak * 1e9);
      bench.Free();
    }
    report.Add({fmt::format("{} all", Name(dtype)), flops / seconds / 1e9, "GFLOP/s",
                flops / ceiling_seconds / 1e9, ""});
  }
  report.WriteJson(setup.json);
}

void BenchAttention(BenchSetup& setup) {
  setup.arguments.Finish();
  KernelBench bench(setup.threads);
  ThreadPool& pool = bench.device->pool();
  BenchReport report("attention", setup.threads, bench.device->description(),
                     "fp32 FMA rate; only what a causal mask leaves is counted");
  constexpr int64_t kBatch = 4, kHeads = 12, kDim = 64, kWidth = kHeads * kDim;
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    for (int64_t t : {256, 512, 1024, 2048}) {
      const TensorView qkv = bench.Make({kBatch * t, 3 * kWidth}, dtype);
      const TensorView out = bench.Make({kBatch * t, kWidth}, dtype),
                       dout = bench.Make({kBatch * t, kWidth}, dtype);
      const TensorView dqkv = bench.Make({kBatch * t, 3 * kWidth}, dtype);
      const TensorView lse = bench.Make({kBatch, kHeads, t}, DType::kF32);
      auto heads = [&](const TensorView& view, int64_t column) {
        return HeadsView{static_cast<char*>(view.data) + column * static_cast<int64_t>(SizeOf(dtype)), dtype,
                         t * view.cols(), view.cols()};
      };
      AttentionShape shape;
      shape.batch = kBatch;
      shape.q_len = shape.kv_len = t;
      shape.num_heads = shape.num_kv_heads = kHeads;
      shape.head_dim = kDim;
      shape.scale = 1.0f / std::sqrt(static_cast<float>(kDim));
      AttentionForwardArgs forward{
          shape, heads(qkv, 0), heads(qkv, kWidth), heads(qkv, 2 * kWidth), heads(out, 0), lse};
      AttentionBackwardArgs backward{
          shape,          heads(qkv, 0), heads(qkv, kWidth), heads(qkv, 2 * kWidth), heads(out, 0),
          heads(dout, 0), lse,           heads(dqkv, 0),     heads(dqkv, kWidth),    heads(dqkv, 2 * kWidth)};
      const double product =
          static_cast<double>(kBatch * kHeads * kDim) * static_cast<double>(t) * static_cast<double>(t + 1);
      auto measure = [&](const char* name, double products, const std::function<void()>& body) {
        double peak = 0;
        const double best = BestSeconds(7, body, [&] { peak = std::max(peak, MeasureFmaPeak(pool, 0.01)); });
        report.Add({fmt::format("{} {} T {}", Name(dtype), name, t), products * product / best / 1e9,
                    "GFLOP/s", peak, ""});
      };
      measure("forward", 2, [&] { bench.run.attention_forward(forward); });
      measure("backward", 5, [&] { bench.run.attention_backward(backward); });
      bench.Free();
    }
  }
  report.WriteJson(setup.json);
}

void BenchAdamW(BenchSetup& setup) {
  setup.arguments.Finish();
  KernelBench bench(setup.threads);
  BenchReport report(
      "adamw", setup.threads, bench.device->description(),
      "triad a = b + s*c (12 bytes an element, over arrays of the same size), measured between the rounds");
  for (int64_t n : {int64_t{1} << 22, int64_t{1} << 25}) {
    AdamWArgs args;
    args.param = bench.Make({n}, DType::kF32);
    args.grad = bench.Make({n}, DType::kF32);
    args.m = bench.Make({n}, DType::kF32);
    args.v = bench.Make({n}, DType::kF32);
    bench.run.fill({.out = args.v, .value = 1.0f});
    args.lr = 1e-4f;
    args.weight_decay = 0.1f;
    args.bias_correction1 = args.bias_correction2 = 0.5f;
    for (bool rounded : {false, true}) {
      if (rounded) args.param_out = bench.Make({n}, DType::kBF16);
      double triad = 0;
      const double best = BestSeconds(
          9, [&] { bench.run.adamw(args); },
          [&] { triad = std::max(triad, MeasureTriad(bench.device->pool(), 12 * n)); });
      const double bytes = static_cast<double>(n) * (rounded ? 30 : 28);
      report.Add(
          {fmt::format("{}{:.0f}M elements", rounded ? "with bf16 copy, " : "", static_cast<double>(n) / 1e6),
           bytes / best / 1e9, "GB/s", triad, ""});
    }
    bench.Free();
  }
  report.WriteJson(setup.json);
}

}  // namespace strata
