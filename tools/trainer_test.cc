// A run stopped and resumed is the run unbroken; what a step computes, whatever its targets and gradients
// are.
#include "tools/trainer.h"

#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <limits>
#include <map>
#include <mutex>
#include <set>

#include "data/difficulty.h"
#include "models/transformer.h"
#include "runtime/base/log.h"
#include "runtime/base/rng.h"
#include "runtime/base/testing.h"

namespace strata {
namespace {

using testing::TemporaryFolder;

// Saves wait for the disk.
const bool in_memory = access("/dev/shm", W_OK) == 0 && setenv("TMPDIR", "/dev/shm", 1) == 0;

constexpr int64_t kVocab = 61, kLen = 8;
constexpr double kInf = std::numeric_limits<double>::infinity();

// Rows of random tokens; a row's first token is the number of its sample.
class NumberedRows : public Dataset {
 public:
  // How many targets of a sample count; the others, at the row's begin, are ignored.
  using ValidTargets = std::function<int64_t(int64_t sample)>;
  explicit NumberedRows(
      int64_t samples, ValidTargets valid = [](int64_t) { return kLen; }, int64_t seq_len = kLen)
      : ends{samples}, samples_(samples), seq_len_(seq_len), valid_(std::move(valid)) {}

  int64_t num_samples() const override { return samples_; }
  int64_t seq_len() const override { return seq_len_; }
  uint64_t fingerprint() const override { return static_cast<uint64_t>(samples_); }
  std::vector<int64_t> corpus_ends() const override { return ends; }
  void Get(int64_t sample, int64_t begin, SampleRow row) const override {
    const RandomStream random{1, Purpose("rows"), static_cast<uint32_t>(sample)};
    for (size_t i = 0; i < row.inputs.size(); ++i) {
      const uint64_t t = static_cast<uint64_t>(begin) + i;
      const bool counts = static_cast<int64_t>(t) >= seq_len_ - valid_(sample);
      row.inputs[i] = t == 0 ? static_cast<int32_t>(sample) : static_cast<int32_t>(random.Bits(t) % kVocab);
      row.targets[i] = counts ? static_cast<int32_t>(random.Bits(1000 + t) % kVocab) : kIgnoredTarget;
    }
  }

  std::vector<int64_t> ends;  // of corpora

 private:
  int64_t samples_, seq_len_;
  ValidTargets valid_;
};

TransformerConfig SmallSizes(double dropout, int64_t seq_len, int64_t layers) {
  TransformerConfig sizes;
  sizes.num_layers = layers;
  sizes.hidden_size = 16;
  sizes.num_heads = 2;
  sizes.max_seq_len = seq_len;
  sizes.vocab_size = kVocab;
  sizes.dropout = dropout;
  sizes.Resolve();
  return sizes;
}

// A small transformer that is watched: the first token of each row it was trained on (a whole sample's
// number), in order; the lengths it was evaluated at; and, for each step, a factor that its gradients are
// falsified by.
class WatchedModel : public Model {
 public:
  using Factor = std::function<double(int64_t step)>;
  WatchedModel(const TransformerConfig& sizes, const ProcessMesh& mesh, bool sequence_parallel, Factor factor)
      : inner_(sizes, &mesh, sequence_parallel), factor_(std::move(factor)) {
    Register("inner", inner_);
  }

  std::vector<Unit*> Units() override { return inner_.Units(); }
  std::vector<Tensor> Loss(Tape& tape, const ModelInput& input, float grad_scale) override {
    if (!tape.options().training) {
      evaluated.insert({input.seq_len, input.kept_tokens});
      return inner_.Loss(tape, input, grad_scale);
    }
    for (int64_t row = 0; row < input.batch; ++row)
      samples.push_back(input.tokens.view().as<int32_t>()[row * input.seq_len]);
    return inner_.Loss(tape, input, static_cast<float>(grad_scale * factor_(tape.options().step)));
  }
  Tensor Logits(Tape& tape, const ModelInput& input, KvCache* cache) override {
    return inner_.Logits(tape, input, cache);
  }
  std::unique_ptr<KvCache> NewCache(Tape& tape, int64_t batch, int64_t max_len) override {
    return inner_.NewCache(tape, batch, max_len);
  }
  double FlopsPerToken(int64_t seq_len) const override { return inner_.FlopsPerToken(seq_len); }
  double FlopsPerTokenWithDrop(int64_t seq_len, int64_t kept_tokens) const override {
    return inner_.FlopsPerTokenWithDrop(seq_len, kept_tokens);
  }
  int64_t ConsumedLayerTokens(int64_t rows, int64_t seq_len, int64_t kept_tokens) const override {
    return inner_.ConsumedLayerTokens(rows, seq_len, kept_tokens);
  }
  int64_t vocab_size() const override { return kVocab; }
  int64_t max_seq_len() const override { return inner_.max_seq_len(); }

