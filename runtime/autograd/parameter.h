// Parameter: one learned tensor, and what everyone above needs to know about it. Unit: a stretch of a model
// that is used as a whole.
//
// A Parameter says where it lies in the mesh, how it starts, whether it decays and whether it is trained: the
// optimiser, ZeRO, clipping and checkpoints read these fields; nothing is decided by its name. Its memory
// belongs to the ParamResidency, which fills `data` and `grad`.
//
// Ownership: a Module owns its parameters; a model owns its units. Threading: used by the rank's thread.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/base/tensor_view.h"

namespace strata {

/// How the starting values are drawn: Normal(0, std) keyed by (seed, parameter name, global element), or a
/// constant.
struct Initializer {
  enum class Kind : uint8_t { kNormal, kConstant } kind = Kind::kConstant;
  float value = 0.0f;  // std or the constant

  static Initializer Normal(float std) { return {Kind::kNormal, std}; }
  static Initializer Constant(float value) { return {Kind::kConstant, value}; }
};

/// Where a parameter's elements lie over the mesh. A replicated parameter is whole on every rank: no cuts.
struct Placement {
  /// Local positions along a dimension are these stretches of the global ones, one after another; what is
  /// left of the local extent is padding.
  struct Segment {
    int64_t begin = 0, count = 0;
  };
  struct Cut {
    int dim = 0;
    std::vector<Segment> segments;
  };
  std::vector<Cut> cuts;             // dimensions that this rank does not have whole, ascending
  bool over_tensor = false;          // ranks of the tensor-parallel group hold different elements
  bool over_expert = false;          // ranks of the expert group hold different elements (experts)
  bool partial_over_tensor = false;  // tensor-parallel ranks each have a part of its gradient's sum
};

struct Parameter {
  std::string name;    // global and dotted: "blocks.0.attention.qkv.weight"
  Shape shape;         // of this rank's part
  Shape global_shape;  // of the whole
  Placement placement;
  Initializer init;
  bool decay = true;          // weight decay applies
  bool requires_grad = true;  // false: frozen

  TensorView data;                // in the compute type; valid while its unit is acquired
  bool gradient_defined = false;  // whether this step has written a gradient yet
};

/// Calls visit(local, global, n) for the stretches of the local flat elements [begin, begin + count) that are
/// contiguous both here and in the whole tensor, in local order; padding is left out.
void ForEachGlobalStretch(const Parameter& parameter, int64_t begin, int64_t count,
                          const std::function<void(int64_t local, int64_t global, int64_t n)>& visit);

/// A declared stretch of a model (an embedding, one block, the head): its parameters come and go together.
/// Units do not overlap on the tape; a unit may be entered more than once a step. `shared` are parameters
/// that belong to an earlier unit and are used here too (tied embeddings).
struct Unit {
  std::string name;
  std::vector<Parameter*> parameters;
  std::vector<Parameter*> shared;
};

enum class Phase : uint8_t { kForward, kBackward };

/// Where parameters and their gradients are while they are not in use. The default keeps everything; ZeRO
/// brings them when their unit is entered. The tape calls it; it knows nothing of the tape.
class ParamResidency {
 public:
  virtual ~ParamResidency() = default;
  /// On return `data` of the unit's parameters is valid, until the matching Release.
  virtual void Acquire(Unit& unit, Phase phase) = 0;
  /// The unit is left. In backward, the gradients of its own parameters are final when the last of its
  /// entries is left.
  virtual void Release(Unit& unit, Phase phase) = 0;
  /// The fp32 gradient of a trained parameter of an acquired unit, shaped as the parameter; valid until it is
  /// final.
  virtual TensorView Gradient(Parameter& parameter) = 0;
};

}  // namespace strata
