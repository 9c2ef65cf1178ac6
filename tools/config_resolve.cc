// What a configuration leaves open and what follows from several of its keys.
#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include "parallel/process_mesh.h"
#include "runtime/base/error.h"
#include "tools/config.h"

namespace strata {
namespace {

// Collects contradictions, so that a user sees all of them at once.
class Contradictions {
 public:
  void Add(const std::string& what, const std::string& hint) {
    what_ += (what_.empty() ? "" : "\n") + what;
    if (!hint.empty()) hint_ += (hint_.empty() ? "" : "\n") + hint;
  }
  // Adds what `check` throws.
  template <typename Check>
  void Collect(const Check& check) {
    try {
      check();
    } catch (const ConfigError& error) {
      Add(error.what(), error.hint());
    }
  }
  bool empty() const { return what_.empty(); }
  void Throw() const {
    if (!empty()) throw ConfigError(what_, hint_);
  }

 private:
  std::string what_, hint_;
};

std::string Ranks(int64_t count, const char* kind = "") {
  return fmt::format("{} {}rank{}", count, kind, count == 1 ? "" : "s");
}

// The divisor of `n` nearest to `wanted`.
int64_t NearestDivisor(int64_t n, int64_t wanted) {
  int64_t nearest = 1;
  const auto consider = [&](int64_t divisor) {
    if (std::abs(divisor - wanted) < std::abs(nearest - wanted)) nearest = divisor;
  };
  for (int64_t d = 1; d * d <= n; ++d) {
    if (n % d != 0) continue;
    consider(d);
    consider(n / d);
  }
  return nearest;
}

// global = micro · accumulation · data-parallel ranks. What is 0 was not given.
class BatchArithmetic {
 public:
  BatchArithmetic(TrainSection& train, const MeshShape& mesh)
      : global_(train.global_batch_size),
        micro_(train.micro_batch_size),
        accumulation_(train.gradient_accumulation_steps),
        ranks_(mesh.data()),
        ranks_text_(Ranks(ranks_, mesh.tensor > 1 ? "data-parallel " : "")) {}

  void Resolve(Contradictions& found) {
    if (global_ == 0) {
      if (micro_ == 0 && accumulation_ == 0) {
        found.Add(
            fmt::format("train: no batch size is given, for {}", ranks_text_),
            fmt::format("give train.micro_batch_size=8, say, or train.global_batch_size={}", 8 * ranks_));
        return;
      }
      micro_ = std::max<int64_t>(micro_, 1);
      accumulation_ = std::max<int64_t>(accumulation_, 1);
      global_ = micro_ * accumulation_ * ranks_;
      if (global_ > kLargest) {
        found.Add(fmt::format(
                      "train: micro_batch_size {} × gradient_accumulation_steps {} × {} = {} is more than {}",
                      micro_, accumulation_, ranks_text_, global_, kLargest),
                  "choose a smaller train.gradient_accumulation_steps or train.micro_batch_size");
      }
      return;
    }
    const bool two_open = micro_ == 0 && accumulation_ == 0;
    const int64_t unit = std::max<int64_t>(micro_, 1) * std::max<int64_t>(accumulation_, 1) * ranks_;
    const bool all_given = micro_ > 0 && accumulation_ > 0;
    if (all_given ? global_ != unit : global_ % unit != 0) {
      found.Add(Describe(all_given, unit), Suggest(all_given, unit));
    } else if (micro_ == 0) {
      micro_ = global_ / unit;
      if (two_open) accumulation_ = 1;
    } else if (accumulation_ == 0) {
      accumulation_ = global_ / unit;
    }
  }

 private:
  // That of train.global_batch_size: the tokens of a step stay an int64_t.
  static constexpr int64_t kLargest = 1'000'000;

  std::string Describe(bool all_given, int64_t unit) const {
    std::string factors;
    if (micro_ > 0) factors += fmt::format("micro_batch_size {} × ", micro_);
    if (accumulation_ > 0) factors += fmt::format("gradient_accumulation_steps {} × ", accumulation_);
    factors += ranks_text_;
    if (micro_ > 0 || accumulation_ > 0) factors += fmt::format(" = {}", unit);
    return fmt::format("train: global_batch_size {} is {} {}", global_, all_given ? "not" : "no multiple of",
                       factors);
  }