  std::vector<int64_t> samples;
  std::set<std::pair<int64_t, int64_t>> evaluated;  // {length, kept tokens}

 private:
  Transformer inner_;
  Factor factor_;
};

struct Scenario {
  std::string yaml;  // of the configuration
  int ranks = 2;
  std::string dir;
  double dropout = 0;
  std::vector<int64_t> stops;       // the run is stopped after these steps and resumed
  std::vector<std::string> zero{};  // added to the configuration of each leg, if given
  NumberedRows data{25};
  int64_t layers = 2;
  std::function<double(int rank, int64_t step)> factor = [](int, int64_t) { return 1.0; };
};

struct Outcome {
  std::vector<std::vector<int64_t>> samples;          // by rank
  std::set<std::pair<int64_t, int64_t>> evaluated;    // {length, kept tokens}
  std::map<std::string, std::vector<float>> weights;  // whole
  std::map<std::string, std::vector<float>> state;    // by kind and parameter: whole
  std::string metrics;
};

RunConfig ConfigOf(const Scenario& scenario) {
  RunConfig config = RunConfig::Parse(scenario.yaml, "test", {});
  config.run.dir = scenario.dir;
  config.data.seq_len = config.model.sizes.max_seq_len = scenario.data.seq_len();
  config.Resolve(scenario.ranks, kVocab);
  return config;
}

// Runs `drive` on every rank of the scenario, and gathers what came of it.
void Drive(const Scenario& scenario, const RunConfig& config, Outcome& outcome,
           const std::function<void(Trainer&, int rank)>& drive) {
  std::mutex mutex;
  outcome.samples.resize(static_cast<size_t>(scenario.ranks));
  ThreadJob::Run(scenario.ranks, [&](Transport& transport) {
    const int rank = transport.rank();
    auto device = NewCpuDevice(1), host_device = NewCpuDevice(1);
    Executor executor(*device, CpuKernels()), host(*host_device, CpuKernels());
    TrafficLog traffic;
    CommOptions options;
    options.traffic = &traffic;
    CommEngine comm(transport, options);
    ProcessMesh mesh(comm, {scenario.ranks, static_cast<int>(config.parallel.tensor), 1});
    WatchedModel model(SmallSizes(scenario.dropout, scenario.data.seq_len(), scenario.layers), mesh,
                       config.parallel.sequence_parallel,
                       [&](int64_t step) { return scenario.factor(rank, step); });
    Trainer trainer({.config = config,
                     .executor = executor,
                     .mesh = mesh,
                     .file_system = PosixFileSystem(),
                     .traffic = traffic,
                     .model = model,
                     .train = scenario.data,
                     .valid = &scenario.data,
                     .tokenizer = "tok",
                     .host = &host});
    drive(trainer, rank);
    auto& samples = outcome.samples[static_cast<size_t>(rank)];
    samples.insert(samples.end(), model.samples.begin(), model.samples.end());
    // Puts this rank's elements of a tensor to their places in the whole.
    const auto place = [&](std::vector<float>& whole, const Parameter& parameter, int64_t begin,
                           int64_t count, const float* values) {
      std::lock_guard lock(mutex);
      whole.resize(static_cast<size_t>(parameter.global_shape.num_elements()));
      ForEachGlobalStretch(parameter, begin, count, [&](int64_t local, int64_t global, int64_t n) {
        std::copy_n(values + (local - begin), n, whole.begin() + global);
      });
    };
    {
      std::lock_guard lock(mutex);
      outcome.evaluated.insert(model.evaluated.begin(), model.evaluated.end());
    }
    const auto named = [&](auto& tensors, const std::string& name) -> std::vector<float>& {
      std::lock_guard lock(mutex);
      return tensors[name];
    };
    for (const StateSlice& slice : trainer.engine().SlicesToSave()) {
      std::vector<float> values(static_cast<size_t>(slice.count));
      slice.Read(0, values.data(), slice.count);
      place(named(outcome.state, slice.kind + " " + slice.parameter->name), *slice.parameter, slice.begin,
            slice.count, values.data());
    }
    trainer.engine().ForEachParameter([&](const Parameter& parameter, const TensorView& part) {
      place(named(outcome.weights, parameter.name), parameter, 0, part.num_elements(), part.f32());
    });
  });
}

// Trains a scenario to its end, with its stops.
Outcome Train(Scenario scenario) {
  TemporaryFolder folder;
  scenario.dir = folder.path();
  Outcome outcome;
  std::vector<int64_t> ends = scenario.stops;
  ends.push_back(-1);
  for (size_t i = 0; i < ends.size(); ++i) {
    Scenario leg = scenario;
    if (!scenario.zero.empty()) leg.yaml += scenario.zero[i];
    RunConfig config = ConfigOf(leg);
    if (i > 0) config.run.resume = Resume::kLatest;
    std::atomic<bool> stop = false;
    leg.factor = [&](int rank, int64_t step) {
      if (rank + 1 == scenario.ranks && step == ends[i]) stop = true;  // one rank hears of it
      return scenario.factor(rank, step);
    };
    const std::atomic<bool> never = false;
    Drive(leg, config, outcome, [&](Trainer& trainer, int rank) {
      trainer.Start();
      const bool finished = trainer.Run(rank + 1 == scenario.ranks ? stop : never);
      STRATA_CHECK(finished == (ends[i] < 0)) << "stopped";
    });
  }
  outcome.metrics = ReadFile(PosixFileSystem(), JoinPath(folder.path(), "metrics.jsonl"));
  return outcome;
}

// The lines without what depends on time and on where state rests; the writing of a checkpoint beside
// training has messages of its own.
std::vector<nlohmann::json> Timeless(const std::string& metrics) {
  std::vector<nlohmann::json> lines;
  std::istringstream text(metrics);
  for (std::string line; std::getline(text, line);) {
    auto json = nlohmann::json::parse(line);
    for (const char* key : {"step_time_s", "tokens_per_s", "flops_per_s", "memory", "disk", "traffic"})
      json.erase(key);
    lines.push_back(json);
  }
  return lines;
}

void CheckSame(const Outcome& a, const Outcome& b) {
  CHECK(a.samples == b.samples);
  CHECK(a.weights == b.weights);
  CHECK(a.state == b.state);
  CHECK(Timeless(a.metrics) == Timeless(b.metrics));
}

// 25 samples in batches of 4: an epoch ends within step 7.
constexpr char kCommon[] =
    "train: {global_batch_size: 4, micro_batch_size: 1, max_steps: 12, log_interval: 1, eval_interval: 3, "
    "eval_batches: 2, precision: fp32}\n"
    "schedule: {warmup_steps: 4}\n";

TEST_CASE("stopped anywhere and resumed, a run is the unbroken one, bit for bit") {
  Scenario scenario;
  scenario.dropout = 0.1;
  for (const char* rest : {"zero: {stage: 0}\ncheckpoint: {async: false}", "zero: {stage: 2}\n",
                           "zero: {stage: 3}\ncheckpoint: {interval: 1}"}) {
    scenario.yaml = std::string(kCommon) + rest;
    scenario.stops = {};
    const Outcome unbroken = Train(scenario);
    REQUIRE(Timeless(unbroken.metrics).size() == 12);
    for (const std::vector<int64_t>& stops :
         std::vector<std::vector<int64_t>>{{1}, {2, 5}, {3, 6}, {7, 8}, {11}}) {
      scenario.stops = stops;
      INFO(rest << " stopped at " << stops.front());
      CheckSame(Train(scenario), unbroken);
    }
  }
}

TEST_CASE("five steps, stop, five steps are ten steps, wherever state rests before and after") {
  TemporaryFolder disk;
  const auto resting = [&](int stage, const std::string& tier) {
    return StrCat("zero: {reduce: micro_batch, stage: ", stage, ", offload: {optimizer: ", tier,
                  ", parameters: ", tier, ", gradients: ", tier, ", nvme: {path: ", disk.path(),
                  ", sub_group_bytes: 4096}}}\n");
  };
  Scenario scenario;
  scenario.dropout = 0.1;
  scenario.yaml = kCommon;
  scenario.yaml.replace(scenario.yaml.find("max_steps: 12"), 13, "max_steps: 10");
  scenario.yaml += "checkpoint: {interval: 3}\n";  // saves are under way beside the next steps
  scenario.zero = {resting(0, "none")};
  const Outcome unbroken = Train(scenario);
  scenario.stops = {5};
  const std::vector<std::pair<std::string, std::string>> legs = {
      {resting(0, "host"), resting(0, "host")}, {resting(1, "nvme"), resting(1, "nvme")},
      {resting(3, "nvme"), resting(3, "nvme")}, {resting(3, "nvme"), resting(0, "none")},
      {resting(2, "none"), resting(2, "nvme")}, {resting(0, "nvme"), resting(3, "host")}};
  for (const auto& [before, after] : legs) {
    INFO(before << after);
    scenario.zero = {before, after};
    CheckSame(Train(scenario), unbroken);
  }
}

TEST_CASE("tensor-parallel ranks train what one rank in their place does, and resume bit for bit") {
  Scenario scenario;
  scenario.dropout = 0.1;
  // The step of a rank whose gradients are no numbers is skipped by all.
  scenario.factor = [](int rank, int64_t step) { return rank == 1 && step == 5 ? kInf : 1.0; };
  scenario.yaml = kCommon;
  const Outcome plain = Train(scenario);
  for (const char* rest : {"zero: {stage: 1}\nparallel: {tensor: 2}\n",
                           "zero: {stage: 3}\nparallel: {tensor: 2, sequence_parallel: true}\n"}) {
    INFO(rest);
    Scenario cut = scenario;
    cut.yaml += rest;
    cut.ranks = 4;
    const Outcome outcome = Train(cut);
    for (size_t rank = 0; rank < 4; ++rank) CHECK(outcome.samples[rank] == plain.samples[rank / 2]);
    const auto lines = Timeless(outcome.metrics), expected = Timeless(plain.metrics);
    REQUIRE(lines.size() == expected.size());
    for (size_t i = 0; i < lines.size(); ++i) {
      INFO(lines[i] << expected[i]);
      for (const auto& [key, value] : expected[i].items()) {
        REQUIRE(lines[i].contains(key));
        if (key == "loss" || key == "valid_loss" || (key == "grad_norm" && value.is_number())) {
          CHECK(lines[i].at(key).get<double>() == Approx(value.get<double>()).epsilon(1e-5));
        } else {
          CHECK(lines[i].at(key) == value);
        }
      }
    }
    cut.stops = {3, 6};
    CheckSame(Train(cut), outcome);
  }
}

TEST_CASE("a run that fell behind its metrics continues them without duplicates") {
  Scenario scenario;
  scenario.yaml = std::string(kCommon) + "checkpoint: {interval: 4, async: false}";
  const Outcome unbroken = Train(scenario);
  TemporaryFolder folder;
  scenario.dir = folder.path();
  RunConfig config = ConfigOf(scenario);
  const auto failing = [&](int rank, int64_t step) {
    if (rank == 1 && step == 7) throw DataError("out of luck");
    return 1.0;
  };
  Scenario broken = scenario;
  broken.factor = failing;
  Outcome lost, resumed;
  const std::atomic<bool> never = false;
  const auto run = [&](Trainer& trainer, int) {
    trainer.Start();
    trainer.Run(never);
  };
  REQUIRE_THROWS_AS(Drive(broken, config, lost, run), DataError);
  const std::string path = JoinPath(folder.path(), "metrics.jsonl");
  REQUIRE(Timeless(ReadFile(PosixFileSystem(), path)).size() == 6);
  config.run.resume = Resume::kAuto;
  Drive(scenario, config, resumed, run);
  CHECK(resumed.samples[0].size() == 8 * 2);  // of steps 5 to 12
  CHECK(resumed.weights == unbroken.weights);
  CHECK(Timeless(ReadFile(PosixFileSystem(), path)) == Timeless(unbroken.metrics));
}

TEST_CASE("half of the parameters frozen: resumed bit for bit, and they do not move") {
  Scenario scenario;
  scenario.yaml = std::string(kCommon) + "model: {freeze: [embedding, blocks.0.]}\nzero: {stage: 1}";
  const Outcome unbroken = Train(scenario);
  scenario.stops = {4};
  CheckSame(Train(scenario), unbroken);

  Outcome start;
  TemporaryFolder folder;
  scenario.dir = folder.path();
  Drive(scenario, ConfigOf(scenario), start, [](Trainer& trainer, int) { trainer.Start(); });
  for (const auto& [name, values] : unbroken.weights) {
    INFO(name);
    const bool frozen = name.starts_with("embedding") || name.starts_with("blocks.0.");
    CHECK((values == start.weights.at(name)) == frozen);
    CHECK(unbroken.state.contains("exp_avg " + name) == !frozen);
  }
}

TEST_CASE("fp16: an overflow on one rank skips the step on all, and the scaler's state resumes") {
  Scenario scenario;
  scenario.yaml = std::string(kCommon);
  scenario.yaml.replace(scenario.yaml.find("fp32"), 4, "fp16");
  scenario.factor = [](int rank, int64_t step) {
    return rank == 1 && (step == 2 || step == 5 || step == 9) ? 1e6 : 1.0;
  };
  const Outcome unbroken = Train(scenario);
  // The first overflow is forgiven, every further one halves the scale.
  const double scales[] = {65536, 65536, 65536, 65536, 65536, 32768,
                           32768, 32768, 32768, 16384, 16384, 16384};
  const auto lines = Timeless(unbroken.metrics);
  for (size_t i = 0; i < lines.size(); ++i) {
    const bool skipped = i + 1 == 2 || i + 1 == 5 || i + 1 == 9;
    INFO(lines[i]);
    CHECK(lines[i].at("loss_scale") == scales[i]);
    CHECK(lines[i].value("skipped", false) == skipped);
    CHECK(lines[i].at("loss").is_number());
  }
  // A skipped step holds the schedule too: the rate of the warm-up, of steps taken.
  CHECK(lines[2].at("lr") == lines[1].at("lr"));
  for (int64_t stop : {2, 3, 5}) {
    scenario.stops = {stop};
    INFO("stopped at " << stop);
    CheckSame(Train(scenario), unbroken);
  }
}

TEST_CASE(
    "an infinity, then NaN, in one rank's gradients: every rank skips, no state moves, training goes on") {
  for (double poison : {kInf, std::nan("")}) {
    for (int stage : {0, 2, 3}) {
      Scenario scenario;
      TemporaryFolder folder;
      scenario.dir = folder.path();
      scenario.yaml = StrCat(kCommon, "zero: {stage: ", stage, "}");
      scenario.factor = [&](int rank, int64_t step) { return rank == 1 && step == 3 ? poison : 1.0; };
      Outcome outcome;
      std::map<std::pair<int, int64_t>, std::vector<float>> state;  // after a step, by rank
      std::atomic<int> skips = 0;
      std::mutex mutex;
      const std::string log = JoinPath(folder.path(), "train.log");
      SetLogFile(log);
      Drive(scenario, ConfigOf(scenario), outcome, [&](Trainer& trainer, int rank) {
        trainer.Start();
        for (int64_t step = 1; step <= 5; ++step) {
          const StepReport report = trainer.TrainStep();
          skips += report.outcome.skipped;
          std::lock_guard lock(mutex);
          CHECK(report.outcome.skipped == (step == 3));
          CHECK(std::isfinite(report.loss));
          CHECK(trainer.engine().optimizer_step() == (step < 3 ? step : step - 1));
          for (const StateSlice& slice : trainer.engine().SlicesToSave()) {
            auto& flat = state[{rank, step}];
            const size_t end = flat.size();
            flat.resize(end + static_cast<size_t>(slice.count));
            slice.Read(0, flat.data() + end, slice.count);
          }
        }
      });
      SetLogFile("");
      CHECK(skips == 2);
      for (int rank : {0, 1}) {
        CHECK(state[{rank, 3}] == state[{rank, 2}]);
        CHECK(state[{rank, 4}] != state[{rank, 3}]);
        for (float value : state[{rank, 5}]) REQUIRE(std::isfinite(value));
      }
      CHECK_THAT(ReadFile(PosixFileSystem(), log), Catch::Contains("step 3: a gradient is not finite"));
    }
  }
}

// The gradient of the first step (Adam's first moment is a tenth of it) and its loss.
struct FirstStep {
  StepReport report;
  Outcome outcome;
};

FirstStep TakeFirstStep(const NumberedRows& data, int ranks, int64_t micro_batch, int64_t global_batch,
                        double dropout = 0) {
  TemporaryFolder folder;
  Scenario scenario;
  scenario.dropout = dropout;
  scenario.ranks = ranks;
  scenario.dir = folder.path();
  scenario.data = data;
  scenario.yaml = StrCat("train: {global_batch_size: ", global_batch, ", micro_batch_size: ", micro_batch,
                         ", clip_grad_norm: 0}\noptimizer: {betas: [0.9, 0.95], weight_decay: 0.1}");
  FirstStep first;
  Drive(scenario, ConfigOf(scenario), first.outcome, [&](Trainer& trainer, int rank) {
    trainer.Start();
    const StepReport report = trainer.TrainStep();
    if (rank == 0) first.report = report;
  });
  return first;
}

TEST_CASE("the loss is the sum over valid tokens over their global count, however they are dealt out") {
  // Rows of 1, 2, … 8 and of no valid tokens: micro-batches and ranks hold very different numbers.
  const NumberedRows data(12, [](int64_t sample) { return sample % 9; });
  const FirstStep whole = TakeFirstStep(data, 1, 12, 12);
  CHECK(whole.report.tokens == 36 + 0 + 1 + 2);
  for (const auto& [ranks, micro_batch] :
       std::vector<std::pair<int, int64_t>>{{1, 1}, {1, 4}, {2, 1}, {2, 3}, {3, 2}, {4, 3}}) {
    const FirstStep parts = TakeFirstStep(data, ranks, micro_batch, 12);
    INFO(ranks << " ranks, micro-batches of " << micro_batch);
    CHECK(parts.report.tokens == whole.report.tokens);
    CHECK(parts.report.loss == Approx(whole.report.loss).epsilon(1e-6));
    CHECK(parts.report.outcome.grad_norm == Approx(whole.report.outcome.grad_norm).epsilon(1e-6));
    double difference = 0, norm = 0;
    for (const auto& [name, moment] : whole.outcome.state) {
      if (!name.starts_with("exp_avg ")) continue;
      const auto& other = parts.outcome.state.at(name);
      for (size_t i = 0; i < moment.size(); ++i) {
        difference += std::pow(double{moment[i]} - double{other[i]}, 2);
        norm += std::pow(double{moment[i]}, 2);
      }
    }
    REQUIRE(norm > 0);
    CHECK(std::sqrt(difference / norm) <= 1e-6);
  }
}

TEST_CASE("dropout drops the same elements however rows are dealt out") {
  const NumberedRows data(12);
  const FirstStep whole = TakeFirstStep(data, 1, 12, 12, 0.3);
  CHECK(whole.report.loss != Approx(TakeFirstStep(data, 1, 12, 12).report.loss).epsilon(1e-6));
  for (const auto& [ranks, micro_batch] : std::vector<std::pair<int, int64_t>>{{1, 4}, {2, 3}, {4, 1}}) {
    const FirstStep parts = TakeFirstStep(data, ranks, micro_batch, 12, 0.3);
    INFO(ranks << " ranks, micro-batches of " << micro_batch);
    CHECK(parts.report.loss == Approx(whole.report.loss).epsilon(1e-6));
    CHECK(parts.report.outcome.grad_norm == Approx(whole.report.outcome.grad_norm).epsilon(1e-6));
  }
}

TEST_CASE("a rank whose labels are all ignored contributes nothing") {
  // Samples 0 … 3 in some order on four ranks; two of them count.
  const FirstStep some =
      TakeFirstStep(NumberedRows(4, [](int64_t s) { return s % 2 == 0 ? kLen : 0; }), 4, 1, 4);
  const FirstStep one =
      TakeFirstStep(NumberedRows(4, [](int64_t s) { return s % 2 == 0 ? kLen : 0; }), 1, 4, 4);
  CHECK(some.report.tokens == 2 * kLen);
  CHECK(some.report.loss == Approx(one.report.loss).epsilon(1e-6));
  CHECK_FALSE(some.report.outcome.skipped);
}

TEST_CASE("a batch whose labels are all ignored is zero: only what decays moves") {
  const NumberedRows data(4, [](int64_t) { return 0; });
  for (int ranks : {1, 2}) {
    const FirstStep first = TakeFirstStep(data, ranks, 2, 4);
    CHECK(first.report.tokens == 0);
    CHECK(first.report.loss == 0);
    CHECK(first.report.outcome.grad_norm == 0);
    CHECK_FALSE(first.report.outcome.skipped);
    TemporaryFolder folder;
    Scenario scenario;
    scenario.dir = folder.path();
    scenario.yaml = kCommon;
    Outcome start;
    Drive(scenario, ConfigOf(scenario), start, [](Trainer& trainer, int) { trainer.Start(); });
    for (const auto& [name, values] : first.outcome.weights) {
      const bool decays =
          name.starts_with("blocks") && name.ends_with("weight") && name.find("norm") == std::string::npos;
      INFO(name);
      CHECK((values != start.weights.at(name)) == decays);
      for (float value : values) REQUIRE(std::isfinite(value));
    }
  }
}

// A metric of the user's own: the sample's number.
class ByNumber : public DifficultyMetric {
 public:
  std::string name() const override { return "by_number"; }
  void Measure(const Batch& batch, std::span<double> difficulty) override {
    std::copy(batch.sample_ids.begin(), batch.sample_ids.end(), difficulty.begin());
  }
};

// Samples by number, lengths from 8 to 32, batches from 2 to 8 and kept tokens from 4 to 32, each at its own
// pace, the learning rate by layer tokens.
class CurriculumScenario : public Scenario {
 public:
  explicit CurriculumScenario(const std::string& mode, const std::string& more = "") {
    data = NumberedRows(
        25, [](int64_t) { return kLength; }, kLength);
    layers = 3;
    dropout = 0.1;
    ByNumber metric;
    MeasureDifficulty(PosixFileSystem(), index_.path(), data, metric, 4, {});
    IndexDifficulty(PosixFileSystem(), index_.path(), data, metric);
    yaml = StrCat(
        "train: {global_batch_size: 8, micro_batch_size: 1, max_steps: 12, log_interval: 1, eval_interval: "
        "3, "
        "eval_batches: 2, precision: fp32}\n"
        "schedule: {by: layer_tokens, warmup_tokens: 100, total_tokens: 1500}\n"
        "data: {curriculum: {index: ",
        index_.path(),
        ", own: {metric: by_number, min: 20, steps: 8, difficulty_step: 20}, batch_size: {min: 2, steps: 5, "
        "difficulty_step: 2}, length: {pacing: discrete, mode: ",
        mode, ", stages: [[4, 8], [7, 16]]}}, random_ltd: {min: 4, steps: 10, difficulty_step: 4}}\n", more);
  }
  static constexpr int64_t kLength = 32;

