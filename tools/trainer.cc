#include "tools/trainer.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "data/curriculum.h"
#include "data/mixture.h"
#include "data/sampler.h"
#include "runtime/base/log.h"
#include "runtime/base/units.h"
#include "tools/initial_weights.h"
#include "tools/masking.h"
#include "tools/metrics.h"
#include "tools/model_batch.h"
#include "tools/progress.h"
#include "zero/activation_offload.h"

namespace strata {

struct Trainer::Impl {
  explicit Impl(TrainerSetup s)
      : setup(std::move(s)),
        config(setup.config),
        dp(setup.mesh.dp()),
        schedule(config.MakeSchedule()),
        engine({setup.executor, setup.mesh, setup.file_system, setup.host}, FreezeAndList(),
               config.train.precision, config.optimizer, config.zero),
        activations(ActivationOffload::Make(setup.executor.device(), setup.file_system,
                                            config.recompute.offload, config.zero.offload,
                                            setup.mesh.rank())),
        saver(setup.file_system, JoinPath(config.run.dir, "checkpoints"), config.checkpoint.keep,
              config.checkpoint.async, setup.executor.device(), setup.mesh.world()) {}

  // Applies model.freeze before the engine lays out its buffers.
  std::vector<Unit*> FreezeAndList() {
    config.model.Freeze(setup.model);
    return setup.model.Units();
  }

  TapeOptions TapeFor(bool training, int64_t row_offset) {
    TapeOptions options = config.MakeTapeOptions();
    options.training = training;
    if (training) options.activation_store = activations.get();
    options.step = static_cast<uint32_t>(step + 1);
    options.row_offset = row_offset;
    return options;
  }

  // This rank's files on the nvme tier: their size, and what was moved so far.
  struct DiskUse {
    int64_t bytes = 0, read = 0, written = 0;
  };
  DiskUse Disk() const;
  std::unique_ptr<Sampler> MakeSampler() const;
  void MakeLoader(const SamplerState* state);
  void DescribeWork(const Batch& batch, StepReport& report) const;
  double LearningRate(const StepReport& report) const;
  void LogDifficulty(const StepReport& report);
  bool Finished() const;
  std::vector<RoutingCounts> SumOverRanks(std::vector<RoutingCounts> layers) const;
  nlohmann::ordered_json MetricsLine(const StepReport& report, const std::optional<double>& valid_loss) const;
  CheckpointInfo Info() const;
  void Restore(const CheckpointReader& reader);

