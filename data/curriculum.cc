#include "data/curriculum.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "runtime/base/error.h"
#include "runtime/base/rng.h"

namespace strata {

void CurriculumOptions::Validate(int64_t seq_len, int64_t batch_size, int64_t batch_unit) const {
  for (const Criterion& criterion : criteria) {
    const std::string where = "data.curriculum." + criterion.metric;
    if (criterion.by_value) {
      criterion.pacing.Validate(where, 0, std::numeric_limits<uint32_t>::max());
    } else {
      criterion.pacing.Validate(where, 1, 100);
    }
  }
  if (length.active()) length.Validate("data.curriculum.length", 1, seq_len);
  if (!this->batch_size.active()) return;
  const std::string where = "data.curriculum.batch_size";
  this->batch_size.Validate(where, 1, batch_size);
  if (this->batch_size.Divisor() % batch_unit != 0) {
    throw ConfigError(
        StrCat(where, ": its sizes are multiples of ", this->batch_size.Divisor(),
               ", and a step takes multiples of ", batch_unit, ": micro_batch_size × ranks"),
        StrCat("let ", batch_unit, " divide min, max and difficulty_step, or every stage's size"));
  }
}

CurriculumOptions::Shape CurriculumOptions::At(int64_t step, int64_t seq_len, int64_t batch_size) const {
  Shape shape{batch_size, 1, seq_len};
  if (this->batch_size.active() && step <= this->batch_size.End())
    shape.batch_size = this->batch_size.At(step);
  if (length.active() && step <= length.End()) {
    shape.seq_len = length.At(step);
    if (reshape) shape.rows_per_sample = seq_len / shape.seq_len;
  }
  return shape;
}

int64_t CurriculumOptions::NextChange(int64_t step) const {
  int64_t next = 0;
  const auto consider = [&](int64_t change) {
    if (change > step && (next == 0 || change < next)) next = change;
  };
  for (const Criterion& criterion : criteria) consider(criterion.pacing.NextChange(step));
  for (const Pacing* pacing : {&length, &batch_size}) {
    if (!pacing->active()) continue;
    consider(pacing->NextChange(step));
    consider(pacing->End() + 1);
  }
  return next;
}

AdmissionOrder AdmissionOrder::All(int64_t num_samples) {
  AdmissionOrder order;
  order.samples.resize(static_cast<size_t>(num_samples));
  std::iota(order.samples.begin(), order.samples.end(), 0);
  order.pools = {{1, num_samples}};
  return order;
}

namespace {

// {first step, how many samples it admits} of each difficulty of a criterion.
std::vector<AdmissionOrder::Pool> PoolsOf(const CurriculumOptions::Criterion& criterion,
                                          const DifficultyFile& file) {
  std::vector<AdmissionOrder::Pool> pools;
  for (int64_t step = 1; step != 0; step = criterion.pacing.NextChange(step)) {
    const int64_t difficulty = criterion.pacing.At(step);
    pools.push_back(
        {step, criterion.by_value ? file.CountUpToValue(difficulty) : file.CountUpToPercentile(difficulty)});
  }
  return pools;
}

}  // namespace

AdmissionOrder AdmissionOrder::Of(const std::vector<CurriculumOptions::Criterion>& criteria,
                                  const std::vector<std::unique_ptr<DifficultyFile>>& files) {
  STRATA_CHECK(!criteria.empty() && criteria.size() == files.size());
  const int64_t num_samples = files.front()->num_samples();
  std::vector<std::vector<Pool>> of_criterion;
  std::vector<int64_t> steps;  // at which any of them admits more
  for (size_t c = 0; c < criteria.size(); ++c) {
    STRATA_CHECK(files[c]->num_samples() == num_samples);
    of_criterion.push_back(PoolsOf(criteria[c], *files[c]));
    for (const Pool& pool : of_criterion.back()) steps.push_back(pool.first_step);
  }
  std::sort(steps.begin(), steps.end());
  steps.erase(std::unique(steps.begin(), steps.end()), steps.end());

  // The number of the step at which each sample is in by all criteria; steps.size(): never.
  std::vector<uint32_t> admitted(static_cast<size_t>(num_samples), 0);
  for (size_t c = 0; c < criteria.size(); ++c) {
    int64_t begin = 0;
    const auto admit = [&](int64_t end, size_t step) {
      for (; begin < end; ++begin) {
        uint32_t& at = admitted[static_cast<size_t>(files[c]->Ordered(begin))];
        at = std::max(at, static_cast<uint32_t>(step));
      }
    };
    for (const Pool& pool : of_criterion[c]) {
      admit(pool.end, static_cast<size_t>(std::lower_bound(steps.begin(), steps.end(), pool.first_step) -
                                          steps.begin()));
    }
    admit(num_samples, steps.size());
  }

  // Sorted by counting.
  std::vector<int64_t> counts(steps.size() + 1, 0);
  for (uint32_t at : admitted) ++counts[at];
  if (counts.front() == 0) {
    std::string what = StrCat("none of the ", num_samples, " samples is admitted at step 1:");
    for (size_t c = 0; c < criteria.size(); ++c) {
      what += StrCat(c == 0 ? " " : ", ", criteria[c].metric, " admits ", of_criterion[c].front().end);
    }
    throw DataError(what, StrCat("begin with a larger data.curriculum.", criteria.front().metric, ".min"));
  }
  std::vector<int64_t> place(counts.size());
  std::exclusive_scan(counts.begin(), counts.end(), place.begin(), int64_t{0});
  AdmissionOrder order;
  order.samples.resize(static_cast<size_t>(place.back()));
  for (size_t i = 0; i < steps.size(); ++i) {
    if (counts[i] > 0) order.pools.push_back({steps[i], place[i] + counts[i]});
  }
  for (int64_t sample = 0; sample < num_samples; ++sample) {
    const uint32_t at = admitted[static_cast<size_t>(sample)];
    if (at < steps.size()) order.samples[static_cast<size_t>(place[at]++)] = sample;
  }
  return order;
}

CurriculumSampler::CurriculumSampler(CurriculumOptions options, AdmissionOrder order, int64_t seq_len,
                                     int64_t global_batch_size, uint64_t seed)
    : options_(std::move(options)),
      order_(std::move(order)),
      seq_len_(seq_len),
      global_batch_size_(global_batch_size),
      seed_(seed),
      taken_(order_.pools.size(), 0) {
  STRATA_CHECK(!order_.pools.empty() && order_.pools.front().first_step == 1 &&
               order_.pools.front().end > 0 && global_batch_size >= 1);
}

int64_t CurriculumSampler::Newcomers(size_t pool) const {
  return order_.pools[pool].end - (pool == 0 ? 0 : order_.pools[pool - 1].end);
}

// A sample of the first `pools` pools, each that is left in this round as likely as any other.
int64_t CurriculumSampler::Draw(size_t pools) {
  int64_t left = order_.pools[pools - 1].end;
  for (size_t i = 0; i < pools; ++i) left -= taken_[i];
  if (left == 0) {
    ++round_;
    std::fill(taken_.begin(), taken_.end(), 0);
    left = order_.pools[pools - 1].end;
  }
  const auto words = RandomStream{seed_, Purpose("curriculum"), 0}.Block(static_cast<uint64_t>(drawn_++));
  auto at = static_cast<int64_t>((uint64_t{words[1]} << 32 | words[0]) % static_cast<uint64_t>(left));
  size_t pool = 0;
  for (;; ++pool) {
    const int64_t here = Newcomers(pool) - taken_[pool];
    if (at < here) break;
    at -= here;
  }
  // Newcomers come in an order of their own, so that what is left of them need not be kept.
  const EpochPermutation order(static_cast<uint64_t>(Newcomers(pool)),
                               seed_ ^ uint64_t{Purpose("curriculum", static_cast<uint32_t>(pool))} << 32,
                               static_cast<uint32_t>(round_));
  const int64_t first = pool == 0 ? 0 : order_.pools[pool - 1].end;
  return order_.samples[static_cast<size_t>(
      first + static_cast<int64_t>(order(static_cast<uint64_t>(taken_[pool]++))))];
}

GlobalBatch CurriculumSampler::Next(int64_t step) {
  const CurriculumOptions::Shape shape = options_.At(step, seq_len_, global_batch_size_);
  GlobalBatch batch;
  batch.seq_len = shape.seq_len;
  batch.rows_per_sample = shape.rows_per_sample;
  for (const auto& criterion : options_.criteria)
    batch.difficulty[criterion.metric] = criterion.pacing.At(step);
  if (options_.length.active()) batch.difficulty["length"] = shape.seq_len;
  if (options_.batch_size.active()) batch.difficulty["batch_size"] = shape.batch_size;
  const auto pools =
      static_cast<size_t>(std::partition_point(order_.pools.begin(), order_.pools.end(),
                                               [step](const auto& pool) { return pool.first_step <= step; }) -
                          order_.pools.begin());
  batch.samples.reserve(static_cast<size_t>(shape.batch_size));
  for (int64_t i = 0; i < shape.batch_size; ++i) batch.samples.push_back(Draw(pools));
  return batch;
}

SamplerState CurriculumSampler::state() const {
  SamplerState state = {{"samples", std::ssize(order_.samples)},
                        {"pools", std::ssize(order_.pools)},
                        {"round", round_},
                        {"drawn", drawn_}};
  for (size_t pool = 0; pool < taken_.size(); ++pool) state[StrCat("taken.", pool)] = taken_[pool];
  return state;
}

void CurriculumSampler::Restore(const SamplerState& state) {
  const auto get = [&](const std::string& key) {
    const auto it = state.find(key);
    if (it == state.end() || it->second < 0) {
      throw CheckpointError(StrCat("the sampler's state has no valid \"", key, "\""),
                            state.contains("cursor")
                                ? "the checkpoint was trained without a curriculum: resume without one"
                                : "the checkpoint is damaged");
    }
    return it->second;
  };
  const int64_t pools = get("pools"), samples = get("samples");
  if (pools != std::ssize(order_.pools) || samples != std::ssize(order_.samples)) {
    throw CheckpointError(StrCat("the checkpoint's curriculum admits ", samples, " samples in ", pools,
                                 " pools, the run's ", order_.samples.size(), " in ", order_.pools.size()),
                          "resume with the data and the curriculum that it was trained with");
  }
  const int64_t round = get("round"), drawn = get("drawn");
  std::vector<int64_t> taken;
  for (size_t pool = 0; pool < taken_.size(); ++pool) {
    taken.push_back(get(StrCat("taken.", pool)));
    if (taken.back() <= Newcomers(pool)) continue;
    throw CheckpointError(StrCat("the sampler's state has taken ", taken.back(), " of ", Newcomers(pool),
                                 " samples of pool ", pool),
                          "the checkpoint is damaged");
  }
  round_ = round;
  drawn_ = drawn;
  taken_ = std::move(taken);
}

}  // namespace strata
