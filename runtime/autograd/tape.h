// Tape: records operations as they run and takes them back in strictly decreasing order.
//
// One node an operation. Backward visits nodes from the last to the first (not depth first), so the nodes of
// a unit are contiguous and the gradients of its parameters are final when it is left. Parameters are never
// held by the tape: nodes refer to them and read their `data` while the unit is acquired.
//
// Recomputation (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016): under kFull a unit
// keeps only its inputs (or leaves them in an ActivationStore), and is run again in backward; under
// kSelective cheap results (norms, activations, dropout) are made again from what they came from, never a
// matrix product or an attention. Random numbers are functions of (seed, site, step, element), so a second
// run is the same to the bit. While a unit is run again, results of collectives may be taken from the first
// run instead of communicating (StashOrReplay).
//
// Ownership: refers to an executor, a residency and perhaps a store that outlive it. Threading: used by the
// rank's thread. A Tape serves one pass: one micro-batch forward and, when training, backward.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "kernels/executor.h"
#include "runtime/autograd/activation_store.h"
#include "runtime/autograd/parameter.h"
#include "runtime/autograd/tensor.h"

namespace strata {

enum class RecomputePolicy : uint8_t { kNone, kSelective, kFull };

struct TapeOptions {
  bool training = true;  // records, and drops out
  DType compute_dtype = DType::kF32;
  RecomputePolicy recompute = RecomputePolicy::kNone;
  bool stash_collectives = true;
  uint64_t seed = 0;
  uint32_t step = 0;
  int64_t row_offset = 0;  // place of this micro-batch's first token among all tokens of the step
  ActivationStore* activation_store = nullptr;  // takes what kFull keeps; null: it stays where it is
};

/// Where a kernel puts a gradient: overwriting, or adding to what is there.
struct GradTarget {
  TensorView view;
  bool accumulate = false;
};

class Tape;

/// What a node's backward sees.
class Backprop {
 public:
  /// Gradient of output `i`; undefined when none flowed back.
  const Tensor& dout(int i = 0) const { return douts_[i]; }
  /// The same, moved out: unique if nobody else holds it.
  Tensor TakeDout(int i = 0) { return std::move(douts_[i]); }
  /// Whether input `i` wants a gradient.
  bool Needs(int i) const { return slots_[i] >= 0; }
  /// Memory for the gradient of input `i`, shaped like it.
  GradTarget Din(int i);
  /// Hands over a gradient of input `i` that exists already.
  void GiveDin(int i, Tensor gradient);

 private:
  friend class Tape;
  Tape* tape_ = nullptr;
  std::vector<Tensor> douts_;
  std::vector<int64_t> slots_;
  std::vector<TensorView> inputs_;  // shapes and types only
};

using BackwardFn = std::function<void(Backprop&)>;

/// A tensor kept for backward: itself, or (selective recomputation) the way to make it again.
class SavedTensor {
 public:
  SavedTensor() = default;
  Tensor Get() const { return recipe_ ? recipe_() : tensor_; }
  bool defined() const { return recipe_ || tensor_.defined(); }

 private:
  friend class Tape;
  Tensor tensor_;
  std::function<Tensor()> recipe_;
};

class Tape {
 public:
  Tape(const Executor& executor, ParamResidency& residency, TapeOptions options);
  ~Tape();
  Tape(const Tape&) = delete;
  Tape& operator=(const Tape&) = delete;

  const Executor& executor() const { return executor_; }
  const TapeOptions& options() const { return options_; }
  /// Whether operations are being recorded: training, and not inside the first run of a unit that will be run
  /// again.
  bool recording() const { return recording_; }
  RandomStream random(uint32_t purpose) const { return {options_.seed, purpose, options_.step}; }

  /// Uninitialised memory for a result, tagged `activations`.
  Tensor Empty(const Shape& shape, DType dtype) const;
  Tensor Empty(const Shape& shape) const { return Empty(shape, options_.compute_dtype); }
  /// Host memory as a tensor on the device (a copy).
  Tensor Upload(const TensorView& host) const;

  /// Runs `forward` as one unit: its parameters are acquired around it, in forward and in backward. `forward`
  /// must be callable again with the same meaning while the tape lives. `recomputable` false exempts a unit
  /// from kFull.
  using UnitForward = std::function<std::vector<Tensor>(std::span<const Tensor>)>;
  std::vector<Tensor> RunUnit(Unit& unit, std::vector<Tensor> inputs, const UnitForward& forward,
                              bool recomputable = true);
  /// The same for one input and one output.
  Tensor RunUnit(Unit& unit, Tensor input, const std::function<Tensor(const Tensor&)>& forward);

  /// Runs `body` on rows of another numbering (a part of the tokens): its first is row `row_offset` of the
  /// step. The backward of what it records sees that number too.
  Tensor WithRowOffset(int64_t row_offset, const std::function<Tensor()>& body);

  /// Records one operation. Does nothing when not recording, or when neither an input nor a parameter wants a
  /// gradient. Undefined tensors among `inputs` are legal: optional ones.
  void Record(const char* op, std::vector<Tensor> inputs, std::span<Parameter* const> parameters,
              const std::vector<Tensor*>& outputs, BackwardFn backward);
  /// Marks a result as a loss: a root of Backward and an input of nothing (its operation has made its
  /// gradient for a seed of one).
  void MarkRootOnly(Tensor& tensor);
  /// Keeps a tensor for backward.
  SavedTensor Save(const Tensor& tensor) const;
  /// Tells how to make `tensor` again from what is kept anyway; used under kSelective, and within the unit.
  void SetRecipe(Tensor& tensor, std::function<Tensor()> recipe) const;
  /// Where the gradient of a trained parameter goes.
  GradTarget WeightGrad(Parameter& parameter);

  /// The result of an activation collective: `run` communicates; while a unit is run again the stashed result
  /// of its first run is taken instead, checked by operation and shape.
  Tensor StashOrReplay(const char* op, const Shape& shape, const std::function<Tensor()>& run);

  /// Runs backward from the roots, each seeded with ones. The tape is empty afterwards.
  void Backward(std::span<const Tensor> roots);

 private:
  friend class Backprop;
  struct Node {
    const char* op;
    int interval;
    int64_t row_offset;
    std::vector<int64_t> inputs, outputs;  // slots
    std::vector<TensorView> input_views;
    BackwardFn backward;
  };
  struct Interval {
    Unit* unit;
  };
  struct Stashed {
    const char* op;
    Shape shape;
    Tensor tensor;
  };
  using Stash = std::deque<Stashed>;
  // One recording: the pass itself, or a unit being run again inside its backward.
  struct Frame {
    uint64_t id = 0;
    std::vector<Node> nodes;
    std::vector<Tensor> gradients;  // by slot
    std::vector<Interval> intervals;
    int interval = -1;  // being recorded
  };

  std::vector<Tensor> RunRecomputed(const std::vector<Tensor>& inputs, const UnitForward& forward);
  void BackwardFrame(Frame& frame);
  int64_t SlotOf(const Tensor& tensor) const;
  int64_t NewSlot(Tensor& tensor);
  void AddGradient(int64_t slot, Tensor gradient);
  Tensor Ones(const TensorView& like) const;

  const Executor& executor_;
  ParamResidency& residency_;
  TapeOptions options_;
  bool recording_;
  Frame* frame_;
  std::unique_ptr<Frame> root_frame_;
  uint64_t next_frame_ = 1;
  Stash* stash_out_ = nullptr;  // a unit's first run fills it
  Stash* stash_in_ = nullptr;   // its second run empties it
};

}  // namespace strata
