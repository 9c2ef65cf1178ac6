// Itinerary: the one order in which every rank comes by the units of a model, forward and back.
//
// Collectives of a unit must be started in the same order by all ranks. The order is therefore not that in
// which a rank happens to enter units, but that of the list: a rank whose flow skips a unit comes by it all
// the same, when it enters a later one or when the pass ends.
//
// Visits 0 … L−1 are the units forward, L … 2L−1 the same backward. Ownership: units outlive it.
// Threading: the rank's thread.
#pragma once

#include <functional>
#include <vector>

#include "runtime/autograd/parameter.h"

namespace strata {

class Itinerary {
 public:
  using OnVisit = std::function<void(size_t visit)>;
  /// `units` in forward order; a unit that is entered more than once a pass stands as often. `enter` and
  /// `leave` are called for every visit, in order.
  Itinerary(std::vector<const Unit*> units, OnVisit enter, OnVisit leave)
      : units_(std::move(units)), enter_(std::move(enter)), leave_(std::move(leave)) {}

  /// A pass forward and back begins; what the last one left out is made up for.
  void BeginTraining();
  /// Comes by all visits that are still to come.
  void Complete();
  /// Forgets the rest of a pass that was given up, without a visit.
  void Abandon() { next_ = size_; }

  /// The rank enters a unit. Entering one forward that the pass has gone past begins a pass without backward.
  void Enter(const Unit& unit, Phase phase);
  void Leave(const Unit& unit);

  /// Visits of the pass: L, or 2L when it goes back.
  size_t size() const { return size_; }
  /// The first visit that has not been left.
  size_t next() const { return next_; }
  size_t num_units() const { return units_.size(); }
  bool training() const { return size_ > units_.size(); }
  const Unit& unit(size_t visit) const {
    return *(visit < units_.size() ? units_[visit] : units_[2 * units_.size() - 1 - visit]);
  }

 private:
  void ComeBy(size_t end);
  // The first visit of `unit` from the current one on, in that phase; size() when there is none.
  size_t Find(const Unit& unit, Phase phase) const;

  std::vector<const Unit*> units_;
  OnVisit enter_, leave_;
  size_t size_ = 0;
  size_t next_ = 0;  // the first visit not left yet
};

}  // namespace strata
