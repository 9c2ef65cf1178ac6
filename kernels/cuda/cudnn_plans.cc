// The library, and attention as it wants to be asked for it: a graph of small operations, which its engines
// recognise and fuse. They know one order of operations, that of NVIDIA's cudnn-frontend (its nodes of scaled
// dot product attention), and nothing near it.
#include "kernels/cuda/cudnn_plans.h"

#if __has_include(<cudnn.h>)
#include <cudnn.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "runtime/base/error.h"
#include "runtime/base/log.h"

namespace strata::cuda {
namespace {

// ---- the library ----

#define STRATA_CUDNN(F)            \
  F(cudnnGetVersion)               \
  F(cudnnGetErrorString)           \
  F(cudnnGetLastErrorString)       \
  F(cudnnCreate)                   \
  F(cudnnDestroy)                  \
  F(cudnnSetStream)                \
  F(cudnnBackendCreateDescriptor)  \
  F(cudnnBackendDestroyDescriptor) \
  F(cudnnBackendSetAttribute)      \
  F(cudnnBackendGetAttribute)      \
  F(cudnnBackendFinalize)          \
  F(cudnnBackendExecute)

// What the library says when it does not take something.
struct Refusal {
  std::string why;
};

// The oldest that is right for lengths that are no multiples of 128 without a mask for them.
constexpr size_t kOldest = 91600;

struct Library {
#define STRATA_DECLARE(name) decltype(&::name) name = nullptr;
  STRATA_CUDNN(STRATA_DECLARE)
#undef STRATA_DECLARE
  std::string why_not;

  Library() {
    void* const handle = dlopen("libcudnn.so.9", RTLD_NOW | RTLD_LOCAL);  // stays open until the program ends
    if (handle == nullptr) {
      why_not = dlerror();
      return;
    }
    const auto find = [&](const char* symbol) {
      void* const function = dlsym(handle, symbol);
      if (function == nullptr && why_not.empty()) why_not = StrCat("libcudnn.so.9 has no ", symbol);
      return function;
    };
#define STRATA_FIND(name) name = reinterpret_cast<decltype(name)>(find(#name));
    STRATA_CUDNN(STRATA_FIND)
#undef STRATA_FIND
    if (why_not.empty() && cudnnGetVersion() < kOldest) {
      const auto text = [](size_t version) { return StrCat(version / 10000, ".", version / 100 % 100); };
      why_not = StrCat("libcudnn.so.9 is ", text(cudnnGetVersion()), ", older than ", text(kOldest));
    }
  }

  // Throws Refusal.
  void Check(cudnnStatus_t status, const char* what) const {
    if (status == CUDNN_STATUS_SUCCESS) return;
    char why[512] = "";
    cudnnGetLastErrorString(why, sizeof(why));
    throw Refusal{StrCat(what, ": ", cudnnGetErrorString(status), why[0] != 0 ? ": " : "", why)};
  }
};
#undef STRATA_CUDNN

const Library& TheLibrary() {
  static const Library library;
  return library;
}

// ---- descriptors ----

using Descriptor = cudnnBackendDescriptor_t;

// Descriptors and what is made of them, which lives as long.
class Descriptors {
 public:
  explicit Descriptors(const Library& library) : library_(library) {}

  Descriptor Make(cudnnBackendDescriptorType_t type) {
    Descriptor made = nullptr;
    library_.Check(library_.cudnnBackendCreateDescriptor(type, &made), "making a descriptor");
    owned_.emplace_back(made, library_.cudnnBackendDestroyDescriptor);
    return made;
  }
  template <typename T>
  void Set(Descriptor to, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, const T* values,
           int64_t count = 1) const {
    library_.Check(library_.cudnnBackendSetAttribute(to, name, type, count, values),
                   "describing an operation");
  }
  template <typename T>
  void Set(Descriptor to, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
           const T& value) const {
    Set(to, name, type, &value, 1);
  }
  void Set(Descriptor to, cudnnBackendAttributeName_t name, Descriptor part) const {
    Set(to, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, &part, 1);
  }
  /// Up to `count` values. Returns how many there are.
  template <typename T>
  int64_t Get(Descriptor from, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, T* values,
              int64_t count = 1) const {
    int64_t found = 0;
    library_.Check(library_.cudnnBackendGetAttribute(from, name, type, count, &found, values),
                   "reading a descriptor");
    return found;
  }
  void Finalize(Descriptor made, const char* what) const {
    library_.Check(library_.cudnnBackendFinalize(made), what);
  }

 private:
  using Owned =
      std::unique_ptr<std::remove_pointer_t<Descriptor>, decltype(Library::cudnnBackendDestroyDescriptor)>;