  // Every change of one key that mends it, nearest to what was given.
  std::string Suggest(bool all_given, int64_t unit) const {
    std::vector<std::string> ways;
    const auto way = [&](const char* key, int64_t value) {
      if (value > 0) ways.push_back(fmt::format("train.{}={}", key, value));
    };
    if (all_given) {
      way("global_batch_size", unit);
      const int64_t by_micro = micro_ * ranks_, by_accumulation = accumulation_ * ranks_;
      if (global_ % by_micro == 0) way("gradient_accumulation_steps", global_ / by_micro);
      if (global_ % by_accumulation == 0) way("micro_batch_size", global_ / by_accumulation);
    } else {
      way("global_batch_size", global_ / unit * unit);
      way("global_batch_size", (global_ / unit + 1) * unit);
      if (global_ % ranks_ == 0) {
        const int64_t share = global_ / ranks_;
        if (micro_ > 0) way("micro_batch_size", NearestDivisor(share, micro_));
        if (accumulation_ > 0) way("gradient_accumulation_steps", NearestDivisor(share, accumulation_));
      }
    }
    return fmt::format("choose {}", fmt::join(ways, " or "));
  }

  int64_t &global_, &micro_, &accumulation_;
  int64_t ranks_;
  std::string ranks_text_;
};

// `vocabulary`: the tokenizer's, 0 when it is not known; `tensor`: the ranks that share each layer.
void ResolveModel(ModelSection& model, int64_t vocabulary, int64_t tensor, Contradictions& found) {
  TransformerConfig& sizes = model.sizes;
  if (sizes.gated && sizes.activation != Activation::kSilu) {
    found.Add("model: gated is SwiGLU, whose activation is silu",
              "choose model.activation=silu or model.gated=false");
  }
  if (sizes.vocab_size > 0 && sizes.vocab_size < vocabulary) {
    found.Add(fmt::format("model: vocab_size {} does not hold the tokenizer's {} tokens", sizes.vocab_size,
                          vocabulary),
              fmt::format("choose model.vocab_size={} or model.vocab_size=auto", vocabulary));
  }
  if (sizes.vocab_size == 0) sizes.vocab_size = vocabulary;
  found.Collect([&] {
    // All other sizes are known without the vocabulary.
    TransformerConfig resolved = sizes;
    if (sizes.vocab_size == 0) resolved.vocab_size = tensor;
    resolved.Resolve();
    resolved.CheckTensorParallel(tensor);
    resolved.vocab_size = sizes.vocab_size;
    sizes = resolved;
  });
}

void ResolveData(DataSection& data, const TransformerConfig& sizes, Contradictions& found) {
  const int64_t max_seq_len = sizes.max_seq_len;
  if (!sizes.causal && sizes.vocab_size > 0 && data.mask_token >= sizes.vocab_size) {
    found.Add(
        fmt::format("data: mask_token {} is none of model.vocab_size {}", data.mask_token, sizes.vocab_size),
        fmt::format("choose model.vocab_size={} or model.vocab_size=auto", data.mask_token + 1));
  }
  if (data.seq_len == 0) data.seq_len = max_seq_len;
  if (data.seq_len > max_seq_len) {
    found.Add(fmt::format("data: seq_len {} is longer than model.max_seq_len {}", data.seq_len, max_seq_len),
              fmt::format("choose data.seq_len={} or model.max_seq_len={}", max_seq_len, data.seq_len));
  }
  if (!data.valid.empty() && data.valid_split > 0) {
    found.Add(fmt::format("data: valid and valid_split {} both say what validates", data.valid_split),
              "choose data.valid_split=0 or data.valid=[]");
  }
}

// Fills in what `max: auto` stands for.
void SetNaturalMax(Pacing& pacing, int64_t max) {
  if (pacing.active() && pacing.type != PacingType::kDiscrete && pacing.max == 0) pacing.max = max;
}

void CheckMix(const DataSection& data, Contradictions& found) {
  if (data.mix.empty()) return;
  if (data.mix.size() != data.train.size()) {
    found.Add(
        fmt::format("data.mix: {} weights for {} entries of data.train", data.mix.size(), data.train.size()),
        "give one for each, or none");
  }
  if (std::all_of(data.mix.begin(), data.mix.end(), [](double weight) { return weight == 0; }))
    found.Add("data.mix: all weights are 0", "give one above 0");
  if (data.curriculum.Options().active()) {
    found.Add("data.mix and data.curriculum both say which samples come",
              "leave one of them out; data.random_ltd goes with either");
  }
}

// `batch_unit` divides every global batch; 0: batches are not known.
void ResolveCurriculum(DataSection& data, int64_t global_batch_size, int64_t batch_unit,
                       Contradictions& found) {
  if (batch_unit == 0) return;
  CurriculumSection& c = data.curriculum;
  for (auto* criterion : {&c.seqlen, &c.vocab_rarity, &c.total_rarity, &c.loss, &c.own}) {
    if (!criterion->by_value) SetNaturalMax(criterion->pacing, 100);
  }
  SetNaturalMax(c.length, data.seq_len);
  SetNaturalMax(c.batch_size, global_batch_size);
  if (c.own.metric.empty() && (c.own.by_value || c.own.pacing.active())) {
    found.Add("data.curriculum.own: metric is missing", "give the name() of your DifficultyMetric");
    return;
  }
  if (c.own.metric != "" && !c.own.by_value && !c.own.pacing.active())
    found.Add("data.curriculum.own: steps is missing", "give the step at which max is reached");
  found.Collect([&] { c.Options().Validate(data.seq_len, global_batch_size, batch_unit); });
}

void ResolveRandomLtd(DataSection& data, int64_t num_layers, bool sequence_parallel, Contradictions& found) {
  Pacing& kept = data.random_ltd;
  if (!kept.active()) return;
  SetNaturalMax(kept, data.seq_len);
  found.Collect([&] { kept.Validate("data.random_ltd", 1, data.seq_len); });
  if (num_layers < 3) {
    found.Add(fmt::format("data.random_ltd: the first layer and the last compute every token, and "
                          "model.num_layers is {}",
                          num_layers),
              "choose model.num_layers=3 or more, or leave data.random_ltd out");
  }
  if (sequence_parallel) {
    found.Add("data.random_ltd: parallel.sequence_parallel cuts each micro-batch's rows over ranks",
              "choose parallel.sequence_parallel=false, or leave data.random_ltd out");
  }
}

// The steps in which a run consumes so many tokens, and never more than its max_steps.
int64_t StepsToConsume(int64_t tokens, const RunConfig& config) {
  const CurriculumOptions curriculum = config.data.curriculum.Options();
  for (int64_t step = 1;;) {
    const int64_t a_step = config.StepShape(step).tokens();
    const int64_t next = curriculum.NextChange(step);  // all steps before it are alike
    const int64_t steps = (tokens - 1) / a_step + 1;
    if (next == 0 || next > config.train.max_steps || step + steps <= next)
      return std::min(config.train.max_steps, step - 1 + steps);
    tokens -= (next - step) * a_step;
    step = next;
  }
}

// Whether the other unit's keys are left alone.
bool CheckScheduleUnit(const ScheduleSection& schedule, Contradictions& found) {
  const bool steps = schedule.by == ScheduleUnit::kSteps;
  const bool wrong = steps ? schedule.warmup_tokens > 0 || schedule.total_tokens
                           : schedule.warmup_steps > 0 || schedule.total_steps;
  if (!wrong) return true;
  found.Add(steps ? "schedule: warmup_tokens or total_tokens is given, and the schedule goes by steps"
                  : "schedule: warmup_steps or total_steps is given, and the schedule goes by tokens",
            steps ? "choose schedule.by=tokens, or give warmup_steps and total_steps"
                  : "choose schedule.by=steps, or give warmup_tokens and total_tokens");
  return false;
}

// Whether the schedule's total is known; without it there is nothing more to check. `sized`: lengths and
// batches are sound.
bool ResolveTotal(RunConfig& config, bool sized, Contradictions& found) {
  ScheduleSection& schedule = config.schedule;
  const TrainSection& train = config.train;
  if (schedule.by == ScheduleUnit::kSteps) {
    if (!schedule.total_steps) {
      schedule.total_steps =
          train.max_tokens && sized ? StepsToConsume(*train.max_tokens, config) : train.max_steps;
    }
    return true;
  }
  if (!schedule.total_tokens && schedule.by == ScheduleUnit::kTokens)
    schedule.total_tokens = train.max_tokens;
  const bool falls = schedule.type != ScheduleType::kConstant && schedule.type != ScheduleType::kInverseSqrt;
  if (schedule.type == ScheduleType::kInverseSqrt && schedule.warmup_tokens == 0) {
    found.Add("schedule: inv_sqrt by tokens is √(warmup_tokens / tokens), and warmup_tokens is 0",
              "give schedule.warmup_tokens");
  }
  if (falls && !schedule.total_tokens) {
    found.Add("schedule: it goes by tokens, and total_tokens is missing",
              schedule.by == ScheduleUnit::kTokens ? "give schedule.total_tokens or train.max_tokens"
                                                   : "give schedule.total_tokens, counted a layer");
  }
  return schedule.total_tokens.has_value();
}

void ResolveSchedule(RunConfig& config, bool sized, Contradictions& found) {
  ScheduleSection& schedule = config.schedule;
  if (!CheckScheduleUnit(schedule, found) || !ResolveTotal(config, sized, found)) return;
  const bool steps = schedule.by == ScheduleUnit::kSteps;
  const char* const unit = steps ? "steps" : "tokens";
  const int64_t total = steps ? *schedule.total_steps : *schedule.total_tokens;
  const int64_t warmup = steps ? schedule.warmup_steps : schedule.warmup_tokens;
  if (warmup > total) {
    found.Add(fmt::format("schedule: warmup_{0} {1} is more than its total of {2} {0}", unit, warmup, total),
              fmt::format("choose schedule.warmup_{}={}, or train for longer", unit, total / 10));
    return;
  }
  if (schedule.type != ScheduleType::kWsd) return;
  if (schedule.decay_start == 0) schedule.decay_start = total * 9 / 10;
  if (schedule.decay_start < warmup || schedule.decay_start > total) {
    found.Add(fmt::format("schedule: decay_start {0} is not between warmup_{3} {1} and the total of {2} {3}",
                          schedule.decay_start, warmup, total, unit),
              fmt::format("choose schedule.decay_start={}", std::max(warmup, total * 9 / 10)));
  }
}

void CheckRecompute(const RecomputeSection& recompute, const OffloadOptions& offload, Contradictions& found) {
  if (recompute.offload == Tier::kDevice) return;
  if (recompute.policy != RecomputePolicy::kFull) {
    found.Add(fmt::format("recompute: offload {} is for what policy full keeps, which is not the policy",
                          Name(recompute.offload)),
              "choose recompute.policy=full or recompute.offload=none");
  }
  if (recompute.offload == Tier::kNvme && offload.path.empty()) {
    found.Add("recompute.offload: activations rest on nvme, and zero.offload.nvme.path names no folder",
              "give a folder on a local disk");
  }
}

void CheckDevice(const DeviceSection& device, Contradictions& found) {
  if (device.type == DeviceChoice::kCpu && device.attention == AttentionChoice::kCudnn) {
    found.Add("device: attention cudnn is for GPUs, and type is cpu",
              "choose device.attention=strata or device.type=cuda");
  }
}

void CheckRanks(const ParallelSection& parallel, int world_size, Contradictions& found) {
  if (parallel.backend == Backend::kAuto && parallel.ranks > 1 && world_size == 1) {
    found.Add(
        fmt::format("parallel: ranks {} are threads, but backend auto started a single rank", parallel.ranks),
        fmt::format("choose parallel.backend=threads, or start with mpirun -n {}", parallel.ranks));
  }
}

// Ranks share the rows of a micro-batch equally.
void CheckSequenceParallel(const ParallelSection& parallel, int64_t micro_batch_size, const DataSection& data,
                           Contradictions& found) {
  const int64_t tensor = parallel.tensor, seq_len = data.seq_len, rows = micro_batch_size * seq_len;
  if (!parallel.sequence_parallel) return;
  const int64_t unit = data.curriculum.length.active() ? data.curriculum.length.Divisor() : 0;
  if (micro_batch_size * unit % tensor != 0) {
    found.Add(fmt::format("data.curriculum.length: its lengths are multiples of {}, and sequence_parallel "
                          "shares micro_batch_size {} × length over tensor {}",
                          unit, micro_batch_size, tensor),
              fmt::format("let {} divide min, max and difficulty_step, or every stage's length", tensor));
  }
  if (rows % tensor == 0) return;
  std::string choices = fmt::format("train.micro_batch_size={}", (micro_batch_size / tensor + 1) * tensor);
  if (seq_len > tensor) choices += fmt::format(" or data.seq_len={}", seq_len / tensor * tensor);
  found.Add(
      fmt::format("parallel: sequence_parallel shares the {} tokens of a micro-batch (micro_batch_size {} "
                  "× seq_len {}) over tensor {}, which does not divide them",
                  rows, micro_batch_size, seq_len, tensor),
      "choose " + choices);
}

}  // namespace

void RunConfig::Resolve(int world_size, int64_t tokenizer_vocab_size) {
  STRATA_CHECK(world_size >= 1);
  Contradictions found;
  CheckRanks(parallel, world_size, found);
  CheckDevice(device, found);
  const MeshShape mesh{world_size, static_cast<int>(parallel.tensor), static_cast<int>(parallel.expert)};
  found.Collect([&] { mesh.Validate(); });
  if (mesh.data() * mesh.tensor == world_size) BatchArithmetic(train, mesh).Resolve(found);
  ResolveModel(model, tokenizer_vocab_size, parallel.tensor, found);
  ResolveData(data, model.sizes, found);
  CheckMix(data, found);
  ResolveCurriculum(data, train.global_batch_size, train.micro_batch_size * mesh.data(), found);
  ResolveRandomLtd(data, model.sizes.num_layers, parallel.sequence_parallel, found);
  CheckSequenceParallel(parallel, train.micro_batch_size, data, found);
  found.Collect([this] { zero.Validate(); });
  if (model.sizes.moe.enabled()) {
    found.Collect([this] { model.sizes.moe.Validate(model.sizes.num_layers, parallel.expert); });
  } else if (parallel.expert > 1) {
    found.Add(fmt::format("parallel.expert: {} ranks share experts, and the model has none", parallel.expert),
              "give moe.num_experts, or parallel.expert=1");
  }
  CheckRecompute(recompute, zero.offload, found);
  ResolveSchedule(*this, found.empty(), found);
  found.Throw();
}

Schedule RunConfig::MakeSchedule() const {
  Schedule made;
  made.type = schedule.type;
  made.peak = optimizer.lr;
  const bool steps = schedule.by == ScheduleUnit::kSteps;
  made.warmup = steps ? schedule.warmup_steps : schedule.warmup_tokens;
  made.total = steps ? schedule.total_steps.value_or(train.max_steps) : schedule.total_tokens.value_or(0);
  made.min_lr_ratio = schedule.min_lr_ratio;
  made.decay_start = schedule.decay_start;
  return made;
}

TapeOptions RunConfig::MakeTapeOptions() const {
  TapeOptions made;
  made.compute_dtype = train.precision;
  made.recompute = recompute.policy;
  made.stash_collectives = recompute.stash_collectives;
  made.seed = run.seed;
  return made;
}

std::string RunConfig::DifficultyFolder() const {
  return data.curriculum.index.empty() ? JoinPath(run.dir, "difficulty") : data.curriculum.index;
}

}  // namespace strata
