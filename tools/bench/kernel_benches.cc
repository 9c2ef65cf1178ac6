// bench device, gemm, attention, adamw, norm: what a device does at best, and single kernels against that.
#include <dlfcn.h>
#include <spdlog/fmt/fmt.h>

#include <cmath>

#include "kernels/cuda/cuda_properties.h"
#include "runtime/base/units.h"
#include "tools/bench/bench.h"
#include "tools/ceilings.h"
#include "tools/rank_context.h"

namespace strata {
namespace {

// The device that the settings at the end of the command line choose.
DeviceSection DeviceOf(BenchSetup& setup) {
  const RunConfig config = RunConfig::Parse("model: {preset: gpt2-124m}\ndata: {train: [none.bin]}\n",
                                            "bench", setup.arguments.Rest());
  DeviceSection section = config.device;
  if (section.threads == 0) section.threads = setup.threads;
  return section;
}

struct KernelBench {
  explicit KernelBench(BenchSetup& setup) : KernelBench(DeviceOf(setup)) {}
  explicit KernelBench(const DeviceSection& section)
      : device(OpenDevice(section, 0, static_cast<int>(section.threads))),
        run(*device, KernelsOf(*device, section)) {}

  BenchReport NewReport(const char* name, const std::string& ceiling) const {
    return BenchReport(name, device->pool().num_threads(), device->description(), ceiling);
  }

  // Memory with values in it, so that no product meets denormals or NaN.
  TensorView Make(Shape shape, DType dtype) {
    buffers.push_back(device->allocator().Allocate(static_cast<size_t>(shape.num_elements()) * SizeOf(dtype),
                                                   MemoryTag::kBuffers));
    const TensorView view(buffers.back().data(), dtype, shape);
    RandomNormalArgs args;
    args.out = view.Reshaped({view.rows(), view.cols()});
    args.random = {1, static_cast<uint32_t>(buffers.size()), 0};
    run.random_normal(args);
    return view;
  }
  void Free() { buffers.clear(); }

  struct Measured {
    double seconds, ceiling;
  };
  /// Of one call of `body`, and its ceiling, in turns.
  Measured Measure(const std::function<void()>& body, const std::function<double()>& ceiling) const {
    constexpr int kRounds = 7;
    const double together = device->type() == DeviceType::kCpu ? 0 : 5e-3;
    body();  // warms up
    std::vector<double> seconds, limits;
    for (int i = 0; i < kRounds; ++i) {
      limits.push_back(ceiling());
      seconds.push_back(SecondsOfCall(*device, together, body));
    }
    return {SecondsOfRounds(*device, seconds), RateOfRounds(*device, limits)};
  }

  /// One row: `flops` of products of `dtype`.
  Measured AddProducts(BenchReport& report, const std::string& name, DType dtype, double flops,
                       const std::function<void()>& body) {
    const Measured measured = Measure(body, [&] { return ceilings.Products(dtype); });
    const double rate = flops / measured.seconds / 1e9, theory = ceilings.TheoreticalProducts(dtype);
    report.Add({fmt::format("{} {}", Name(dtype), name), rate, "GFLOP/s", measured.ceiling,
                theory > 0 ? fmt::format("{:.1f} % of the theoretical rate", 100 * rate / theory) : ""});
    return measured;
  }
  /// One row: `bytes` read and written once, of arrays of that size together.
  void AddBytes(BenchReport& report, const std::string& name, double bytes,
                const std::function<void()>& body) {
    const Measured measured = Measure(body, [&] { return ceilings.Bandwidth(static_cast<int64_t>(bytes)); });
    report.Add({name, bytes / measured.seconds / 1e9, "GB/s", measured.ceiling, ""});
  }