  const Library& library_;
  std::vector<Owned> owned_;
};

// ---- the graph ----

// Names of what lies in memory, by which the library is given addresses; those of single numbers are the
// host's.
enum Uid : int64_t {
  kQ = 1,
  kK,
  kV,
  kOut,
  kDout,
  kDq,
  kDk,
  kDv,
  kLse,
  kDelta,
  kScale,
  kHidden,
  kOne,
  kUnnamed
};

using Dims = std::array<int64_t, 4>;  // batch, head, row, column

class Graph {
 public:
  Graph(Descriptors& descriptors, const CudnnAttention& attention)
      : make_(descriptors),
        a_(attention),
        type_(attention.dtype == DType::kBF16 ? CUDNN_DATA_BFLOAT16 : CUDNN_DATA_HALF) {}

  // softmax(scale · q kᵀ) v
  void Forward() {
    Descriptor scores = Square();
    Multiply(Heads(kQ, a_.q, false), Heads(kK, a_.k, true), scores);
    scores = Mask(Point(CUDNN_POINTWISE_MUL, scores, Number(kScale), Square()));
    const Descriptor highest = Column();
    Reduce(CUDNN_REDUCE_TENSOR_MAX, scores, highest);
    const Descriptor weights =
        Point(CUDNN_POINTWISE_EXP, Point(CUDNN_POINTWISE_SUB, scores, highest, Square()), nullptr, Square());
    const Descriptor sum = Column();
    Reduce(CUDNN_REDUCE_TENSOR_ADD, weights, sum);
    Point(CUDNN_POINTWISE_ADD, highest, Point(CUDNN_POINTWISE_LOG, sum, nullptr, Column()), Column(kLse));
    Multiply(Point(CUDNN_POINTWISE_DIV, weights, sum, Square(type_)), Heads(kV, a_.v, false),
             Heads(kOut, a_.out, false));
  }

  // Through dS, which is kept whole: the engines that do not keep it add to dq in any order.
  void Backward() {
    const Descriptor q = Heads(kQ, a_.q, false), k = Heads(kK, a_.k, true),
                     dout = Heads(kDout, a_.dout, false);
    const Descriptor scale = Number(kScale), delta = Column(kDelta);

    const Descriptor products = Tensor(
        kUnnamed, CUDNN_DATA_FLOAT, {a_.batch, a_.num_heads, a_.q_len, a_.head_dim},
        {a_.num_heads * a_.q_len * a_.head_dim, a_.q_len * a_.head_dim, a_.num_heads * a_.head_dim, 1});
    Point(CUDNN_POINTWISE_MUL, dout, Heads(kOut, a_.out, false), products);
    const Descriptor dots = Column();
    Reduce(CUDNN_REDUCE_TENSOR_ADD, products, dots);
    Point(CUDNN_POINTWISE_MUL, dots, Number(kOne), delta);

    Descriptor scores = Square();
    Multiply(q, k, scores);
    scores = Point(CUDNN_POINTWISE_MUL, scores, scale, Square());
    scores = Mask(Point(CUDNN_POINTWISE_SUB, scores, Column(kLse), Square()));
    const Descriptor weights = Point(CUDNN_POINTWISE_EXP, scores, nullptr, Square());
    MultiplyToKeys(weights, dout, kDv, a_.dv);

    Descriptor grads = Square();
    Multiply(dout, Heads(kV, a_.v, true), grads);
    grads = Point(CUDNN_POINTWISE_SUB, grads, delta, Square());
    grads = Point(CUDNN_POINTWISE_MUL, grads, weights, Square());
    grads = Point(CUDNN_POINTWISE_MUL, grads, scale, Square());
    MultiplyToKeys(grads, q, kDk, a_.dk);

    const Descriptor keys =
        Tensor(kUnnamed, CUDNN_DATA_FLOAT, {a_.batch, a_.num_kv_heads, a_.kv_len, a_.head_dim},
               {a_.k.batch, a_.head_dim, a_.k.row, 1});
    Reshape(k, keys);
    Multiply(grads, keys, Heads(kDq, a_.dq, false));
  }

  const std::vector<Descriptor>& operations() const { return operations_; }
  /// What of memory it names.
  const std::vector<int64_t>& names() const { return names_; }

 private:
  // ---- tensors ----

