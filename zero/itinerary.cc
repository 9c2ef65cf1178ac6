#include "zero/itinerary.h"

#include <algorithm>

#include "runtime/base/error.h"

namespace strata {

void Itinerary::BeginTraining() {
  Complete();
  size_ = 2 * units_.size();
  next_ = 0;
}

void Itinerary::Complete() { ComeBy(size_); }

void Itinerary::ComeBy(size_t end) {
  while (next_ < end) {
    enter_(next_);
    leave_(next_++);
  }
}

size_t Itinerary::Find(const Unit& wanted, Phase phase) const {
  const size_t begin = phase == Phase::kForward ? 0 : units_.size();
  const size_t end = std::min(size_, begin + units_.size());
  for (size_t visit = std::max(next_, begin); visit < end; ++visit) {
    if (&unit(visit) == &wanted) return visit;
  }
  return size_;
}

void Itinerary::Enter(const Unit& unit, Phase phase) {
  size_t visit = Find(unit, phase);
  if (visit == size_ && phase == Phase::kForward) {
    Complete();
    size_ = units_.size();
    next_ = 0;
    visit = Find(unit, phase);
  }
  STRATA_CHECK(visit < size_)
      << "unit " << unit.name << " is entered " << (phase == Phase::kForward ? "forward" : "backward")
      << " out of the order of the model's Units(), or more often than it stands there";
  ComeBy(visit);
  enter_(visit);
}

void Itinerary::Leave(const Unit& left) {
  STRATA_CHECK(next_ < size_ && &unit(next_) == &left) << "unit " << left.name << " is left before others";
  leave_(next_++);
}

}  // namespace strata
