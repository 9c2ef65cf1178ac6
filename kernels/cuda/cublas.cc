#include "kernels/cuda/cublas.h"

#include <cublasLt.h>
#include <dlfcn.h>

#include <compare>
#include <map>
#include <memory>

namespace strata::cuda {
namespace {

#define STRATA_CUBLASLT(F)           \
  F(cublasLtGetVersion)              \
  F(cublasLtGetStatusString)         \
  F(cublasLtCreate)                  \
  F(cublasLtDestroy)                 \
  F(cublasLtMatmul)                  \
  F(cublasLtMatmulAlgoGetHeuristic)  \
  F(cublasLtMatmulDescCreate)        \
  F(cublasLtMatmulDescDestroy)       \
  F(cublasLtMatmulDescSetAttribute)  \
  F(cublasLtMatrixLayoutCreate)      \
  F(cublasLtMatrixLayoutDestroy)     \
  F(cublasLtMatmulPreferenceCreate)  \
  F(cublasLtMatmulPreferenceDestroy) \
  F(cublasLtMatmulPreferenceSetAttribute)

// The library's functions.
struct Library {
#define STRATA_DECLARE(name) decltype(&::name) name = nullptr;
  STRATA_CUBLASLT(STRATA_DECLARE)
#undef STRATA_DECLARE
};

// All functions of one file, or none.
std::unique_ptr<const Library> Open(const char* file) {
  void* const handle = dlopen(file, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return nullptr;
  auto library = std::make_unique<Library>();
  bool complete = true;
#define STRATA_FIND(name)                                                          \
  library->name = reinterpret_cast<decltype(library->name)>(dlsym(handle, #name)); \
  complete = complete && library->name != nullptr;
  STRATA_CUBLASLT(STRATA_FIND)
#undef STRATA_FIND
  // Its numbers of attributes and types are those of the header's major version.
  if (complete && library->cublasLtGetVersion() / 10000 == CUBLAS_VER_MAJOR) return library;
  dlclose(handle);
  return nullptr;
}
#undef STRATA_CUBLASLT

// Null where there is none. Stays open until the program ends.
const Library* TheLibrary() {
  static const std::unique_ptr<const Library> library = [] {
    auto versioned = Open(("libcublasLt.so." + std::to_string(CUBLAS_VER_MAJOR)).c_str());
    return versioned ? std::move(versioned) : Open("libcublasLt.so");
  }();
  return library.get();
}

void CheckStatus(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw Error(StrCat("cuBLASLt: ", what, ": ", TheLibrary()->cublasLtGetStatusString(status)));
}

// An object of the library's that `destroy` ends.
template <typename Object>
using Owned = std::unique_ptr<std::remove_pointer_t<Object>, cublasStatus_t (*)(Object)>;

cudaDataType_t DataType(DType type) {
  return type == DType::kF32 ? CUDA_R_32F : type == DType::kBF16 ? CUDA_R_16BF : CUDA_R_16F;
}

// What the choice of an algorithm depends on.
struct Key {
  int64_t m, n, k, pitch_a, pitch_b;
  uint32_t align_a, align_b, align_added, align_c;
  DType type, c_type;
  bool a_along_k, b_along_k, adds, bias, gelu_grad;
  auto operator<=>(const Key&) const = default;
};

// How to run it. The library's matrices have columns where ours have rows, so it makes cᵀ = op(b)ᵀ · op(a)ᵀ.
struct Plan {
  Owned<cublasLtMatmulDesc_t> operation;
  Owned<cublasLtMatrixLayout_t> a, b, c;
  bool found = false;
  cublasLtMatmulAlgo_t algorithm{};
};

uint32_t Alignment(const void* p) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(p);
  return static_cast<uint32_t>(std::min<uintptr_t>(256, address & (~address + 1)));
}

// What the library keeps with a stream.
class State {
 public:
  explicit State(Queue& queue)
      : library_(*TheLibrary()),
        workspace_(queue.context().scratch->Allocate(kWorkspace + kAlignment, MemoryTag::kBuffers)) {
    CheckStatus(library_.cublasLtCreate(&handle_), "making a handle");
  }
  ~State() { library_.cublasLtDestroy(handle_); }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  // Says whether the library knows a way.
  bool Run(const Queue& queue, const Product& p, const void* added, bool gelu_grad) {
    const Epilogue& e = p.epilogue;
    const Key key{.m = p.m,
                  .n = p.n,
                  .k = p.k,
                  .pitch_a = p.a.pitch,
                  .pitch_b = p.b.pitch,
                  .align_a = Alignment(p.a.data),
                  .align_b = Alignment(p.b.data),
                  .align_added = Alignment(added != nullptr ? added : e.c),
                  .align_c = Alignment(e.c),
                  .type = p.a.type,
                  .c_type = e.type,
                  .a_along_k = p.a.along_k,
                  .b_along_k = p.b.along_k,
                  .adds = added != nullptr,
                  .bias = e.bias != nullptr,
                  .gelu_grad = gelu_grad};
    auto at = plans_.find(key);
    if (at == plans_.end()) at = plans_.emplace(key, MakePlan(key)).first;
    const Plan& plan = at->second;
    if (!plan.found) return false;

    if (key.bias) Set(plan, CUBLASLT_MATMUL_DESC_BIAS_POINTER, e.bias);
    if (gelu_grad) Set(plan, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, e.pre_activation);
    const float beta = added != nullptr ? 1.0f : 0.0f;
    CheckStatus(library_.cublasLtMatmul(handle_, plan.operation.get(), &e.alpha, p.b.data, plan.b.get(),
                                        p.a.data, plan.a.get(), &beta, added != nullptr ? added : e.c,
                                        plan.c.get(), e.c, plan.c.get(), &plan.algorithm, Workspace(),
                                        kWorkspace, queue.stream().stream),
                "starting a product");
    return true;
  }

 private:
  static constexpr size_t kWorkspace = size_t{32} << 20, kAlignment = 256;

  void* Workspace() const {
    const auto address = reinterpret_cast<uintptr_t>(workspace_.data());
    return static_cast<char*>(workspace_.data()) + (kAlignment - address % kAlignment) % kAlignment;
  }

  template <typename V>
  void Set(const Plan& plan, cublasLtMatmulDescAttributes_t attribute, const V& value) const {
    CheckStatus(
        library_.cublasLtMatmulDescSetAttribute(plan.operation.get(), attribute, &value, sizeof(value)),
        "describing a product");
  }

  Owned<cublasLtMatrixLayout_t> Layout(DType type, int64_t rows, int64_t columns, int64_t pitch) const {
    cublasLtMatrixLayout_t layout = nullptr;
    CheckStatus(library_.cublasLtMatrixLayoutCreate(&layout, DataType(type), static_cast<uint64_t>(rows),
                                                    static_cast<uint64_t>(columns), pitch),
                "describing a matrix");
    return {layout, library_.cublasLtMatrixLayoutDestroy};
  }

  Plan MakePlan(const Key& key) const {
    cublasLtMatmulDesc_t operation = nullptr;
    CheckStatus(library_.cublasLtMatmulDescCreate(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F),
                "describing a product");
    // Its b is our a: [k, m] in columns if ours lies along k, else transposed; its a is our b, [n, k] or
    // transposed.
    Plan plan{.operation = {operation, library_.cublasLtMatmulDescDestroy},
              .a = key.a_along_k ? Layout(key.type, key.k, key.m, key.pitch_a)
                                 : Layout(key.type, key.m, key.k, key.pitch_a),
              .b = key.b_along_k ? Layout(key.type, key.k, key.n, key.pitch_b)
                                 : Layout(key.type, key.n, key.k, key.pitch_b),
              .c = Layout(key.c_type, key.n, key.m, key.n)};
    Set(plan, CUBLASLT_MATMUL_DESC_TRANSA, key.b_along_k ? CUBLAS_OP_T : CUBLAS_OP_N);
    Set(plan, CUBLASLT_MATMUL_DESC_TRANSB, key.a_along_k ? CUBLAS_OP_N : CUBLAS_OP_T);
    if (key.bias) {
      Set(plan, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
      Set(plan, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, DataType(key.c_type));
    } else if (key.gelu_grad) {
      Set(plan, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_DGELU);
      Set(plan, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, DataType(key.c_type));
      Set(plan, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, key.n);
    }

    cublasLtMatmulPreference_t made = nullptr;
    CheckStatus(library_.cublasLtMatmulPreferenceCreate(&made), "describing preferences");
    const Owned<cublasLtMatmulPreference_t> preference(made, library_.cublasLtMatmulPreferenceDestroy);
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
      CheckStatus(library_.cublasLtMatmulPreferenceSetAttribute(made, attribute, &value, sizeof(value)),
                  "describing preferences");
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{kWorkspace});
    // Parts of k summed in a fixed order, in fp32: the same bits every time.
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, key.align_b);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, key.align_a);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, key.align_added);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, key.align_c);