  std::unique_ptr<Device> device;
  Executor run;
  Ceilings ceilings{run};
  std::vector<Buffer> buffers;
};

struct Product {
  const char* name;
  int64_t m, n, k;
  bool trans_a, trans_b, accumulate;
};

// What is known of a GPU, and of the libraries that strata opens where they are.
void AddFacts(BenchReport& report, const CudaProperties& gpu) {
  const auto version = [](int cuda) { return fmt::format("{}.{}", cuda / 1000, cuda % 1000 / 10); };
  const auto found = [](const char* library) { return dlopen(library, RTLD_LAZY) != nullptr; };
  report.AddFact("memory", gpu.memory);
  report.AddFact("compute_capability",
                 fmt::format("{}.{}", gpu.compute_capability / 10, gpu.compute_capability % 10));
  report.AddFact("multiprocessors", gpu.multiprocessors);
  report.AddFact("driver_cuda", version(gpu.driver_cuda));
  report.AddFact("cublaslt", gpu.cublas);
  report.AddFact("nccl", found("libnccl.so.2"));
  report.AddFact("cudnn", found("libcudnn.so.9"));
}

}  // namespace

void BenchDevice(BenchSetup& setup) {
  KernelBench bench(setup);
  const bool gpu = bench.device->type() == DeviceType::kCuda;
  BenchReport report =
      bench.NewReport("device", gpu ? "what clocks and data sheets say; 0: not known" : "none");
  const CudaProperties properties = gpu ? PropertiesOfCudaDevice(0) : CudaProperties{};
  if (gpu) AddFacts(report, properties);
  const auto add = [&](const std::string& name, const char* unit, double theory,
                       const std::function<double()>& measure) {
    std::vector<double> rates;
    for (int i = 0; i < 7; ++i) rates.push_back(measure());
    report.Add({name, RateOfRounds(*bench.device, rates), unit, theory, ""});
  };
  // The CPU's rate is one for all types.
  for (DType dtype : gpu ? std::vector{DType::kF32, DType::kBF16} : std::vector{DType::kF32}) {
    add((gpu ? StrCat(Name(dtype), " ") : "") + bench.ceilings.products_meaning(), "GFLOP/s",
        bench.ceilings.TheoreticalProducts(dtype), [&] { return bench.ceilings.Products(dtype); });
  }
  add(bench.ceilings.bandwidth_meaning(), "GB/s", properties.memory_bytes / 1e9,
      [&] { return bench.ceilings.Bandwidth(int64_t{1} << 30); });
  report.WriteJson(setup.json);
}

void BenchGemm(BenchSetup& setup) {
  const int64_t rows = setup.arguments.Integer("rows", 2).value_or(1024);
  KernelBench bench(setup);
  BenchReport report = bench.NewReport(
      "gemm", bench.ceilings.products_meaning() + ", measured between the rounds of each case");
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
    const int64_t m = layer.out > 50000 ? rows / 2 : rows;  // the head takes its rows in chunks
    products.push_back({layer.forward, m, layer.out, layer.in, false, true, false});
    products.push_back({layer.dx, m, layer.in, layer.out, false, false, false});
    products.push_back({layer.dw, layer.out, layer.in, m, true, false, true});
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
      const double work =
          2.0 * static_cast<double>(p.m) * static_cast<double>(p.n) * static_cast<double>(p.k);
      const auto measured = bench.AddProducts(report, fmt::format("{} [{}x{}x{}]", p.name, p.m, p.n, p.k),
                                              dtype, work, [&] { bench.run.matmul(args); });
      flops += work;
      seconds += measured.seconds;
      ceiling_seconds += work / (measured.ceiling * 1e9);
      bench.Free();
    }
    report.Add({fmt::format("{} all", Name(dtype)), flops / seconds / 1e9, "GFLOP/s",
                flops / ceiling_seconds / 1e9, ""});
  }
  report.WriteJson(setup.json);
}

