#include "data/pacing.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "runtime/base/error.h"

namespace strata {

int64_t Pacing::At(int64_t t) const {
  STRATA_CHECK(active() && t >= 1) << t;
  if (type == PacingType::kDiscrete) {
    const auto stage =
        std::find_if(stages.begin(), stages.end(), [t](const auto& each) { return t <= each[0]; });
    return stage == stages.end() ? stages.back()[1] : (*stage)[1];
  }
  if (t >= steps) return max;
  const double x = static_cast<double>(t) / static_cast<double>(steps);
  const double grown = type == PacingType::kRoot ? std::pow(x, 1 / root) : x;
  const auto difficulty =
      static_cast<int64_t>(std::floor(grown * static_cast<double>(max - min) + static_cast<double>(min)));
  return std::clamp(difficulty - difficulty % difficulty_step, min, max);
}

int64_t Pacing::End() const { return type == PacingType::kDiscrete ? stages.back()[0] : steps; }

int64_t Pacing::NextChange(int64_t t) const {
  const int64_t now = At(t);
  int64_t low = t, high = End() + 1;  // the change is behind low and not behind high
  if (At(high) == now) return 0;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (At(middle) == now ? low : high) = middle;
  }
  return high;
}

int64_t Pacing::Divisor() const {
  if (type != PacingType::kDiscrete) return std::gcd(std::gcd(min, max), difficulty_step);
  int64_t divisor = 0;
  for (const auto& stage : stages) divisor = std::gcd(divisor, stage[1]);
  return divisor;
}

namespace {

// What Pacing::Validate checks; `where` opens every message.
class PacingCheck {
 public:
  PacingCheck(const Pacing& pacing, const std::string& where, int64_t least, int64_t most)
      : p_(pacing), where_(where), least_(least), most_(most) {}

  void Stages() const {
    if (p_.stages.empty())
      Refuse("pacing is discrete, and no stages are given", "give stages: [[last step, difficulty], …]");
    if (p_.steps != 0 || p_.min != 0 || p_.max != 0)
      Refuse("pacing is discrete: its stages say all, and min, max or steps are given", "leave them out");
    int64_t step = 0, difficulty = 0;
    for (const auto& stage : p_.stages) {
      if (stage.size() != 2)
        Refuse(StrCat("a stage of ", stage.size(), " numbers"), "a stage is [last step, difficulty]");
      if (stage[0] <= step) {
        Refuse(StrCat("a stage ends at step ", stage[0], ", the one before it at step ", step),
               "order the stages by their last step");
      }
      Range("a stage's difficulty", stage[1]);
      if (stage[1] < difficulty)
        Refuse(StrCat("difficulty falls from ", difficulty, " to ", stage[1]), "let it grow");
      step = stage[0];
      difficulty = stage[1];
    }
  }

  void Growth() const {
    if (!p_.stages.empty())
      Refuse("stages are given, and pacing is not discrete", "set pacing: discrete, or leave stages out");
    if (p_.steps < 1) Refuse("steps is missing", "give the step at which max is reached");
    if (p_.type == PacingType::kRoot && !(p_.root > 0))
      Refuse(StrCat("root is ", p_.root), "choose 2, the square root, or another number above 0");
    Range("min", p_.min);
    Range("max", p_.max);
    if (p_.min > p_.max) Refuse(StrCat("min ", p_.min, " is above max ", p_.max), "exchange them");
    const int64_t unit = p_.difficulty_step;
    if (unit < 1) Refuse(StrCat("difficulty_step is ", unit), "choose 1 or more");
    // A min that is merely the least there can be is a beginning, not a multiple: percentile 1.
    const int64_t wrong = p_.max % unit != 0 ? p_.max : p_.min % unit != 0 && p_.min > least_ ? p_.min : 0;
    if (wrong != 0) {
      const int64_t below = wrong - wrong % unit;
      Refuse(StrCat("difficulty_step ", unit, " does not divide ", wrong == p_.max ? "max " : "min ", wrong),
             StrCat("choose ", below >= least_ ? StrCat(below, " or ") : "", below + unit,
                    ", or another difficulty_step"));
    }
  }

 private:
  [[noreturn]] void Refuse(const std::string& what, const std::string& hint) const {
    throw ConfigError(StrCat(where_, ": ", what), hint);
  }
  void Range(const char* name, int64_t difficulty) const {
    if (difficulty >= least_ && difficulty <= most_) return;
    Refuse(StrCat(name, " is ", difficulty), StrCat("choose one from ", least_, " to ", most_));
  }

  const Pacing& p_;
  const std::string& where_;
  int64_t least_, most_;
};

}  // namespace

void Pacing::Validate(const std::string& where, int64_t least, int64_t most) const {
  const PacingCheck check(*this, where, least, most);
  if (type == PacingType::kDiscrete) {
    check.Stages();
  } else {
    check.Growth();
  }
}

}  // namespace strata
