#include "tools/data_efficiency_keys.h"

namespace strata {
namespace {

constexpr int64_t kMany = 1'000'000'000'000;

// How a difficulty grows; `what` it is, and what `max: auto` stands for ("" where it must be given).
std::vector<YamlKey> PacingKeys(Pacing& pacing, const std::string& what, const std::string& natural_max) {
  const Codec<int64_t> difficulty = Integer<int64_t>(0, kMany);
  return {
      Bind("pacing", pacing.type,
           OneOf<PacingType>({{"linear", PacingType::kLinear},
                              {"root", PacingType::kRoot},
                              {"discrete", PacingType::kDiscrete}}),
           "How it grows from `min` to `max`: as a line, as a root, or by `stages`.",
           {"schedule_type", "curriculum_type"}),
      Bind("min", pacing.min, difficulty, what + ", at the beginning.", {"min_difficulty", "min_value"}),
      natural_max.empty()
          ? Bind("max", pacing.max, difficulty, "The same at the end.", {"max_difficulty", "max_value"})
          : Bind("max", pacing.max, OrWord<int64_t>("auto", 0, Integer<int64_t>(1, kMany)),
                 "The same at the end. `auto`: " + natural_max + ".", {"max_difficulty", "max_value"}),
      Bind("steps", pacing.steps, Integer<int64_t>(0, kMany), "The step at which `max` is reached.",
           {"total_curriculum_step", "total_layer_token_step", "require_steps"}),
      Bind("root", pacing.root, Number({.low = 0, .low_open = true}),
           "With `pacing: root`: (step / `steps`)^(1 / `root`). 2 is the square root.", {"root_degree"}),
      Bind("difficulty_step", pacing.difficulty_step, Integer<int64_t>(1, kMany),
           "Rounded down to a multiple of this, but never below `min`.", {"seq_per_step"}),
      Bind("stages", pacing.stages, ListOf(ListOf(Integer<int64_t>(0, kMany), 2)),
           "With `pacing: discrete`: `[[last step, difficulty], …]`.", {"max_step", "difficulty"}),
  };
}

YamlSection PacedSection(const std::string& name, const std::string& doc, std::vector<YamlKey> keys,
                         const std::vector<YamlKey>& pacing, std::vector<std::string> aliases = {}) {
  keys.insert(keys.end(), pacing.begin(), pacing.end());
  return {name, doc, std::move(keys), std::move(aliases)};
}

// By value there is no natural max; by percentile it is all samples.
YamlSection CriterionKeys(const std::string& key, CurriculumOptions::Criterion& criterion,
                          const std::string& doc, std::vector<YamlKey> keys = {}) {
  keys.push_back(Bind("by", criterion.by_value, OneOf<bool>({{"percentile", false}, {"value", true}}),
                      "Admits the easiest so many percent of all samples, or those of at most this "
                      "difficulty.",
                      {"difficulty_type"}));
  return PacedSection(
      "data.curriculum." + key, doc, std::move(keys),
      PacingKeys(criterion.pacing, "Percentile (1 to 100) or value", "100 with `by: percentile`"));
}

}  // namespace

std::vector<YamlSection> DataEfficiencyKeys(DataSection& data) {
  CurriculumSection& c = data.curriculum;
  return {
      {"data.curriculum",
       "Easy samples, short sequences and small batches first (docs/data-efficiency.md). A sample is drawn "
       "once every metric that is given admits it; a section that is not given is not in use. `strata "
       "analyze` measures the metrics.",
       {Bind("index", c.index, OrWord<std::string>("null", "", Text()),
             "Folder of the metrics' files. `null`: `difficulty` in `run.dir`.",
             {"index_to_sample_path", "index_to_metric_path"})},
       {"curriculum_learning"}},
      CriterionKeys("seqlen", c.seqlen, "By a sample's number of tokens that have a target."),
      CriterionKeys("vocab_rarity", c.vocab_rarity,
                    "By the mean of −log p over a sample's tokens, p their share of the data, in thousandths "
                    "of a nat."),
      CriterionKeys("total_rarity", c.total_rarity, "By the sum of −log p over a sample's tokens, in nats."),
      CriterionKeys("loss", c.loss, "By the loss of a model on the sample, in thousandths of a nat a token."),
      CriterionKeys("own", c.own, "By a metric of your own (DifficultyMetric in data/difficulty.h).",
                    {Bind("metric", c.own.metric, OrWord<std::string>("null", "", Text()), "Its name.")}),
      PacedSection("data.curriculum.length", "Short sequences first.",
                   {Bind("mode", c.reshape, OneOf<bool>({{"truncate", false}, {"reshape", true}}),
                         "A sample loses its end, or is cut into as many rows as it holds.")},
                   PacingKeys(c.length, "Tokens of a row", "`data.seq_len`")),
      PacedSection("data.curriculum.batch_size",
                   "Small batches first. Every size is a multiple of `train.micro_batch_size` × "
                   "data-parallel ranks.",
                   {}, PacingKeys(c.batch_size, "Samples a step", "`train.global_batch_size`")),
      PacedSection(
          "data.random_ltd",
          "Random layer-wise token drop: in training all layers but the first and the last compute a "
          "random part of each sequence's tokens.",
          {}, PacingKeys(data.random_ltd, "Tokens of a sequence that a layer keeps", "`data.seq_len`"),
          {"random_ltd"}),
  };
}

}  // namespace strata
