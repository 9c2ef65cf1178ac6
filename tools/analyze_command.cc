// analyze: how difficult each sample of a run's training data is, for its curriculum.
#include <spdlog/fmt/fmt.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <optional>

#include "data/difficulty.h"
#include "runtime/base/log.h"
#include "runtime/base/units.h"
#include "tools/arguments.h"
#include "tools/commands.h"
#include "tools/loaded_model.h"
#include "tools/masking.h"
#include "tools/model_batch.h"
#include "tools/run_data.h"

namespace strata {
namespace {

constexpr char kUsage[] =
    "usage: strata analyze CONFIG.yaml [key.path=value ...] [--metric NAME,...] [--checkpoint PATH] "
    "[--out FOLDER]\n"
    "NAME: seqlen, vocab_rarity, total_rarity; loss, under the model that --checkpoint names\n"
    "FOLDER: data.curriculum.index when left out, or run.dir/difficulty\n"
    "example: mpirun -n 2 strata analyze configs/tinyshakespeare.yaml data.train=[input.txt]";

struct Request {
  std::vector<std::string> metrics;
  std::string checkpoint, folder;
};

// "loss": the mean over a row's targets under a trained model, in thousandths of a nat.
class MeanLoss : public DifficultyMetric {
 public:
  /// Collective over the context's ranks; measuring is not.
  MeanLoss(FileSystem& fs, const std::string& checkpoint, RankContext& context)
      : context_(context), loaded_(fs, checkpoint, context) {}

  LoadedModel& loaded() { return loaded_; }
  std::string name() const override { return "loss"; }
  double resolution() const override { return 1e-3; }

  // Of the weights.
  uint64_t fingerprint() const override {
    uint64_t hash = 0;
    std::vector<float> elements;
    for (const StateSlice& slice : loaded_.engine().SlicesToLoad()) {
      for (int64_t at = 0; at < slice.count; at += std::ssize(elements)) {
        elements.resize(static_cast<size_t>(std::min<int64_t>(slice.count - at, 1 << 20)));
        slice.Read(at, elements.data(), std::ssize(elements));
        hash = XXH3_64bits_withSeed(elements.data(), elements.size() * sizeof(float), hash);
      }
    }
    return hash;
  }

  void Measure(const Batch& samples, std::span<double> difficulty) override {
    Batch batch = samples;
    batch.first_row = batch.sample_ids.front();  // they follow each other: the same masks for any worker
    SetTargets(loaded_.config(), 0, &batch);
    Tape tape = loaded_.EvaluationTape();
    const Tensor losses = loaded_.model().Loss(tape, UploadBatch(tape, batch), 0.0f).front();
    const std::vector<float> host = DownloadLosses(context_.executor(), losses);
    for (size_t row = 0; row < difficulty.size(); ++row) {
      const auto begin = static_cast<int64_t>(row) * batch.seq_len, end = begin + batch.seq_len;
      const auto targets = std::count_if(batch.targets.begin() + begin, batch.targets.begin() + end,
                                         [](int32_t target) { return target >= 0; });
      difficulty[row] = std::accumulate(host.begin() + begin, host.begin() + end, 0.0) /
                        static_cast<double>(std::max<int64_t>(targets, 1));
    }
  }

 private:
  RankContext& context_;
  mutable LoadedModel loaded_;  // whose engine gives its state out to be read and written alike
};

// One reading of the data, as rank 0 shows it: on a terminal a line that rewrites itself, else a line now and
// then.
class Reading {
 public:
  explicit Reading(std::string what)
      : what_(std::move(what)),
        // As in tools/progress.cc: mpirun gives rank 0 a terminal of its own.
        terminal_(isatty(STDOUT_FILENO) == 1 && !StartedByMpi()) {}
  ~Reading() {
    if (shown_) std::fputs("\r\x1b[K", stdout);
  }

  void Show(int64_t done, int64_t of) {
    const double now = Now();
    if (done == 0 || now - last_ < (terminal_ ? 0.1 : 30.0)) return;
    last_ = now;
    const double left = (now - begin_) * static_cast<double>(of - done) / static_cast<double>(done);
    const std::string line =
        fmt::format("{:<12} {}/{} samples  {} left", what_, done, of, FormatSeconds(left));
    if (terminal_) {
      std::fputs(("\r" + line + "\x1b[K").c_str(), stdout);
      std::fflush(stdout);
      shown_ = true;
    } else {
      LogInfo("{}", line);
    }
  }