 private:
  std::shared_ptr<TemporaryFolder> index_folder_ = std::make_shared<TemporaryFolder>();
  const TemporaryFolder& index_ = *index_folder_;
};

TEST_CASE("within a curriculum a run stopped and resumed is the unbroken one, bit for bit") {
  for (const char* mode : {"truncate", "reshape"}) {
    CurriculumScenario scenario(mode, "zero: {stage: 2}");
    const Outcome unbroken = Train(scenario);
    REQUIRE(Timeless(unbroken.metrics).size() == 12);
    for (const std::vector<int64_t>& stops : std::vector<std::vector<int64_t>>{{1}, {3, 6}, {7, 8}, {10}}) {
      scenario.stops = stops;
      INFO(mode << " stopped at " << stops.front());
      CheckSame(Train(scenario), unbroken);
    }
  }
}

TEST_CASE("Case 34: each step is as long, as large and as hard as it should be; evaluation is whole") {
  for (const bool reshape : {false, true}) {
    CurriculumScenario scenario(reshape ? "reshape" : "truncate");
    const Outcome outcome = Train(scenario);
    CHECK(outcome.evaluated == std::set<std::pair<int64_t, int64_t>>{{32, 0}});
    const auto lines = Timeless(outcome.metrics);
    REQUIRE(lines.size() == 12);
    int64_t tokens = 0, layer_tokens = 0;
    for (int64_t step = 1; step <= 12; ++step) {
      const int64_t length = step <= 4 ? 8 : step <= 7 ? 16 : 32;
      const int64_t batch = std::min<int64_t>(8, (2 * 5 + 6 * step) / 5 / 2 * 2);
      const int64_t rows = batch * (reshape ? 32 / length : 1);
      const int64_t kept = std::min(length, (4 * 10 + 28 * std::min<int64_t>(step, 10)) / 10 / 4 * 4);
      tokens += rows * length;
      layer_tokens += rows * (2 * length + kept);  // the first layer, the last, and the one between
      const nlohmann::json& line = lines[static_cast<size_t>(step - 1)];
      INFO(line);
      CHECK(line.at("tokens") == tokens);
      const nlohmann::json& data = line.at("data");
      CHECK(data.at("seq_len") == length);
      CHECK(data.at("kept_tokens") == kept);
      CHECK(data.at("consumed_layer_tokens") == layer_tokens);
      CHECK(data.at("difficulty") ==
            nlohmann::json{{"by_number", step < 8 ? (20 * 8 + 80 * step) / 8 / 20 * 20 : 100},
                           {"length", length},
                           {"batch_size", batch}});
      const auto at = std::min(1500.0, static_cast<double>(layer_tokens / 3));
      const double fallen = 0.1 + 0.9 * (1 + std::cos(M_PI * (at - 100) / 1400)) / 2;
      CHECK(line.at("lr").get<double>() == Approx(3e-4 * (at <= 100 ? at / 100 : fallen)).epsilon(1e-12));
    }
    if (reshape) continue;
    // The easiest fifth, two fifths …: by_number is the number.
    for (const auto& samples : outcome.samples) {
      REQUIRE(samples.size() == static_cast<size_t>(1 + 2 + 2 + 3 + 4 * 8));
      CHECK(*std::max_element(samples.begin(), samples.begin() + 3) < 10);
    }
  }
}

TEST_CASE("a curriculum with token drop and dropout is the same on one rank and on two") {
  CurriculumScenario scenario("reshape");
  const Outcome two = Train(scenario);
  scenario.ranks = 1;
  const Outcome one = Train(scenario);
  const auto lines = Timeless(two.metrics), expected = Timeless(one.metrics);
  REQUIRE(lines.size() == expected.size());
  for (size_t i = 0; i < lines.size(); ++i) {
    CHECK(lines[i].at("loss").get<double>() == Approx(expected[i].at("loss").get<double>()).epsilon(1e-5));
    CHECK(lines[i].at("data") == expected[i].at("data"));
  }
}

TEST_CASE("a mixture of corpora keeps its shares, and resumes bit for bit") {
  Scenario scenario;
  scenario.yaml = StrCat(kCommon, "data: {train: [a, b], mix: [1, 3]}");
  scenario.data.ends = {20, 25};
  const Outcome unbroken = Train(scenario);
  int64_t first = 0, all = 0;
  for (const auto& samples : unbroken.samples) {
    all += std::ssize(samples);
    first += std::count_if(samples.begin(), samples.end(), [](int64_t sample) { return sample < 20; });
  }
  CHECK(all == 48);
  CHECK(first == 12);
  scenario.stops = {5};
  CheckSame(Train(scenario), unbroken);
}

TEST_CASE("where all steps are alike, a schedule by tokens is the one by steps") {
  Scenario scenario;
  scenario.yaml = kCommon;
  const Outcome by_steps = Train(scenario);
  for (const char* unit : {"tokens", "layer_tokens"}) {
    // 32 tokens a step, by each of two layers.
    scenario.yaml = kCommon;
    scenario.yaml.replace(scenario.yaml.find("schedule"), std::string::npos,
                          StrCat("schedule: {by: ", unit, ", warmup_tokens: 128, total_tokens: 384}"));
    CheckSame(Train(scenario), by_steps);
  }
}

TEST_CASE("a curriculum without its files, or not the checkpoint's, is refused") {
  const CurriculumScenario with("truncate");
  Scenario without;
  without.yaml = kCommon;
  without.data = with.data;
  TemporaryFolder folder;
  Outcome outcome;
  const std::atomic<bool> never = false;
  const auto start = [](Trainer& trainer, int) { trainer.Start(); };
  const auto refusal = [&](Scenario scenario, Resume resume) {
    scenario.dir = folder.path();
    scenario.ranks = 1;
    RunConfig config = ConfigOf(scenario);
    config.run.resume = resume;
    try {
      Drive(scenario, config, outcome, start);
    } catch (const Error& error) {
      return StrCat(error.what(), "; ", error.hint());
    }
    return std::string();
  };
  Scenario elsewhere = with;
  elsewhere.yaml.replace(elsewhere.yaml.find("by_number"), 9, "by_length");
  CHECK_THAT(refusal(elsewhere, Resume::kNever),
             Catch::Contains("data.curriculum.by_length: there is no ") && Catch::Contains("strata analyze"));
  Scenario other_data = with;
  other_data.data = NumberedRows(
      26, [](int64_t) { return 32; }, 32);
  CHECK_THAT(refusal(other_data, Resume::kNever), Catch::Contains("by_number"));

  const auto train = [&](Scenario scenario) {
    scenario.dir = folder.path();
    scenario.ranks = 1;
    Drive(scenario, ConfigOf(scenario), outcome, [&](Trainer& trainer, int) {
      trainer.Start();
      trainer.TrainStep();
      trainer.Save();
      trainer.Run(never);
    });
  };
  without.layers = 3;
  train(without);
  CHECK_THAT(refusal(with, Resume::kLatest), Catch::Contains("trained without a curriculum"));
  train(with);
  CHECK_THAT(refusal(without, Resume::kLatest), Catch::Contains("trained with a curriculum"));
}

TEST_CASE("without a checkpoint, --resume says so and --resume=auto starts afresh") {
  TemporaryFolder folder;
  Scenario scenario;
  scenario.ranks = 1;
  scenario.dir = JoinPath(folder.path(), "new");
  scenario.yaml = kCommon;
  RunConfig config = ConfigOf(scenario);
  Outcome outcome;
  const auto start = [](Trainer& trainer, int) { trainer.Start(); };
  config.run.resume = Resume::kLatest;
  CHECK_THROWS_WITH(Drive(scenario, config, outcome, start),
                    Catch::Contains("new/checkpoints holds no complete checkpoint to resume from"));
  config.run.resume = Resume::kAuto;
  CHECK_NOTHROW(Drive(scenario, config, outcome, start));
}

}  // namespace
}  // namespace strata
