// Module: a named tree of parameters. Layers are modules whose Forward writes operations on a tape.
//
// A Module declares its parameters and children in its constructor; names are joined with dots when the tree
// is complete (AssignNames). There is no virtual Forward: each layer's has the arguments it needs.
//
// Ownership: a module owns its parameters; children are members of their parent, which registers them.
// Modules do not move. Threading: used by the rank's thread.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "runtime/autograd/parameter.h"

namespace strata {

/// What a declaration says beside name and shape.
struct ParameterSpec {
  Initializer init;
  bool decay = true;
  Placement placement;
  Shape global_shape;  // rank 0 with one element: as the local shape
};

class Module {
 public:
  Module() = default;
  virtual ~Module() = default;
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  /// Parameters of this module and all below, in order of declaration.
  std::vector<Parameter*> Parameters();
  /// Gives every parameter its global name. Called once, on the root.
  void AssignNames(const std::string& prefix = "");

 protected:
  Parameter& Declare(std::string name, const Shape& shape, ParameterSpec spec);
  /// Registers a member as a child, and returns it.
  template <typename M>
  M& Register(std::string name, M& child) {
    children_.emplace_back(std::move(name), &child);
    return child;
  }

 private:
  std::vector<std::unique_ptr<Parameter>> parameters_;
  std::vector<std::pair<std::string, Module*>> children_;
};

}  // namespace strata
