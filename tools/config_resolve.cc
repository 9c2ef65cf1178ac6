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

void ResolveData(DataSection& data, int64_t max_seq_len, Contradictions& found) {
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

// `batch_tokens`: tokens a step, 0 when they are not known.
void ResolveSchedule(ScheduleSection& schedule, const TrainSection& train, int64_t batch_tokens,
                     Contradictions& found) {
  if (!schedule.total_steps) {
    schedule.total_steps = train.max_steps;
    if (train.max_tokens && batch_tokens > 0) {
      schedule.total_steps = std::min(train.max_steps, (*train.max_tokens - 1) / batch_tokens + 1);
    }
  }
  const int64_t total = *schedule.total_steps, warmup = schedule.warmup_steps;
  if (warmup > total) {
    found.Add(fmt::format("schedule: warmup_steps {} is more than its total of {} steps", warmup, total),
              fmt::format("choose schedule.warmup_steps={}, or train for longer", total / 10));
    return;
  }
  if (schedule.type != ScheduleType::kWsd) return;
  if (schedule.decay_start == 0) schedule.decay_start = total * 9 / 10;
  if (schedule.decay_start < warmup || schedule.decay_start > total) {
    found.Add(fmt::format("schedule: decay_start {} is not between warmup_steps {} and the total of {} steps",
                          schedule.decay_start, warmup, total),
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

void CheckRanks(const ParallelSection& parallel, int world_size, Contradictions& found) {
  if (parallel.backend == Backend::kAuto && parallel.ranks > 1 && world_size == 1) {
    found.Add(
        fmt::format("parallel: ranks {} are threads, but backend auto started a single rank", parallel.ranks),
        fmt::format("choose parallel.backend=threads, or start with mpirun -n {}", parallel.ranks));
  }
}

// Ranks share the rows of a micro-batch equally.
void CheckSequenceParallel(const ParallelSection& parallel, int64_t micro_batch_size, int64_t seq_len,
                           Contradictions& found) {
  const int64_t tensor = parallel.tensor, rows = micro_batch_size * seq_len;
  if (!parallel.sequence_parallel || rows % tensor == 0) return;
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
  const MeshShape mesh{world_size, static_cast<int>(parallel.tensor), static_cast<int>(parallel.expert)};
  found.Collect([&] { mesh.Validate(); });
  if (mesh.data() * mesh.tensor == world_size) BatchArithmetic(train, mesh).Resolve(found);
  ResolveModel(model, tokenizer_vocab_size, parallel.tensor, found);
  ResolveData(data, model.sizes.max_seq_len, found);
  CheckSequenceParallel(parallel, train.micro_batch_size, data.seq_len, found);
  found.Collect([this] { zero.Validate(); });
  if (model.sizes.moe.enabled()) {
    found.Collect([this] { model.sizes.moe.Validate(model.sizes.num_layers, parallel.expert); });
  } else if (parallel.expert > 1) {
    found.Add(fmt::format("parallel.expert: {} ranks share experts, and the model has none", parallel.expert),
              "give moe.num_experts, or parallel.expert=1");
  }
  CheckRecompute(recompute, zero.offload, found);
  ResolveSchedule(schedule, train, found.empty() ? train.global_batch_size * data.seq_len : 0, found);
  found.Throw();
}

Schedule RunConfig::MakeSchedule() const {
  Schedule made;
  made.type = schedule.type;
  made.peak = optimizer.lr;
  made.warmup_steps = schedule.warmup_steps;
  made.total_steps = schedule.total_steps.value_or(train.max_steps);
  made.min_lr_ratio = schedule.min_lr_ratio;
  made.decay_start = schedule.decay_start;
  return made;
}

}  // namespace strata
