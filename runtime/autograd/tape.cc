#include "runtime/autograd/tape.h"

#include <algorithm>
#include <string>
#include <utility>

namespace strata {
namespace {

// Restores a variable when a scope is left, by exception too.
template <typename T>
class Restore {
 public:
  explicit Restore(T& variable, T value) : variable_(variable), old_(std::exchange(variable, value)) {}
  ~Restore() { variable_ = old_; }

 private:
  T& variable_;
  T old_;
};

// The inputs of a unit between its two runs: here, or in a store.
class KeptInputs {
 public:
  KeptInputs(std::vector<Tensor> inputs, ActivationStore* store) : inputs_(std::move(inputs)), store_(store) {
    for (Tensor& input : inputs_) {
      tickets_.push_back(store_ && input.defined() ? store_->Put(std::exchange(input, {})) : kHere);
    }
  }
  std::vector<Tensor> Take() {
    for (size_t i = inputs_.size(); i-- > 0;) {
      if (tickets_[i] != kHere) inputs_[i] = store_->Take(tickets_[i]);
    }
    return std::move(inputs_);
  }

 private:
  static constexpr int64_t kHere = -1;
  std::vector<Tensor> inputs_;
  std::vector<int64_t> tickets_;
  ActivationStore* store_;
};

}  // namespace

GradTarget Backprop::Din(int i) {
  STRATA_CHECK(Needs(i)) << "gradient of an input that wants none";
  Tensor& gradient = tape_->frame_->gradients[slots_[i]];
  if (!gradient.defined()) {
    gradient = tape_->Empty(inputs_[i].shape, inputs_[i].dtype);
    return {gradient.view(), false};
  }
  if (!gradient.Unique()) {
    Tensor copy = tape_->Empty(gradient.shape(), gradient.dtype());
    tape_->executor().axpby({.a = gradient.view(), .b = {}, .out = copy.view()});
    gradient = std::move(copy);
  }
  return {gradient.view(), true};
}

void Backprop::GiveDin(int i, Tensor gradient) {
  if (Needs(i)) tape_->AddGradient(slots_[i], std::move(gradient));
}

Tape::Tape(const Executor& executor, ParamResidency& residency, TapeOptions options)
    : executor_(executor),
      residency_(residency),
      options_(options),
      recording_(options.training),
      root_frame_(std::make_unique<Frame>()) {
  frame_ = root_frame_.get();
  frame_->id = next_frame_++;
}

Tape::~Tape() {
  if (options_.activation_store) options_.activation_store->Clear();
}

Tensor Tape::Empty(const Shape& shape, DType dtype) const {
  return Tensor::Empty(executor_.device().allocator(), shape, dtype, MemoryTag::kActivations);
}

Tensor Tape::Upload(const TensorView& host) const {
  Tensor tensor = Empty(host.shape, host.dtype);
  Device& device = executor_.device();
  device.Copy(tensor.view().data, host.data, host.num_bytes(), device.compute_stream());
  return tensor;
}

int64_t Tape::SlotOf(const Tensor& tensor) const {
  return tensor.defined() && tensor.impl_->frame == frame_->id ? tensor.impl_->slot : -1;
}

int64_t Tape::NewSlot(Tensor& tensor) {
  tensor.impl_->frame = frame_->id;
  tensor.impl_->slot = static_cast<int64_t>(frame_->gradients.size());
  frame_->gradients.emplace_back();
  return tensor.impl_->slot;
}

Tensor Tape::WithRowOffset(int64_t row_offset, const std::function<Tensor()>& body) {
  Restore<int64_t> rows(options_.row_offset, row_offset);
  return body();
}

void Tape::Record(const char* op, std::vector<Tensor> inputs, std::span<Parameter* const> parameters,
                  const std::vector<Tensor*>& outputs, BackwardFn backward) {
  for (const Tensor& input : inputs) {
    STRATA_CHECK(!input.defined() || !input.impl_->root_only) << "a loss used as an input of " << op;
  }
  if (!recording_) return;
  const bool wanted =
      std::any_of(inputs.begin(), inputs.end(), [&](const Tensor& t) { return SlotOf(t) >= 0; }) ||
      std::any_of(parameters.begin(), parameters.end(), [](Parameter* p) { return p && p->requires_grad; });
  if (!wanted) return;
  Node node{op, frame_->interval, options_.row_offset, {}, {}, {}, std::move(backward)};
  for (const Tensor& input : inputs) {
    node.inputs.push_back(SlotOf(input));
    node.input_views.push_back(input.defined() ? input.view() : TensorView());
  }
  for (Tensor* output : outputs) node.outputs.push_back(NewSlot(*output));
  frame_->nodes.push_back(std::move(node));
}

void Tape::MarkRootOnly(Tensor& tensor) { tensor.impl_->root_only = true; }

SavedTensor Tape::Save(const Tensor& tensor) const {
  SavedTensor saved;
  if (!tensor.defined()) return saved;
  if (tensor.impl_->recipe) {
    saved.recipe_ = tensor.impl_->recipe;
  } else {
    saved.tensor_ = tensor;
  }
  return saved;
}

void Tape::SetRecipe(Tensor& tensor, std::function<Tensor()> recipe) const {
  if (recording_ && options_.recompute == RecomputePolicy::kSelective)
    tensor.impl_->recipe = std::move(recipe);
}

GradTarget Tape::WeightGrad(Parameter& parameter) {
  return {residency_.Gradient(parameter), std::exchange(parameter.gradient_defined, true)};
}

std::vector<Tensor> Tape::RunUnit(Unit& unit, std::vector<Tensor> inputs, const UnitForward& forward,
                                  bool recomputable) {
  STRATA_CHECK(frame_->interval < 0) << "unit " << unit.name << " entered inside another";
  residency_.Acquire(unit, Phase::kForward);
  std::vector<Tensor> outputs;
  {
    frame_->intervals.push_back({&unit});
    Restore<int> interval(frame_->interval, static_cast<int>(frame_->intervals.size()) - 1);
    outputs = recording_ && recomputable && options_.recompute == RecomputePolicy::kFull
                  ? RunRecomputed(inputs, forward)
                  : forward(inputs);
  }
  // A recipe may read its unit's parameters, which another unit's backward does not have.
  for (const Tensor& output : outputs) {
    if (output.defined()) output.impl_->recipe = nullptr;
  }
  residency_.Release(unit, Phase::kForward);
  return outputs;
}

Tensor Tape::RunUnit(Unit& unit, Tensor input, const std::function<Tensor(const Tensor&)>& forward) {
  std::vector<Tensor> inputs;
  inputs.push_back(std::move(input));
  return RunUnit(unit, std::move(inputs),
                 [forward](std::span<const Tensor> in) { return std::vector<Tensor>{forward(in[0])}; })[0];
}

std::vector<Tensor> Tape::RunRecomputed(const std::vector<Tensor>& inputs, const UnitForward& forward) {
  auto stash = std::make_shared<Stash>();
  std::vector<Tensor> outputs;
  {
    Restore<bool> off(recording_, false);
    Restore<Stash*> fill(stash_out_, options_.stash_collectives ? stash.get() : nullptr);
    outputs = forward(inputs);
  }
  std::vector<Tensor*> output_handles;
  for (Tensor& output : outputs) output_handles.push_back(&output);
  // A unit that is run again always wants its backward: it holds the trained parameters, if any.
  Parameter trained;
  Parameter* const always[] = {&trained};
  KeptInputs kept(inputs, options_.activation_store);
  Record("recompute", inputs, always, output_handles, [this, kept, forward, stash](Backprop& outer) mutable {
    Frame frame;
    frame.id = next_frame_++;
    std::vector<Tensor> replayed_inputs = kept.Take();
    std::vector<int64_t> slots(replayed_inputs.size(), -1);
    Frame* outer_frame = frame_;
    {
      Restore<Frame*> enter(frame_, &frame);
      Restore<bool> on(recording_, true);
      Restore<Stash*> take(stash_in_, options_.stash_collectives ? stash.get() : nullptr);
      for (size_t i = 0; i < slots.size(); ++i) {
        Tensor& input = replayed_inputs[i];
        if (input.defined()) input = input.Detached();
        if (outer.Needs(static_cast<int>(i))) slots[i] = NewSlot(input);
      }
      std::vector<Tensor> replayed = forward(replayed_inputs);
      for (size_t i = 0; i < replayed.size(); ++i) {
        const int64_t slot = SlotOf(replayed[i]);
        if (slot >= 0 && outer.dout(static_cast<int>(i)).defined()) {
          AddGradient(slot, outer.TakeDout(static_cast<int>(i)));
        }
      }
      replayed.clear();
      replayed_inputs.clear();
      BackwardFrame(frame);
    }
    STRATA_CHECK(frame_ == outer_frame) << "frames out of order";
    for (size_t i = 0; i < slots.size(); ++i) {
      if (slots[i] >= 0 && frame.gradients[slots[i]].defined()) {
        outer.GiveDin(static_cast<int>(i), std::move(frame.gradients[slots[i]]));
      }
    }
  });
  return outputs;
}

Tensor Tape::StashOrReplay(const char* op, const Shape& shape, const std::function<Tensor()>& run) {
  if (stash_in_) {
    STRATA_CHECK(!stash_in_->empty() && std::string_view(stash_in_->front().op) == op &&
                 stash_in_->front().shape == shape)
        << "a unit run again asks for " << op << " " << shape.ToString()
        << ", which its first run did not make there";
    Tensor tensor = std::move(stash_in_->front().tensor);
    stash_in_->pop_front();
    return tensor;
  }
  Tensor tensor = run();
  if (stash_out_) stash_out_->push_back({op, shape, tensor});
  return tensor;
}

void Tape::AddGradient(int64_t slot, Tensor gradient) {
  Tensor& held = frame_->gradients[slot];
  if (!held.defined()) {
    held = std::move(gradient);
    return;
  }
  Tensor& target = held.Unique() ? held : gradient;
  Tensor out = target.Unique() ? target : Empty(held.shape(), held.dtype());
  executor_.axpby({.a = held.view(), .b = gradient.view(), .out = out.view()});
  held = std::move(out);
}

Tensor Tape::Ones(const TensorView& like) const {
  Tensor ones = Empty(like.shape, like.dtype);
  executor_.fill({.out = ones.view(), .value = 1.0f});
  return ones;
}

void Tape::Backward(std::span<const Tensor> roots) {
  STRATA_CHECK(options_.training) << "backward of an evaluation";
  for (const Tensor& root : roots) {
    const int64_t slot = SlotOf(root);
    if (slot >= 0) AddGradient(slot, Ones(root.view()));
  }
  BackwardFrame(*frame_);
  frame_->gradients.clear();
  frame_->intervals.clear();
}

void Tape::BackwardFrame(Frame& frame) {
  int current = -1;
  auto leave = [&] {
    if (current >= 0) residency_.Release(*frame.intervals[current].unit, Phase::kBackward);
    current = -1;
  };
  while (!frame.nodes.empty()) {
    Node node = std::move(frame.nodes.back());
    frame.nodes.pop_back();
    if (node.interval != current) {
      leave();
      current = node.interval;
      if (current >= 0) residency_.Acquire(*frame.intervals[current].unit, Phase::kBackward);
    }
    Backprop backprop;
    backprop.tape_ = this;
    bool reached = false;
    for (int64_t slot : node.outputs) {
      backprop.douts_.push_back(std::move(frame.gradients[slot]));
      frame.gradients[slot] = Tensor();
      reached |= backprop.douts_.back().defined();
    }
    if (!reached) continue;
    backprop.slots_ = std::move(node.inputs);
    backprop.inputs_ = std::move(node.input_views);
    Restore<int64_t> row_offset(options_.row_offset, node.row_offset);
    node.backward(backprop);
  }
  leave();
}

}  // namespace strata