    cublasLtMatmulHeuristicResult_t result{};
    int results = 0;
    const cublasStatus_t status =
        library_.cublasLtMatmulAlgoGetHeuristic(handle_, operation, plan.b.get(), plan.a.get(), plan.c.get(),
                                                plan.c.get(), made, 1, &result, &results);
    plan.found = status == CUBLAS_STATUS_SUCCESS && results > 0 && result.state == CUBLAS_STATUS_SUCCESS;
    plan.algorithm = result.algo;
    return plan;
  }

  const Library& library_;
  Buffer workspace_;
  cublasLtHandle_t handle_ = nullptr;
  std::map<Key, Plan> plans_;
};

}  // namespace

bool HasLibrary() { return TheLibrary() != nullptr; }

bool RunLibrary(Queue& queue, const Product& p) {
  const Epilogue& e = p.epilogue;
  if (!HasLibrary() || p.ragged != Ragged::kNone || p.m == 0 || p.n == 0 || p.k == 0) return false;
  if (p.a.type != p.b.type || (e.type != p.a.type && e.type != DType::kF32)) return false;
  // Vectors and what the gradient reads are loaded in packs.
  if (e.bias != nullptr && (e.bias_type != e.type || !Aligned(16, e.bias))) return false;
  const bool adds = e.residual != nullptr || e.accumulate;
  if (e.residual != nullptr && e.accumulate) return false;
  const bool gelu_grad = e.activation_grad && e.activation == Activation::kGeluTanh;
  if (gelu_grad) {
    if (adds || e.bias != nullptr || e.type == DType::kF32 || p.n % 8 != 0 ||
        !Aligned(16, e.pre_activation, e.c)) {
      return false;
    }
  } else if (e.activation != Activation::kNone || e.pre_activation != nullptr) {
    return false;
  }
  std::shared_ptr<void>& state = queue.stream().products;
  if (state == nullptr) state = std::make_shared<State>(queue);
  return static_cast<State*>(state.get())
      ->Run(queue, p,
            !adds          ? nullptr
            : e.accumulate ? e.c
                           : e.residual,
            gelu_grad);
}

}  // namespace strata::cuda