  TrainerSetup setup;
  const RunConfig& config;
  Communicator& dp;
  Schedule schedule;
  ZeroEngine engine;
  std::unique_ptr<ActivationOffload> activations;
  CheckpointSaver saver;
  LossScaler scaler;
  std::unique_ptr<Loader> loader;
  std::unique_ptr<MetricsFile> metrics;
  int64_t step = 0;          // finished
  int64_t tokens = 0;        // valid ones seen
  int64_t layer_tokens = 0;  // computed by all layers together
  // The same of the steps that were not skipped: where the schedule stands.
  int64_t scheduled_tokens = 0, scheduled_layer_tokens = 0;
  std::map<std::string, int64_t> logged_difficulty;
};

Trainer::Impl::DiskUse Trainer::Impl::Disk() const {
  DiskUse use;
  const auto add = [&use](const TierStore& store) {
    use.bytes += static_cast<int64_t>(store.nvme_bytes());
    use.read += store.read_bytes();
    use.written += store.written_bytes();
  };
  add(engine.store());
  if (activations) add(activations->store());
  return use;
}

std::unique_ptr<Sampler> Trainer::Impl::MakeSampler() const {
  const int64_t batch = config.train.global_batch_size;
  CurriculumOptions options = config.data.curriculum.Options();
  if (!config.data.mix.empty()) {
    return std::make_unique<MixtureSampler>(setup.train.corpus_ends(), config.data.mix, batch,
                                            config.run.seed);
  }
  if (!options.active())
    return std::make_unique<ShuffledSampler>(setup.train.num_samples(), batch, config.run.seed);
  std::vector<std::unique_ptr<DifficultyFile>> files;
  for (const auto& criterion : options.criteria) {
    const std::string path = DifficultyPath(config.DifficultyFolder(), criterion.metric);
    if (!setup.file_system.Exists(path)) {
      throw DataError(StrCat("data.curriculum.", criterion.metric, ": there is no ", path),
                      "make it with strata analyze CONFIG.yaml");
    }
    files.push_back(DifficultyFile::Open(setup.file_system, path, setup.train));
  }
  AdmissionOrder order = files.empty() ? AdmissionOrder::All(setup.train.num_samples())
                                       : AdmissionOrder::Of(options.criteria, files);
  return std::make_unique<CurriculumSampler>(std::move(options), std::move(order), setup.train.seq_len(),
                                             batch, config.run.seed);
}

void Trainer::Impl::MakeLoader(const SamplerState* state) {
  std::unique_ptr<Sampler> sampler = MakeSampler();
  if (state) sampler->Restore(*state);
  LoaderOptions options;
  options.micro_batch_size = config.train.micro_batch_size;
  options.dp_rank = dp.rank();
  options.dp_size = dp.size();
  options.first_step = step + 1;
  loader = std::make_unique<Loader>(setup.train, std::move(sampler), options);
}

bool Trainer::Impl::Finished() const {
  return step >= config.train.max_steps || (config.train.max_tokens && tokens >= *config.train.max_tokens);
}

CheckpointInfo Trainer::Impl::Info() const {
  CheckpointInfo info;
  info.step = step;
  info.config_yaml = config.ToYaml();
  info.tokenizer = setup.tokenizer;
  const LossScaler::State& s = scaler.state();
  info.trainer = {
      {"tokens", tokens},
      {"layer_tokens", layer_tokens},
      {"scheduled_tokens", scheduled_tokens},
      {"scheduled_layer_tokens", scheduled_layer_tokens},
      {"optimizer_step", engine.optimizer_step()},
      {"sampler", loader->state()},
      {"loss_scaler",
       {{"scale", s.scale}, {"clean_steps", s.clean_steps}, {"hysteresis_left", s.hysteresis_left}}}};
  return info;
}

void Trainer::Impl::Restore(const CheckpointReader& reader) {
  const CheckpointInfo& info = reader.info();
  step = info.step;
  try {
    tokens = info.trainer.at("tokens");
    layer_tokens = info.trainer.at("layer_tokens");
    scheduled_tokens = info.trainer.at("scheduled_tokens");
    scheduled_layer_tokens = info.trainer.at("scheduled_layer_tokens");
    engine.set_optimizer_step(info.trainer.at("optimizer_step"));
    const auto& s = info.trainer.at("loss_scaler");
    scaler.set_state({s.at("scale"), s.at("clean_steps"), s.at("hysteresis_left")});
    const auto state = info.trainer.at("sampler").get<SamplerState>();
    MakeLoader(&state);
  } catch (const nlohmann::json::exception& e) {
    throw CheckpointError(StrCat(reader.path(), "/manifest.json: the trainer's state is damaged: ", e.what()),
                          "resume from another checkpoint with --resume=PATH");
  }
}

Trainer::Trainer(TrainerSetup setup) : impl_(std::make_unique<Impl>(std::move(setup))) {}
Trainer::~Trainer() = default;

int64_t Trainer::step() const { return impl_->step; }
ZeroEngine& Trainer::engine() { return impl_->engine; }

void Trainer::Start() {
  Impl& m = *impl_;
  const RunConfig& config = m.config;
  FileSystem& fs = m.setup.file_system;
  const std::string checkpoints = JoinPath(config.run.dir, "checkpoints");
  const std::string latest = LatestCheckpoint(fs, checkpoints);
  std::string from;
  switch (config.run.resume) {
    case Resume::kNever:
      break;
    case Resume::kAuto:
      from = latest;
      break;
    case Resume::kLatest:
      from = latest;
      if (from.empty()) {
        throw CheckpointError(
            StrCat(checkpoints, " holds no complete checkpoint to resume from"),
            "train without --resume, or with --resume=auto to start fresh when there is none");
      }
      break;
    case Resume::kPath:
      from = config.run.resume_path;
      break;
  }
  if (!from.empty()) {
    CheckpointReader reader(fs, from);
    reader.Read(m.engine.SlicesToLoad(), m.setup.model.Parameters(), false);
    m.engine.FinishLoad();
    m.Restore(reader);
    LogInfo("resumed from {} at step {}", reader.path(), m.step);
  } else {
    m.engine.InitializeParameters(config.run.seed);
    if (!config.model.init_from.empty())
      LoadInitialWeights(fs, config.model.init_from, m.setup.model, m.engine);
    m.MakeLoader(nullptr);
  }
  if (m.setup.mesh.rank() == 0) {
    fs.CreateDirectories(config.run.dir);
    m.metrics = std::make_unique<MetricsFile>(fs, JoinPath(config.run.dir, "metrics.jsonl"), m.step);
  }
}

// What the step's micro-batches, all as `batch`, are made of and cost.
void Trainer::Impl::DescribeWork(const Batch& batch, StepReport& report) const {
  report.seq_len = batch.seq_len;
  report.difficulty = batch.difficulty;
  const Pacing& kept = config.data.random_ltd;
  if (kept.active()) report.kept_tokens = std::min(kept.At(report.step), batch.seq_len);
  const int64_t rows = batch.batch_size * batch.num_micro_batches * dp.size();
  report.layer_tokens = setup.model.ConsumedLayerTokens(rows, batch.seq_len, report.kept_tokens);
  report.flops = static_cast<double>(rows * batch.seq_len) *
                 setup.model.FlopsPerTokenWithDrop(batch.seq_len, report.kept_tokens);
}

// Of the step that `report` is about to be; a skipped one does not move the schedule.
double Trainer::Impl::LearningRate(const StepReport& report) const {
  int64_t at = engine.optimizer_step() + 1;
  if (config.schedule.by == ScheduleUnit::kTokens) at = scheduled_tokens + report.tokens;
  if (config.schedule.by == ScheduleUnit::kLayerTokens) {
    const int64_t layers = setup.model.ConsumedLayerTokens(1, 1, 0);
    at = (scheduled_layer_tokens + report.layer_tokens) / layers;
  }
  return schedule.At(std::max<int64_t>(at, 1));
}

// Says what the step is made of when that is new.
void Trainer::Impl::LogDifficulty(const StepReport& report) {
  std::map<std::string, int64_t> difficulty = report.difficulty;
  if (config.data.random_ltd.active()) difficulty["kept_tokens"] = report.kept_tokens;
  if (difficulty == logged_difficulty) return;
  std::string text;
  for (const auto& [name, value] : difficulty)
    text += fmt::format("{} {} {}", text.empty() ? "" : ",", name, value);
  LogInfo("from step {}:{}", report.step, text);
  logged_difficulty = std::move(difficulty);
}

StepReport Trainer::TrainStep() {
  Impl& m = *impl_;
  const double begin = Now();
  const Executor& executor = m.setup.executor;
  StepReport report;
  report.step = m.step + 1;
  const Impl::DiskUse before = m.Disk();
  report.loss_scale = m.config.train.precision == DType::kF16 ? m.scaler.scale() : 1.0;

  std::vector<Batch> batches;
  int64_t counts[2] = {0, 0};  // tokens consumed, tokens to predict: fewer, where the model fills in
  do {
    batches.push_back(m.loader->Next());
    counts[0] += batches.back().valid_tokens;
    SetTargets(m.config, report.step, &batches.back());
    counts[1] += batches.back().valid_tokens;
  } while (static_cast<int64_t>(batches.size()) < batches.front().num_micro_batches);
  m.dp.AllReduce(TensorView(counts, DType::kI64, {2}));
  report.tokens = counts[0];
  // A step without a token to predict has zero gradients, not NaN.
  const auto targets = static_cast<double>(std::max<int64_t>(counts[1], 1));
  m.DescribeWork(batches.front(), report);
  const auto grad_scale = static_cast<float>(report.loss_scale / targets);

  double loss_sum = 0;
  const int count = static_cast<int>(batches.size());
  for (int i = 0; i < count; ++i) {
    const Batch& batch = batches[static_cast<size_t>(i)];
    m.engine.BeginMicroBatch(i, count);
    Tape tape(executor, m.engine, m.TapeFor(true, batch.first_row * batch.seq_len));
    ModelInput input = UploadBatch(tape, batch);
    input.kept_tokens = report.kept_tokens;
    const std::vector<Tensor> losses = m.setup.model.Loss(tape, input, grad_scale);
    loss_sum += SumLosses(executor, losses.front());
    tape.Backward(losses);
  }
  m.dp.AllReduce(TensorView(&loss_sum, DType::kF64, {1}));
  report.routing = m.SumOverRanks(m.setup.model.TakeRouting());
  report.loss = loss_sum / targets;
  report.lr = m.LearningRate(report);
  report.outcome = m.engine.FinishStep(report.lr, m.config.train.clip_grad_norm, report.loss_scale,
                                       [&] { m.saver.BeforeUpdate(); });
  if (m.config.train.precision == DType::kF16) m.scaler.Update(report.outcome.skipped);
  m.step = report.step;
  m.tokens += report.tokens;
  m.layer_tokens += report.layer_tokens;
  if (!report.outcome.skipped) {
    m.scheduled_tokens += report.tokens;
    m.scheduled_layer_tokens += report.layer_tokens;
  }
  m.saver.Poll();
  const Impl::DiskUse after = m.Disk();
  report.nvme_bytes = after.bytes;
  report.disk_read = after.read - before.read;
  report.disk_written = after.written - before.written;
  report.seconds = Now() - begin;
  if (report.outcome.skipped) {
    LogInfo("step {}: a gradient is not finite; the step is skipped{}", report.step,
            m.config.train.precision == DType::kF16 ? fmt::format(", the loss scale is {}", m.scaler.scale())
                                                    : "");
  }
  return report;
}

double Trainer::Evaluate(int64_t batches) {
  Impl& m = *impl_;
  STRATA_CHECK(m.setup.valid) << "evaluation without validation data";
  const Dataset& data = *m.setup.valid;
  const int64_t batch = m.config.train.micro_batch_size, ranks = m.dp.size();
  double sums[2] = {0, 0};  // losses, tokens
  // Every rank runs as many batches as any other: where samples run out, rows of ignored targets fill up.
  for (int64_t i = 0; i < batches && i * ranks * batch < data.num_samples(); ++i) {
    std::vector<int64_t> samples;
    for (int64_t j = 0; j < batch; ++j) {
      const int64_t sample = (i * ranks + m.dp.rank()) * batch + j;
      samples.push_back(sample < data.num_samples() ? sample : kNoSample);
    }
    Batch rows = MakeBatch(data, samples, data.seq_len());
    rows.first_row = (i * ranks + m.dp.rank()) * batch;
    SetTargets(m.config, 0, &rows);
    Tape tape(m.setup.executor, m.engine, m.TapeFor(false, 0));
    const std::vector<Tensor> losses = m.setup.model.Loss(tape, UploadBatch(tape, rows), 0.0f);
    sums[0] += SumLosses(m.setup.executor, losses.front());
    sums[1] += static_cast<double>(rows.valid_tokens);
  }
  m.dp.AllReduce(TensorView(sums, DType::kF64, {2}));
  return sums[0] / std::max(sums[1], 1.0);
}

void Trainer::Save() {
  impl_->saver.Save(impl_->Info(), impl_->engine.SlicesToSave(), impl_->setup.model.Parameters());
}

// Tokens, then load and kept of each expert, then its Σ p, of a layer: one message for all of them.
std::vector<RoutingCounts> Trainer::Impl::SumOverRanks(std::vector<RoutingCounts> layers) const {
  std::vector<double> sums;
  auto for_each = [&](auto visit) {
    for (RoutingCounts& layer : layers) {
      visit(layer.tokens);
      for (size_t e = 0; e < layer.load.size(); ++e) {
        visit(layer.load[e]);
        visit(layer.first_load[e]);
        visit(layer.kept[e]);
        visit(layer.probability[e]);
      }
      visit(layer.squared_logsumexp);
    }
  };
  for_each([&](auto value) { sums.push_back(static_cast<double>(value)); });
  if (sums.empty()) return layers;
  dp.AllReduce(TensorView(sums.data(), DType::kF64, {std::ssize(sums)}));
  size_t at = 0;
  for_each([&](auto& value) { value = static_cast<std::remove_reference_t<decltype(value)>>(sums[at++]); });
  return layers;
}

nlohmann::ordered_json Trainer::Impl::MetricsLine(const StepReport& report,
                                                  const std::optional<double>& valid_loss) const {
  nlohmann::ordered_json line;
  const auto step_tokens = static_cast<double>(report.tokens);
  line["step"] = report.step;
  line["tokens"] = tokens;
  line["loss"] = report.loss;
  line["lr"] = report.lr;
  line["grad_norm"] = report.outcome.grad_norm;
  line["step_time_s"] = report.seconds;
  line["tokens_per_s"] = step_tokens / report.seconds;
  line["flops_per_s"] = report.flops / report.seconds;
  Device& device = setup.executor.device();
  line["memory"] = PeaksOf(device.allocator().stats());
  const MemoryStats host = device.host_allocator().stats();
  if (host.total_peak > 0) line["memory"]["host"] = PeaksOf(host);
  if (report.nvme_bytes > 0) {
    line["memory"]["nvme"] = report.nvme_bytes;
    line["disk"] = {{"read", report.disk_read}, {"written", report.disk_written}};
  }
  nlohmann::ordered_json traffic = nlohmann::ordered_json::object();
  for (const auto& [name, total] : setup.traffic.Totals()) traffic[name] = total.bytes;
  line["traffic"] = traffic;
  if (config.train.precision == DType::kF16) line["loss_scale"] = report.loss_scale;
  if (report.outcome.skipped) line["skipped"] = true;
  for (size_t i = 0; i < report.routing.size(); ++i) {
    const RoutingCounts& counts = report.routing[i];
    const auto [least, most] = std::minmax_element(counts.load.begin(), counts.load.end());
    const auto choices =
        static_cast<double>(std::max<int64_t>(counts.tokens * config.model.sizes.moe.top_k, 1));
    line["moe"][std::to_string(i)] = {
        {"load_min", static_cast<double>(*least) / choices},
        {"load_max", static_cast<double>(*most) / choices},
        {"load_entropy", counts.LoadEntropy()},
        {"dropped", counts.DroppedFraction()},
        {"aux_loss", counts.BalanceLoss(config.model.sizes.moe)},
        {"z_loss", counts.ZLoss()},
    };
  }
  line["data"] = {{"seq_len", report.seq_len}, {"consumed_layer_tokens", layer_tokens}};
  if (!report.difficulty.empty()) line["data"]["difficulty"] = report.difficulty;
  if (config.data.random_ltd.active()) line["data"]["kept_tokens"] = report.kept_tokens;
  if (valid_loss) line["valid_loss"] = *valid_loss;
  return line;
}

bool Trainer::Run(const std::atomic<bool>& stop) {
  Impl& m = *impl_;
  const RunConfig& config = m.config;
  Progress progress(config.train.max_steps, m.setup.peak_flops);
  bool stopped = false;
  int64_t saved_step = m.step;
  while (!m.Finished() && !stopped) {
    m.setup.traffic.Reset();
    const StepReport report = TrainStep();
    int64_t wants_stop = stop.load() ? 1 : 0;
    m.setup.mesh.world().AllReduce(TensorView(&wants_stop, DType::kI64, {1}), ReduceOp::kMax);
    stopped = wants_stop != 0;

    const bool last = m.Finished() || stopped;
    // An evaluation that is due belongs to the step, so that a run that is stopped leaves no gap.
    const bool due = config.train.eval_interval > 0 && m.step % config.train.eval_interval == 0;
    const bool evaluates = m.setup.valid && (due || m.Finished());
    std::optional<double> valid_loss;
    if (evaluates) valid_loss = Evaluate(config.train.eval_batches);
    const bool logs = last || evaluates || report.outcome.skipped || m.step == 1 ||
                      (config.train.log_interval > 0 && m.step % config.train.log_interval == 0);
    if (m.setup.mesh.rank() == 0) {
      progress.Step(report);
      m.LogDifficulty(report);
      if (logs) {
        m.metrics->Write(m.MetricsLine(report, valid_loss));
        progress.Log(report, valid_loss);
      }
    }
    const int64_t interval = config.checkpoint.interval;
    if (interval >= 0 && (last || (interval > 0 && m.step % interval == 0))) {
      if (m.step != saved_step) Save();
      saved_step = m.step;
    }
  }
  m.saver.Finish();
  return !stopped;
}

}  // namespace strata