 private:
  const std::string what_;
  const bool terminal_;
  const double begin_ = Now();
  double last_ = begin_;
  bool shown_ = false;
};

// One job's analysis, as one of its ranks does its part.
class Analysis {
 public:
  Analysis(FileSystem& fs, const Request& request, const RunConfig& config, const Tokenizer* tokenizer,
           const Dataset& dataset, RankContext& context)
      : fs_(fs),
        request_(request),
        config_(config),
        tokenizer_(tokenizer),
        dataset_(dataset),
        context_(context) {}

  void Run() {
    Communicator& world = context_.mesh().world();
    LogInfo("data         {} samples of {} tokens, {} worker{}", dataset_.num_samples(), dataset_.seq_len(),
            world.size(), world.size() == 1 ? "" : "s");
    std::vector<std::unique_ptr<DifficultyMetric>> metrics;
    for (const std::string& name : request_.metrics) metrics.push_back(NewMetric(name));
    for (const auto& metric : metrics) {
      const bool model = metric->name() == "loss";
      Timed("measuring " + metric->name(), [&](const DifficultyWorker& worker) {
        MeasureDifficulty(fs_, request_.folder, dataset_, *metric, model ? kModelRows : Rows(), worker);
      });
    }
    if (world.rank() != 0) return;
    LogInfo("{:<12} {:>10} {:>10} {:>10} {:>10}  file", "metric", "smallest", "median", "90th %", "largest");
    for (const auto& metric : metrics) {
      IndexDifficulty(fs_, request_.folder, dataset_, *metric);
      const auto file = DifficultyFile::Open(fs_, DifficultyPath(request_.folder, metric->name()), dataset_);
      const auto value = [&](int64_t i) {
        return static_cast<double>(file->Value(file->Ordered(i))) * file->resolution();
      };
      const auto of_percent = [&](int64_t percent) { return value(file->CountUpToPercentile(percent) - 1); };
      LogInfo("{:<12} {:>10.6g} {:>10.6g} {:>10.6g} {:>10.6g}  {}", metric->name(), value(0), of_percent(50),
              of_percent(90), of_percent(100), file->path());
    }
  }

 private:
  static constexpr int64_t kModelRows = 8;  // of a batch under a model, as strata eval takes them

  int64_t Rows() const { return std::max<int64_t>(1, (1 << 16) / dataset_.seq_len()); }

  // Reads the data once, by all workers; says how fast.
  void Timed(const std::string& what, const std::function<void(const DifficultyWorker&)>& body) {
    Communicator& world = context_.mesh().world();
    const double begin = Now();
    {
      Reading reading(what);
      DifficultyWorker worker{world.rank(), world.size(), {}};
      if (world.rank() == 0) worker.progress = [&](int64_t done, int64_t of) { reading.Show(done, of); };
      body(worker);
      world.Barrier();
    }
    const double tokens =
        static_cast<double>(dataset_.num_samples()) * static_cast<double>(dataset_.seq_len());
    const double bytes = tokens * (config_.model.sizes.vocab_size <= 65536 ? 2 : 4);
    const double seconds = std::max(Now() - begin, 1e-6);
    LogInfo("{:<24} {:>8}  {:.1f} MB/s of token file", what, FormatSeconds(seconds), bytes / seconds / 1e6);
  }

  const std::vector<int64_t>& Counts() {
    if (counts_.empty()) {
      Timed("counting tokens", [&](const DifficultyWorker& worker) {
        counts_ = CountTokens(dataset_, config_.model.sizes.vocab_size, worker);
      });
      context_.mesh().world().AllReduce(TensorView(counts_.data(), DType::kI64, {std::ssize(counts_)}));
    }
    return counts_;
  }

