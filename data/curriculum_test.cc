#include "data/curriculum.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <map>
#include <numeric>
#include <set>

#include "data/loader.h"
#include "runtime/base/error.h"
#include "runtime/base/testing.h"

namespace strata {
namespace {

using Samples = std::vector<int64_t>;

Pacing Linear(int64_t min, int64_t max, int64_t steps, int64_t difficulty_step = 1) {
  return {.min = min, .max = max, .steps = steps, .difficulty_step = difficulty_step};
}

// Samples 100, 99, … in pools of the given sizes, which begin at the given steps.
AdmissionOrder Order(const std::vector<AdmissionOrder::Pool>& pools) {
  AdmissionOrder order{Samples(static_cast<size_t>(pools.back().end)), pools};
  for (size_t i = 0; i < order.samples.size(); ++i) order.samples[i] = 100 - static_cast<int64_t>(i);
  return order;
}

// A curriculum by samples alone; its criteria are in the order of admission.
CurriculumSampler Sampler(const AdmissionOrder& order, int64_t batch, uint64_t seed = 5) {
  return {{}, order, 8, batch, seed};
}

Samples Take(CurriculumSampler& sampler, int64_t first, int64_t last) {
  Samples samples;
  for (int64_t step = first; step <= last; ++step) {
    const GlobalBatch batch = sampler.Next(step);
    samples.insert(samples.end(), batch.samples.begin(), batch.samples.end());
  }
  return samples;
}

const std::vector<AdmissionOrder::Pool> kPools = {{1, 7}, {3, 12}, {4, 13}, {9, 40}};

TEST_CASE("only what is admitted is drawn, and nothing a second time before all admitted have come") {
  for (int64_t batch : {1, 3, 5, 16}) {
    const AdmissionOrder order = Order(kPools);
    CurriculumSampler sampler = Sampler(order, batch);
    std::set<int64_t> known, left;  // what is admitted, and of it what has not come in this round
    for (int64_t step = 1; step <= 60; ++step) {
      for (const auto& pool : kPools) {
        if (step < pool.first_step) continue;
        for (int64_t i = 0; i < pool.end; ++i) {
          const int64_t sample = order.samples[static_cast<size_t>(i)];
          if (known.insert(sample).second) left.insert(sample);
        }
      }
      for (int64_t sample : sampler.Next(step).samples) {
        if (left.empty()) left = known;
        INFO("step " << step << ", sample " << sample);
        REQUIRE(left.erase(sample) == 1);
      }
    }
  }
}

TEST_CASE("a curriculum stopped and resumed at any step is the unbroken one") {
  CurriculumSampler unbroken = Sampler(Order(kPools), 5);
  const Samples expected = Take(unbroken, 1, 30);
  for (int64_t stop = 0; stop <= 30; ++stop) {
    CurriculumSampler before = Sampler(Order(kPools), 5), after = Sampler(Order(kPools), 5);
    Samples samples = Take(before, 1, stop);
    after.Restore(before.state());
    CHECK(after.state() == before.state());
    for (int64_t sample : Take(after, stop + 1, 30)) samples.push_back(sample);
    CHECK(samples == expected);
  }
  CurriculumSampler other_seed = Sampler(Order(kPools), 5, 6);
  CHECK(Take(other_seed, 1, 30) != expected);
}

// Where each of twelve samples of three clusters stands in a round: every place must be as likely as any
// other. Chi-square with 11 degrees of freedom a sample; its bound is at odds of about one to a million.
TEST_CASE("what the pool holds comes in uniform order, whichever step admitted it") {
  const int rounds = 12000;
  const AdmissionOrder order = Order({{1, 1}, {2, 5}, {3, 12}});
  CurriculumSampler sampler = Sampler(order, 12);
  std::map<int64_t, std::vector<int>> at_place;
  for (int64_t sample : order.samples) at_place[sample].resize(12);
  for (int round = 0; round < rounds; ++round) {
    const Samples drawn = sampler.Next(3).samples;
    for (size_t place = 0; place < 12; ++place) ++at_place.at(drawn[place])[place];
  }
  for (const auto& [sample, counts] : at_place) {
    double chi_square = 0;
    for (int count : counts) chi_square += std::pow(count - rounds / 12.0, 2) / (rounds / 12.0);
    INFO(sample);
    CHECK(chi_square < 48);
  }
}

TEST_CASE("a state of another curriculum, or of another sampler, is refused") {
  CurriculumSampler sampler = Sampler(Order(kPools), 5);
  Take(sampler, 1, 10);
  const SamplerState state = sampler.state();
  CurriculumSampler fewer_pools = Sampler(Order({{1, 7}, {9, 40}}), 5);
  CHECK_THROWS_WITH(fewer_pools.Restore(state),
                    Catch::Contains("40 samples in 4 pools") && Catch::Contains("the run's 40 in 2"));
  SamplerState damaged = state;
  damaged["taken.0"] = 8;
  CHECK_THROWS_WITH(sampler.Restore(damaged), Catch::Contains("8 of 7 samples of pool 0"));
  damaged = state;
  damaged.erase("taken.3");
  CHECK_THROWS_WITH(sampler.Restore(damaged), Catch::Contains("taken.3"));
  CHECK(sampler.state() == state);
  const auto hint = [](strata::Sampler& to, const SamplerState& from) -> std::string {
    try {
      to.Restore(from);
    } catch (const CheckpointError& error) {
      return error.hint();
    }
    return "";
  };
  ShuffledSampler shuffled(40, 5, 5);
  CHECK_THAT(hint(sampler, shuffled.state()), Catch::Contains("trained without a curriculum"));
  CHECK_THAT(hint(shuffled, state), Catch::Contains("trained with a curriculum"));
}

TEST_CASE("length and batch follow their pacings, and are the run's beyond the ends of these") {
  CurriculumOptions options;
  options.length = {.type = PacingType::kDiscrete, .stages = {{2, 8}, {4, 12}}};
  options.batch_size = Linear(2, 6, 3, 2);
  for (bool reshape : {false, true}) {
    options.reshape = reshape;
    CurriculumSampler sampler(options, AdmissionOrder::All(50), 32, 10, 1);
    const int64_t batches[] = {2, 4, 6, 10, 10, 10}, lengths[] = {8, 8, 12, 12, 32, 32};
    const int64_t rows[] = {4, 4, 2, 2, 1, 1};
    for (int64_t step = 1; step <= 6; ++step) {
      const GlobalBatch batch = sampler.Next(step);
      CHECK(std::ssize(batch.samples) == batches[step - 1]);
      CHECK(batch.seq_len == lengths[step - 1]);
      CHECK(batch.rows_per_sample == (reshape ? rows[step - 1] : 1));
      CHECK(batch.difficulty ==
            std::map<std::string, int64_t>{{"length", lengths[step - 1]}, {"batch_size", batches[step - 1]}});
    }
  }
  Samples changes;
  for (int64_t step = 1; (step = options.NextChange(step)) != 0;) changes.push_back(step);
  CHECK(changes == Samples{2, 3, 4, 5});
}

// Sample i is the tokens 100 i, 100 i + 1, …, each to predict the next.
class Counting : public Dataset {
 public:
  int64_t num_samples() const override { return 50; }
  int64_t seq_len() const override { return 32; }
  uint64_t fingerprint() const override { return 1; }
  void Get(int64_t sample, int64_t begin, SampleRow row) const override {
    std::iota(row.inputs.begin(), row.inputs.end(), static_cast<int32_t>(100 * sample + begin));
    std::iota(row.targets.begin(), row.targets.end(), static_cast<int32_t>(100 * sample + begin + 1));
  }
};

TEST_CASE("ranks together see each step's rows, cut or reshaped, whatever their number") {
  const Counting dataset;
  CurriculumOptions options;
  options.batch_size = Linear(12, 24, 4, 12);
  options.length = Linear(8, 24, 5, 8);
  for (bool reshape : {false, true}) {
    options.reshape = reshape;
    const auto sampler = [&] {
      return std::make_unique<CurriculumSampler>(options, AdmissionOrder::All(50), 32, 36, 7);
    };
    const auto reference = sampler();
    std::vector<std::vector<int32_t>> expected(7);  // the inputs of all rows, by step
    for (int64_t step = 1; step <= 6; ++step) {
      const GlobalBatch batch = reference->Next(step);
      for (int64_t sample : batch.samples) {
        for (int64_t i = 0; i < batch.rows_per_sample * batch.seq_len; ++i)
          expected[static_cast<size_t>(step)].push_back(static_cast<int32_t>(100 * sample + i));
      }
    }
    for (int64_t ranks : {1, 2, 3, 6}) {
      INFO((reshape ? "reshaped" : "cut") << " on " << ranks);
      std::vector<std::vector<int32_t>> seen(7);
      for (int64_t rank = 0; rank < ranks; ++rank) {
        Loader loader(dataset, sampler(), {.micro_batch_size = 2, .dp_rank = rank, .dp_size = ranks});
        for (Batch batch = loader.Next(); batch.step <= 6; batch = loader.Next()) {
          auto& inputs = seen[static_cast<size_t>(batch.step)];
          const auto first = static_cast<size_t>(batch.first_row * batch.seq_len);
          inputs.resize(std::max(inputs.size(), first + batch.inputs.size()), -1);
          std::copy(batch.inputs.begin(), batch.inputs.end(), inputs.begin() + static_cast<int64_t>(first));
          CHECK(batch.batch_size == std::ssize(batch.sample_ids));
          CHECK(batch.valid_tokens == batch.batch_size * batch.seq_len);
          CHECK(batch.difficulty.at("length") == batch.seq_len);
          for (int64_t row = 0; row < batch.batch_size; ++row) {
            const auto token = static_cast<size_t>(row * batch.seq_len);
            CHECK(batch.sample_ids[static_cast<size_t>(row)] == batch.inputs[token] / 100);
            CHECK(batch.targets[token + static_cast<size_t>(batch.seq_len) - 1] ==
                  batch.inputs[token] + batch.seq_len);
          }
        }
      }
      CHECK(seen == expected);
    }
  }
}

// Difficulties that are functions of the sample's number.
class ByNumber : public DifficultyMetric {
 public:
  ByNumber(std::string name, int64_t factor) : name_(std::move(name)), factor_(factor) {}
  std::string name() const override { return name_; }
  double Of(int64_t sample) const { return static_cast<double>((sample + factor_) * factor_ % 41); }
  void Measure(const Batch& batch, std::span<double> difficulty) override {
    for (size_t row = 0; row < difficulty.size(); ++row) difficulty[row] = Of(batch.sample_ids[row]);
  }