void BenchAttention(BenchSetup& setup) {
  const int64_t batch = setup.arguments.Integer("batch", 1).value_or(4);
  const auto seq = setup.arguments.Integer("seq", 1);
  KernelBench bench(setup);
  BenchReport report = bench.NewReport(
      "attention", bench.ceilings.products_meaning() + "; only what a causal mask leaves is counted");
  constexpr int64_t kHeads = 12, kDim = 64, kWidth = kHeads * kDim;
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    for (int64_t t : seq ? std::vector<int64_t>{*seq} : std::vector<int64_t>{256, 512, 1024, 2048}) {
      const TensorView qkv = bench.Make({batch * t, 3 * kWidth}, dtype);
      const TensorView out = bench.Make({batch * t, kWidth}, dtype),
                       dout = bench.Make({batch * t, kWidth}, dtype);
      const TensorView dqkv = bench.Make({batch * t, 3 * kWidth}, dtype);
      const TensorView lse = bench.Make({batch, kHeads, t}, DType::kF32);
      auto heads = [&](const TensorView& view, int64_t column) {
        return HeadsView{static_cast<char*>(view.data) + column * static_cast<int64_t>(SizeOf(dtype)), dtype,
                         t * view.cols(), view.cols()};
      };
      AttentionShape shape;
      shape.batch = batch;
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
          static_cast<double>(batch * kHeads * kDim) * static_cast<double>(t) * static_cast<double>(t + 1);
      bench.AddProducts(report, fmt::format("forward T {}", t), dtype, 2 * product,
                        [&] { bench.run.attention_forward(forward); });
      bench.AddProducts(report, fmt::format("backward T {}", t), dtype, 5 * product,
                        [&] { bench.run.attention_backward(backward); });
      bench.Free();
    }
  }
  report.WriteJson(setup.json);
}

void BenchAdamW(BenchSetup& setup) {
  const auto elements = setup.arguments.Integer("elements", 1);
  KernelBench bench(setup);
  BenchReport report =
      bench.NewReport("adamw", bench.ceilings.bandwidth_meaning() +
                                   ", over arrays of the same size, measured between the rounds");
  for (int64_t n : elements ? std::vector<int64_t>{*elements} : std::vector<int64_t>{1 << 22, 1 << 25}) {
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
      bench.AddBytes(report,
                     fmt::format("{}{} elements", rounded ? "with bf16 copy, " : "",
                                 FormatCount(static_cast<double>(n))),
                     static_cast<double>(n) * (rounded ? 30 : 28), [&] { bench.run.adamw(args); });
    }
    bench.Free();
  }
  report.WriteJson(setup.json);
}

void BenchNorm(BenchSetup& setup) {
  const int64_t rows = setup.arguments.Integer("rows", 1).value_or(65536),
                hidden = setup.arguments.Integer("hidden", 1).value_or(768);
  KernelBench bench(setup);
  BenchReport report = bench.NewReport(
      "norm", bench.ceilings.bandwidth_meaning() +
                  ", measured between the rounds; two tensors forward, three backward are counted");
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    const TensorView x = bench.Make({rows, hidden}, dtype), y = bench.Make({rows, hidden}, dtype),
                     dy = bench.Make({rows, hidden}, dtype), dx = bench.Make({rows, hidden}, dtype);
    const TensorView gain = bench.Make({hidden}, DType::kF32), bias = bench.Make({hidden}, DType::kF32),
                     dgain = bench.Make({hidden}, DType::kF32), dbias = bench.Make({hidden}, DType::kF32),
                     mean = bench.Make({rows}, DType::kF32), rstd = bench.Make({rows}, DType::kF32);
    const double tensor = static_cast<double>(rows * hidden) * static_cast<double>(SizeOf(dtype));
    const auto add = [&](const char* name, int tensors, const std::function<void()>& body) {
      bench.AddBytes(report, fmt::format("{} {} [{}x{}]", Name(dtype), name, rows, hidden), tensors * tensor,
                     body);
    };
    add("layer norm forward", 2, [&] { bench.run.layer_norm_forward({x, gain, bias, y, mean, rstd}); });
    add("layer norm backward", 3, [&] {
      bench.run.layer_norm_backward({dy, x, gain, mean, rstd, dx, dgain, dbias});
    });
    add("rms norm forward", 2, [&] { bench.run.rms_norm_forward({x, gain, y, rstd}); });
    add("rms norm backward", 3, [&] { bench.run.rms_norm_backward({dy, x, gain, rstd, dx, dgain}); });
    bench.Free();
  }
  report.WriteJson(setup.json);
}

}  // namespace strata