  std::unique_ptr<DifficultyMetric> NewMetric(const std::string& name) {
    if (name == "seqlen") return NewSequenceLength();
    if (name == "vocab_rarity") return NewVocabRarity(Counts());
    if (name == "total_rarity") return NewTotalRarity(Counts());
    auto loss = std::make_unique<MeanLoss>(fs_, request_.checkpoint, context_);
    Transformer& model = loss->loaded().model();
    const Tokenizer* theirs = loss->loaded().tokenizer();
    if (theirs && tokenizer_ && theirs->hash() != tokenizer_->hash()) {
      throw DataError(request_.checkpoint + " was trained with another tokenizer than that of data.train",
                      "measure the loss under a model of this tokenizer");
    }
    if (model.vocab_size() < config_.model.sizes.vocab_size || model.max_seq_len() < dataset_.seq_len()) {
      throw DataError(StrCat(request_.checkpoint, " has a vocabulary of ", model.vocab_size(),
                             " and sees at most ", model.max_seq_len(), " tokens; the data need ",
                             config_.model.sizes.vocab_size, " and ", dataset_.seq_len()),
                      "measure the loss under a model that takes the run's data");
    }
    return loss;
  }

  FileSystem& fs_;
  const Request& request_;
  const RunConfig& config_;
  const Tokenizer* tokenizer_;
  const Dataset& dataset_;
  RankContext& context_;
  std::vector<int64_t> counts_;
};

// What of a run's configuration says what its data are. The rest is about training: batches, their
// curriculum, the layout of ranks.
RunConfig DataOnly(const RunConfig& run) {
  RunConfig config;
  config.run = run.run;
  config.model = run.model;
  config.device = run.device;
  config.data = run.data;
  config.data.curriculum = {};
  config.data.random_ltd = {};
  config.train.micro_batch_size = 1;
  config.parallel.timeout_s = 1e9;  // a worker waits for the others as long as they need
  return config;
}

int AnalyzeRank(const Job& job, const RunConfig& run, Request request) {
  FileSystem& fs = PosixFileSystem();
  if (request.folder.empty()) request.folder = run.DifficultyFolder();
  RunConfig config = DataOnly(run);
  const auto tokenizer = OpenRunTokenizer(fs, config.data);
  config.Resolve(1, SettleVocabulary(tokenizer.get(), config));
  if (config.model.sizes.vocab_size == 0) {
    throw ConfigError(
        "model.vocab_size is auto, and the token files of data.train say nothing of their vocabulary",
        "give model.vocab_size, or data.tokenizer");
  }
  RankContext context(job, config.parallel, config.device);
  const RunDatasets data =
      OpenRunDatasets(fs, config, tokenizer.get(), context.device().pool(), context.mesh().world());
  Analysis(fs, request, config, tokenizer.get(), *data.train, context).Run();
  return 0;
}

// The metrics that `--metric` lists; without it, all that can be measured.
std::vector<std::string> ParseMetrics(const Arguments& arguments, const std::optional<std::string>& list,
                                      bool checkpoint) {
  std::vector<std::string> known = {"seqlen", "vocab_rarity", "total_rarity", "loss"};
  if (!list) {
    if (!checkpoint) known.pop_back();
    return known;
  }
  std::vector<std::string> metrics;
  for (size_t begin = 0, end; begin <= list->size(); begin = end + 1) {
    end = std::min(list->find(',', begin), list->size());
    const std::string name = list->substr(begin, end - begin);
    if (std::find(known.begin(), known.end(), name) == known.end())
      arguments.Fail("no metric is called '" + name + "'");
    if (name == "loss" && !checkpoint) arguments.Fail("the metric loss needs --checkpoint PATH");
    if (std::find(metrics.begin(), metrics.end(), name) == metrics.end()) metrics.push_back(name);
  }
  return metrics;
}

}  // namespace

int AnalyzeCommand(CommandLine& line) {
  Arguments arguments(line.arguments, kUsage);
  Request request;
  const auto list = arguments.Option("metric");
  request.checkpoint = arguments.Option("checkpoint").value_or("");
  request.folder = arguments.Option("out").value_or("");
  request.metrics = ParseMetrics(arguments, list, !request.checkpoint.empty());
  const std::string path = arguments.Positional("CONFIG.yaml");
  const RunConfig config = RunConfig::Load(PosixFileSystem(), path, arguments.Rest());
  return RunJob(
      config.parallel.backend, static_cast<int>(config.parallel.ranks), line.argc, line.argv,
      [&](Job& job) { return AnalyzeRank(job, config, request); }, ReportError);
}

}  // namespace strata