 private:
  std::string name_;
  int64_t factor_;
};

TEST_CASE("a sample is admitted at the first step at which every criterion lets it in") {
  const testing::TemporaryFolder folder;
  const Counting dataset;
  FileSystem& fs = PosixFileSystem();
  ByNumber metrics[] = {{"first", 17}, {"second", 29}};
  std::vector<std::unique_ptr<DifficultyFile>> files;
  for (ByNumber& metric : metrics) {
    MeasureDifficulty(fs, folder.path(), dataset, metric, 8, {});
    IndexDifficulty(fs, folder.path(), dataset, metric);
    files.push_back(DifficultyFile::Open(fs, DifficultyPath(folder.path(), metric.name()), dataset));
  }
  std::vector<CurriculumOptions::Criterion> criteria = {{"first", false, Linear(30, 90, 20, 5)},
                                                        {"second", true, Linear(25, 39, 10)}};
  const AdmissionOrder order = AdmissionOrder::Of(criteria, files);
  // Where each sample stands among all by the first metric, equal ones by number.
  std::vector<int64_t> sorted(50), rank(50);
  std::iota(sorted.begin(), sorted.end(), 0);
  std::stable_sort(sorted.begin(), sorted.end(),
                   [&](int64_t a, int64_t b) { return metrics[0].Of(a) < metrics[0].Of(b); });
  for (int64_t i = 0; i < 50; ++i) rank[static_cast<size_t>(sorted[static_cast<size_t>(i)])] = i;

  size_t pool = 0;
  Samples before;
  for (int64_t step = 1; step <= 25; ++step) {
    Samples expected;
    for (int64_t sample = 0; sample < 50; ++sample) {
      const bool first = static_cast<double>(rank[static_cast<size_t>(sample)]) <
                         0.01 * 50 * static_cast<double>(criteria[0].pacing.At(step));
      const bool second = metrics[1].Of(sample) <= static_cast<double>(criteria[1].pacing.At(step));
      if (first && second) expected.push_back(sample);
    }
    INFO("step " << step);
    const bool grows = expected != before;
    if (grows && step > 1) ++pool;
    CHECK(order.pools[pool].first_step <= step);
    CHECK((order.pools[pool].first_step == step) == grows);
    Samples admitted(order.samples.begin(), order.samples.begin() + order.pools[pool].end);
    std::sort(admitted.begin(), admitted.end());
    CHECK(admitted == expected);
    before = expected;
  }
  CHECK(pool + 1 == order.pools.size());
  CHECK(order.samples.size() == before.size());  // the tenth beyond the 90th percentile never comes
  CHECK(pool > 5);

  criteria[0].pacing = Linear(1, 100, 1000);
  criteria[1].pacing = Linear(0, 40, 1000);
  const auto refusal = [&]() -> std::string {
    try {
      AdmissionOrder::Of(criteria, files);
    } catch (const DataError& error) {
      return error.what();
    }
    return "";
  };
  CHECK_THAT(refusal(), Catch::Contains("none of the 50 samples is admitted at step 1: first admits 1, "
                                        "second admits 1"));
}

TEST_CASE("batches that micro-batches on the ranks do not divide are refused with the numbers") {
  CurriculumOptions options;
  const auto refusal = [&]() -> std::string {
    try {
      options.Validate(32, 24, 4);
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "";
  };
  options.batch_size = Linear(4, 24, 10, 4);
  CHECK(refusal().empty());
  options.batch_size.difficulty_step = 2;
  CHECK(refusal() ==
        "data.curriculum.batch_size: its sizes are multiples of 2, and a step takes multiples "
        "of 4: micro_batch_size × ranks");
  options.batch_size = {.type = PacingType::kDiscrete, .stages = {{5, 8}, {6, 14}}};
  CHECK(refusal().find("multiples of 2") != std::string::npos);
  options.batch_size = Linear(4, 28, 10, 4);
  CHECK(refusal() == "data.curriculum.batch_size: max is 28");
  options = {};
  options.length = Linear(8, 64, 10);
  CHECK(refusal() == "data.curriculum.length: max is 64");
  options = {};
  options.criteria = {{"loss", false, Linear(1, 101, 10)}};
  CHECK(refusal() == "data.curriculum.loss: max is 101");
  options.criteria[0].by_value = true;
  CHECK(refusal().empty());
}

}  // namespace
}  // namespace strata