  // Without a name: one that only operations see.
  Descriptor Tensor(int64_t name, cudnnDataType_t type, const Dims& dims, const Dims& strides,
                    bool in_host_memory = false) {
    const bool unnamed = name == kUnnamed;
    if (unnamed) {
      name += num_unnamed_++;
    } else {
      names_.push_back(name);
    }
    const Descriptor made = make_.Make(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    make_.Set(made, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, type);
    make_.Set(made, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, dims.data(), 4);
    make_.Set(made, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, strides.data(), 4);
    make_.Set(made, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, name);
    make_.Set(made, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, int64_t{16});
    make_.Set(made, CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, unnamed);
    make_.Set(made, CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, in_host_memory);
    make_.Finalize(made, "describing a tensor");
    return made;
  }
  Descriptor Number(Uid name) { return Tensor(name, CUDNN_DATA_FLOAT, {1, 1, 1, 1}, {1, 1, 1, 1}, true); }

  // Rows of heads, or the same transposed.
  Descriptor Heads(Uid name, const CudnnAttention::Strides& strides, bool transposed) {
    const bool of_queries = name == kQ || name == kOut || name == kDout || name == kDq;
    Dims dims{a_.batch, of_queries ? a_.num_heads : a_.num_kv_heads, of_queries ? a_.q_len : a_.kv_len,
              a_.head_dim};
    Dims steps{strides.batch, a_.head_dim, strides.row, 1};
    if (transposed) {
      std::swap(dims[2], dims[3]);
      std::swap(steps[2], steps[3]);
    }
    return Tensor(name, type_, dims, steps);
  }
  // One for each pair of query and key.
  Descriptor Square(cudnnDataType_t type = CUDNN_DATA_FLOAT) {
    const int64_t head = a_.q_len * a_.kv_len;
    return Tensor(kUnnamed, type, {a_.batch, a_.num_heads, a_.q_len, a_.kv_len},
                  {a_.num_heads * head, head, a_.kv_len, 1});
  }
  // One for each query, packed.
  Descriptor Column(Uid name = kUnnamed) {
    return Tensor(name, CUDNN_DATA_FLOAT, {a_.batch, a_.num_heads, a_.q_len, 1},
                  {a_.num_heads * a_.q_len, a_.q_len, 1, 1});
  }

  // ---- operations ----

  void Add(Descriptor operation) {
    make_.Finalize(operation, "describing an operation");
    operations_.push_back(operation);
  }

  void Multiply(Descriptor a, Descriptor b, Descriptor c) {
    const Descriptor how = make_.Make(CUDNN_BACKEND_MATMUL_DESCRIPTOR);
    make_.Set(how, CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT);
    make_.Finalize(how, "describing a product");
    const Descriptor operation = make_.Make(CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
    make_.Set(operation, CUDNN_ATTR_OPERATION_MATMUL_ADESC, a);
    make_.Set(operation, CUDNN_ATTR_OPERATION_MATMUL_BDESC, b);
    make_.Set(operation, CUDNN_ATTR_OPERATION_MATMUL_CDESC, c);
    make_.Set(operation, CUDNN_ATTR_OPERATION_MATMUL_DESC, how);
    Add(operation);
  }

  // y = mode(x, b, t), of which b and t may be null. Returns y.
  Descriptor Point(cudnnPointwiseMode_t mode, Descriptor x, Descriptor b, Descriptor y,
                   cudnnDataType_t compute = CUDNN_DATA_FLOAT, Descriptor t = nullptr, int64_t axis = -1) {
    const Descriptor how = make_.Make(CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
    make_.Set(how, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, mode);
    make_.Set(how, CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, compute);
    if (axis >= 0) make_.Set(how, CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, axis);
    make_.Finalize(how, "describing an operation");
    const Descriptor operation = make_.Make(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    make_.Set(operation, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, how);
    make_.Set(operation, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x);
    if (b != nullptr) make_.Set(operation, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, b);
    if (t != nullptr) make_.Set(operation, CUDNN_ATTR_OPERATION_POINTWISE_TDESC, t);
    make_.Set(operation, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y);
    Add(operation);
    return y;
  }

  void Reduce(cudnnReduceTensorOp_t op, Descriptor x, Descriptor y) {
    const Descriptor how = make_.Make(CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
    make_.Set(how, CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, op);
    make_.Set(how, CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT);
    make_.Finalize(how, "describing a sum");
    const Descriptor operation = make_.Make(CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
    make_.Set(operation, CUDNN_ATTR_OPERATION_REDUCTION_DESC, how);
    make_.Set(operation, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x);
    make_.Set(operation, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y);
    Add(operation);
  }

  void Reshape(Descriptor x, Descriptor y) {
    const Descriptor operation = make_.Make(CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
    make_.Set(operation, CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x);
    make_.Set(operation, CUDNN_ATTR_OPERATION_RESHAPE_YDESC, y);
    Add(operation);
  }

  // −∞ where the causal mask hides a key.
  Descriptor Mask(Descriptor scores) {
    if (!a_.causal) return scores;
    const auto index = [&](int64_t axis) {
      return Point(CUDNN_POINTWISE_GEN_INDEX, scores, nullptr, Square(CUDNN_DATA_INT32), CUDNN_DATA_FLOAT,
                   nullptr, axis);
    };
    const Descriptor query = index(2), key = index(3);
    const Descriptor visible =
        Point(CUDNN_POINTWISE_CMP_GE, query, key, Square(CUDNN_DATA_BOOLEAN), CUDNN_DATA_BOOLEAN);
    return Point(CUDNN_POINTWISE_BINARY_SELECT, scores, Number(kHidden), Square(), CUDNN_DATA_FLOAT, visible);
  }

  // pairsᵀ · rows, added up over the heads that share keys.
  void MultiplyToKeys(Descriptor pairs, Descriptor rows, Uid name, const CudnnAttention::Strides& strides) {
    const int64_t head = a_.q_len * a_.kv_len;
    const Descriptor turned = Tensor(kUnnamed, type_, {a_.batch, a_.num_heads, a_.kv_len, a_.q_len},
                                     {a_.num_heads * head, head, 1, a_.kv_len});
    Reshape(pairs, turned);
    const Descriptor result = Heads(name, strides, false);
    if (a_.num_heads == a_.num_kv_heads) return Multiply(turned, rows, result);
    const int64_t size = a_.kv_len * a_.head_dim;
    const Descriptor each = Tensor(kUnnamed, type_, {a_.batch, a_.num_heads, a_.kv_len, a_.head_dim},
                                   {a_.num_heads * size, size, a_.head_dim, 1});
    Multiply(turned, rows, each);
    Reduce(CUDNN_REDUCE_TENSOR_ADD, each, result);
  }

  Descriptors& make_;
  const CudnnAttention& a_;
  cudnnDataType_t type_;
  std::vector<Descriptor> operations_;
  std::vector<int64_t> names_;
  int64_t num_unnamed_ = 0;
};

// ---- plans ----

// An engine of the library's, set up for one attention.
class Plan {
 public:
  // Throws Refusal where there is none.
  Plan(const Library& library, cudnnHandle_t handle, const CudnnAttention& attention)
      : library_(library), handle_(handle), made_(library) {
    Graph graph(made_, attention);
    if (attention.backward) {
      graph.Backward();
    } else {
      graph.Forward();
    }
    names_ = graph.names();
    const Descriptor operations = made_.Make(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    made_.Set(operations, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR,
              graph.operations().data(), std::ssize(graph.operations()));
    made_.Set(operations, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, handle_);
    made_.Finalize(operations, "describing attention");

    std::string why_not = "no engine knows it";
    for (const Descriptor config : Candidates(operations)) {
      try {
        SetUp(config, attention);
        return;
      } catch (const Refusal& refusal) {
        why_not = refusal.why;
      }
    }
    throw Refusal{why_not};
  }

  size_t workspace() const { return static_cast<size_t>(workspace_); }

  void Run(const CudnnMemory& memory) const {
    const float hidden = -INFINITY, one = 1.0f;
    const std::map<int64_t, const void*> addresses = {
        {kQ, memory.q},       {kK, memory.k},         {kV, memory.v},   {kOut, memory.out},
        {kDout, memory.dout}, {kDq, memory.dq},       {kDk, memory.dk}, {kDv, memory.dv},
        {kLse, memory.lse},   {kDelta, memory.delta}, {kOne, &one},     {kScale, &memory.scale},
        {kHidden, &hidden}};
    std::vector<const void*> named;
    for (const int64_t name : names_) named.push_back(addresses.at(name));
    Descriptors call(library_);
    const Descriptor pack = call.Make(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
    call.Set(pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, names_.data(), std::ssize(names_));
    call.Set(pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, named.data(),
             std::ssize(named));
    call.Set(pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, memory.workspace);
    call.Finalize(pack, "naming memory");
    library_.Check(library_.cudnnBackendExecute(handle_, plan_, pack), "starting attention");
  }

 private:
  // What the library would run it by, best first.
  std::vector<Descriptor> Candidates(Descriptor operations) {
    const Descriptor advice = made_.Make(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
    made_.Set(advice, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, operations);
    made_.Set(advice, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, CUDNN_HEUR_MODE_A);
    made_.Finalize(advice, "asking for engines");
    std::vector<Descriptor> configs(made_.Get<Descriptor>(advice, CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                                          CUDNN_TYPE_BACKEND_DESCRIPTOR, nullptr, 0));
    for (Descriptor& config : configs) config = made_.Make(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    configs.resize(made_.Get(advice, CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR,
                             configs.data(), std::ssize(configs)));
    return configs;
  }

  // Throws Refusal where results would not have the same bits every time: where the library notes that, which
  // it does not of every such engine; or where a backward does not keep dS, and so adds to dq in any order.
  void SetUp(Descriptor config, const CudnnAttention& attention) {
    Descriptor engine = made_.Make(CUDNN_BACKEND_ENGINE_DESCRIPTOR);
    made_.Get(config, CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR, &engine);
    std::array<cudnnBackendNumericalNote_t, 64> notes;
    const int64_t num_notes = made_.Get(engine, CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, CUDNN_TYPE_NUMERICAL_NOTE,
                                        notes.data(), std::ssize(notes));
    const bool in_any_order =
        std::count(notes.begin(), notes.begin() + num_notes, CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC) > 0;
    plan_ = made_.Make(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
    made_.Set(plan_, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, handle_);
    made_.Set(plan_, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, config);
    made_.Finalize(plan_, "setting up an engine");
    made_.Get(plan_, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, &workspace_);
    const int64_t pairs = attention.batch * attention.num_heads * attention.q_len * attention.kv_len;
    if (in_any_order || (attention.backward && workspace_ < 2 * pairs)) {
      throw Refusal{"its engine adds in any order"};
    }
    if (workspace() > CudnnPlans::kMostWorkspace) {
      throw Refusal{StrCat("its engine wants ", workspace_, " bytes of workspace")};
    }
  }

  const Library& library_;
  cudnnHandle_t handle_;
  Descriptors made_;
  std::vector<int64_t> names_;
  Descriptor plan_ = nullptr;
  int64_t workspace_ = 0;
};

std::string NameOf(const CudnnAttention& a) {
  return StrCat(Name(a.dtype), a.backward ? " backward" : " forward", ", batch ", a.batch, ", ", a.q_len,
                " queries, ", a.kv_len, " keys, ", a.num_heads, "/", a.num_kv_heads, " heads of ", a.head_dim,
                a.causal ? ", causal" : "");
}

}  // namespace

std::string WhyNoCudnn() { return TheLibrary().why_not; }

struct CudnnPlans::State {
  const Library& library = TheLibrary();
  cudnnHandle_t handle = nullptr;
  std::map<CudnnAttention, std::unique_ptr<const Plan>> plans;  // null: there is none

  ~State() {
    plans.clear();
    if (handle != nullptr) library.cudnnDestroy(handle);
  }
};

CudnnPlans::CudnnPlans(cudaStream_t stream) : state_(std::make_unique<State>()) {
  try {
    const Library& library = state_->library;
    library.Check(library.cudnnCreate(&state_->handle), "making a handle");
    library.Check(library.cudnnSetStream(state_->handle, stream), "taking a stream");
  } catch (const Refusal& refusal) {
    throw Error(StrCat("cuDNN: ", refusal.why), "device.attention: strata does without");
  }
}

CudnnPlans::~CudnnPlans() = default;

std::optional<size_t> CudnnPlans::Workspace(const CudnnAttention& attention) {
  const auto [at, is_new] = state_->plans.try_emplace(attention);
  if (is_new) {
    try {
      at->second = std::make_unique<const Plan>(state_->library, state_->handle, attention);
    } catch (const Refusal& refusal) {
      LogWarning("strata's own attention runs {}, as cuDNN does not: {}", NameOf(attention), refusal.why);
    }
  }
  if (at->second == nullptr) return std::nullopt;
  return at->second->workspace();
}

void CudnnPlans::Run(const CudnnAttention& attention, const CudnnMemory& memory) {
  try {
    state_->plans.at(attention)->Run(memory);
  } catch (const Refusal& refusal) {
    throw Error(StrCat("cuDNN: ", NameOf(attention), ": ", refusal.why));
  }
}

}  // namespace strata::cuda

#else

namespace strata::cuda {

std::string WhyNoCudnn() { return "this build found no <cudnn.h>"; }

struct CudnnPlans::State {};
CudnnPlans::CudnnPlans(cudaStream_t) {}
CudnnPlans::~CudnnPlans() = default;
std::optional<size_t> CudnnPlans::Workspace(const CudnnAttention&) { return std::nullopt; }
void CudnnPlans::Run(const CudnnAttention&, const CudnnMemory&) {}

}  // namespace strata::cuda

#endif
