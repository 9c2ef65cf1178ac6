// eval, generate, import, export: what is done with a trained model, on one rank.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>

#include "data/batch.h"
#include "data/token_file.h"
#include "data/tokenize.h"
#include "runtime/base/log.h"
#include "runtime/base/units.h"
#include "tools/arguments.h"
#include "tools/checkpoint.h"
#include "tools/commands.h"
#include "tools/loaded_model.h"
#include "tools/masking.h"
#include "tools/model_batch.h"
#include "tools/saved_model.h"

namespace strata {
namespace {

constexpr char kEvalUsage[] =
    "usage: strata eval CHECKPOINT DATA [--batches N] [--threads N] [--partial]\n"
    "DATA: a text, or a token file\nexample: strata eval runs/tiny valid.txt";
constexpr char kGenerateUsage[] =
    "usage: strata generate CHECKPOINT [--prompt TEXT] [--max-tokens N] [--temperature X] [--top-k N] "
    "[--top-p X] [--seed N]\n"
    "                       [--tokenizer SPEC] [--threads N]\n"
    "temperature 0 takes the likeliest token each time\nexample: strata generate runs/tiny --prompt \"It is "
    "a truth\"";
constexpr char kImportUsage[] =
    "usage: strata import HF_FOLDER OUT [--tokenizer SPEC]\n"
    "HF_FOLDER: config.json + model.safetensors of a GPT-2, Llama, Mixtral or BERT model, or a llama2.c .bin "
    "file\n"
    "example: strata import ./gpt2 runs/gpt2";
constexpr char kExportUsage[] =
    "usage: strata export CHECKPOINT OUT_FOLDER [--dtype fp32|bf16|fp16]\nexample: strata export runs/tiny "
    "./tiny-hf";

// Runs `body` as a job of one rank with a device of its own.
int OnOneRank(CommandLine& line, int64_t threads, const std::function<void(RankContext&)>& body) {
  return RunJob(
      Backend::kThreads, 1, line.argc, line.argv,
      [&](Job& job) {
        DeviceSection device;
        device.threads = threads;
        RankContext context(job, ParallelSection{}, device);
        body(context);
        return 0;
      },
      ReportError);
}

const Tokenizer& Need(const Tokenizer* tokenizer, const std::string& path) {
  if (!tokenizer) throw DataError(path + " has no tokenizer with it", "name one with --tokenizer SPEC");
  return *tokenizer;
}

// Host values as an int32 tensor on the device.
Tensor UploadIds(const Tape& tape, const std::vector<int32_t>& ids) {
  return tape.Upload(
      TensorView(const_cast<int32_t*>(ids.data()), DType::kI32, {static_cast<int64_t>(ids.size())}));
}

struct SamplingOptions {
  double temperature = 1.0;
  int64_t top_k = 0;   // 0: all
  double top_p = 1.0;  // nucleus (Holtzman et al., 2020)
  uint64_t seed = 1234;
};

int32_t SampleToken(const float* logits, int64_t vocab, const SamplingOptions& options, uint32_t position) {
  if (options.temperature == 0.0)
    return static_cast<int32_t>(std::max_element(logits, logits + vocab) - logits);
  std::vector<int32_t> order(static_cast<size_t>(vocab));
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(),
            [&](int32_t a, int32_t b) { return logits[a] != logits[b] ? logits[a] > logits[b] : a < b; });
  if (options.top_k > 0 && options.top_k < vocab) order.resize(static_cast<size_t>(options.top_k));
  std::vector<double> p;
  double sum = 0;
  for (int32_t id : order) {
    p.push_back(std::exp((double{logits[id]} - double{logits[order[0]]}) / options.temperature));
    sum += p.back();
  }
  double mass = 0;
  size_t kept = 0;
  while (kept < p.size() && (kept == 0 || mass < options.top_p * sum)) mass += p[kept++];
  const RandomStream random{options.seed, Purpose("sample"), position};
  double left = double{random.Uniform(0)} * mass;
  for (size_t i = 0; i < kept; ++i) {
    left -= p[i];
    if (left <= 0) return order[i];
  }
  return order[kept - 1];
}

void Generate(LoadedModel& loaded, const Tokenizer& tokenizer, const std::string& prompt, int64_t max_tokens,
              const SamplingOptions& options) {
  std::vector<int32_t> ids = tokenizer.Encode(prompt);
  Transformer& model = loaded.model();
  // A text begins with the token that begins documents, or ends them, where the vocabulary has one.
  if (ids.empty()) ids.push_back(tokenizer.bos_id().value_or(tokenizer.eos_id().value_or(0)));
  const int64_t room = model.max_seq_len();
  if (static_cast<int64_t>(ids.size()) >= room) {
    throw UsageError(StrCat("the prompt is ", ids.size(), " tokens, and the model sees at most ", room),
                     "give a shorter one");
  }
  Tape tape = loaded.EvaluationTape();
  auto cache = model.NewCache(tape, 1, room);
  int64_t cached = 0;  // tokens in the cache
  std::vector<int32_t> next = ids;
  std::fputs(prompt.c_str(), stdout);
  std::string shown = tokenizer.Decode(ids);
  for (int64_t made = 0; made < max_tokens; ++made) {
    if (cached + static_cast<int64_t>(next.size()) > room) {
      // The window is full: it goes on from the later half of what it saw.
      next.assign(ids.end() - (room + 1) / 2, ids.end());
      cache = model.NewCache(tape, 1, room);
      cached = 0;
    }
    ModelInput input;
    input.batch = 1;
    input.seq_len = static_cast<int64_t>(next.size());
    input.tokens = UploadIds(tape, next);
    std::vector<int32_t> positions(next.size());
    std::iota(positions.begin(), positions.end(), static_cast<int32_t>(cached));
    input.positions = UploadIds(tape, positions);
    const Tensor logits = model.Logits(tape, input, cache.get());
    cached += input.seq_len;
    const std::vector<float> last =
        HostCopy(tape.executor().device(),
                 logits.view().Slice((input.seq_len - 1) * model.vocab_size(), model.vocab_size()));
    const int32_t id =
        SampleToken(last.data(), model.vocab_size(), options, static_cast<uint32_t>(ids.size()));
    if (id == tokenizer.eos_id().value_or(-1)) break;
    ids.push_back(id);
    next = {id};
    // Decoded whole, since one token may hold part of a character, or a space that depends on its neighbours.
    const std::string text = tokenizer.Decode(ids);
    if (text.size() > shown.size()) std::fputs(text.c_str() + shown.size(), stdout);
    std::fflush(stdout);
    shown = text;
  }
  std::fputs("\n", stdout);
}

}  // namespace

int GenerateCommand(CommandLine& line) {
  Arguments arguments(line.arguments, kGenerateUsage);
  SamplingOptions options;
  const std::string prompt = arguments.Option("prompt").value_or("");
  const int64_t max_tokens = arguments.Integer("max-tokens").value_or(200);
  options.temperature = arguments.Number("temperature").value_or(options.temperature);
  options.top_k = arguments.Integer("top-k").value_or(options.top_k);
  options.top_p = arguments.Number("top-p").value_or(options.top_p);
  options.seed =
      static_cast<uint64_t>(arguments.Integer("seed", 0, std::numeric_limits<int64_t>::max()).value_or(1234));
  const auto spec = arguments.Option("tokenizer");
  const int64_t threads = arguments.Integer("threads").value_or(0);
  const std::string path = arguments.Positional("CHECKPOINT");
  arguments.Finish();
  if (options.temperature < 0) arguments.Fail("--temperature must not be negative");
  if (options.top_p <= 0 || options.top_p > 1) arguments.Fail("--top-p must be in (0, 1]");
  FileSystem& fs = PosixFileSystem();
  return OnOneRank(line, threads, [&](RankContext& context) {
    LoadedModel loaded(fs, path, context);
    std::unique_ptr<Tokenizer> named;
    if (spec) named = OpenTokenizer(fs, *spec);
    Generate(loaded, Need(named ? named.get() : loaded.tokenizer(), path), prompt, max_tokens, options);
  });
}

int EvalCommand(CommandLine& line) {
  Arguments arguments(line.arguments, kEvalUsage);
  const int64_t batches = arguments.Integer("batches").value_or(0);
  const int64_t threads = arguments.Integer("threads").value_or(0);
  const bool partial = arguments.Flag("partial");
  const std::string path = arguments.Positional("CHECKPOINT"), data_path = arguments.Positional("DATA");
  arguments.Finish();
  FileSystem& fs = PosixFileSystem();
  return OnOneRank(line, threads, [&](RankContext& context) {
    LoadedModel loaded(fs, path, context, partial);
    std::string tokens = data_path;
    uint64_t text_bytes = 0;
    if (!data_path.ends_with(".bin")) {
      const Tokenizer& tokenizer = Need(loaded.tokenizer(), path);
      text_bytes = fs.OpenForRead(data_path)->Size();
      tokens = TokenizeToCache(fs, tokenizer, data_path, TokenizeOptions{},
                               JoinPath(loaded.config().run.dir, "tokens"), context.device().pool());
    }
    TokenDatasetOptions options;
    options.seq_len =
        loaded.config().data.seq_len > 0 ? loaded.config().data.seq_len : loaded.model().max_seq_len();
    const TokenDataset data({TokenFile::Open(fs, tokens, loaded.model().vocab_size())}, options);
    constexpr int64_t kRows = 8;
    double loss = 0;
    int64_t valid = 0;
    for (int64_t begin = 0; begin < data.num_samples() && (batches == 0 || begin < batches * kRows);
         begin += kRows) {
      std::vector<int64_t> samples(static_cast<size_t>(std::min(kRows, data.num_samples() - begin)));
      std::iota(samples.begin(), samples.end(), begin);
      Batch batch = MakeBatch(data, samples, data.seq_len());
      batch.first_row = begin;
      SetTargets(loaded.config(), 0, &batch);
      Tape tape = loaded.EvaluationTape();
      loss +=
          SumLosses(context.executor(), loaded.model().Loss(tape, UploadBatch(tape, batch), 0.0f).front());
      valid += batch.valid_tokens;
    }
    const double mean = loss / static_cast<double>(std::max<int64_t>(valid, 1));
    LogInfo("tokens      {}", valid);
    LogInfo("loss        {:.4f}", mean);
    LogInfo("perplexity  {:.3f}", std::exp(mean));
    if (text_bytes > 0 && batches == 0) {
      const double bytes_a_token = static_cast<double>(text_bytes) / static_cast<double>(data.num_tokens());
      LogInfo("bits a byte {:.4f}", mean / std::log(2.0) / bytes_a_token);
    }
  });
}

int ImportCommand(CommandLine& line) {
  Arguments arguments(line.arguments, kImportUsage);
  const auto spec = arguments.Option("tokenizer");
  const std::string from = arguments.Positional("HF_FOLDER"), to = arguments.Positional("OUT");
  arguments.Finish();
  FileSystem& fs = PosixFileSystem();
  return OnOneRank(line, 0, [&](RankContext& context) {
    SavedModel saved(fs, from);
    const std::unique_ptr<Tokenizer> tokenizer = spec ? OpenTokenizer(fs, *spec) : saved.TakeTokenizer();
    CheckpointInfo info;
    RunConfig config = saved.config();
    config.run.dir = to;
    info.config_yaml = config.ToYaml();
    info.trainer = nlohmann::json::object();
    if (tokenizer) info.tokenizer = tokenizer->Save();
    CheckpointSaver saver(fs, JoinPath(to, "checkpoints"), 0, false, context.device(),
                          context.mesh().world());
    Transformer model(config.model.sizes);
    saver.Save(info, WholeWeights(model.Parameters()), model.Parameters(),
               [read = saved.Weights()](const StateSlice& slice, int64_t at, float* to, int64_t n) {
                 read(slice.parameter->name, slice.begin + at, n, to);
               });
    LogInfo("imported {} parameters{}", FormatCount(static_cast<double>(config.model.sizes.NumParameters())),
            tokenizer ? " and the tokenizer" : "; no tokenizer lay beside them (--tokenizer SPEC adds one)");
  });
}

int ExportCommand(CommandLine& line) {
  Arguments arguments(line.arguments, kExportUsage);
  const std::string name = arguments.Option("dtype").value_or("fp32");
  const std::string from = arguments.Positional("CHECKPOINT"), to = arguments.Positional("OUT_FOLDER");
  arguments.Finish();
  const DType dtype = name == "fp32"   ? DType::kF32
                      : name == "bf16" ? DType::kBF16
                      : name == "fp16" ? DType::kF16
                                       : DType::kU8;
  if (dtype == DType::kU8) arguments.Fail("--dtype wants fp32, bf16 or fp16, not '" + name + "'");
  FileSystem& fs = PosixFileSystem();
  SavedModel saved(fs, from);
  WritePublished(fs, to, saved.config().model.sizes, dtype, saved.Weights());
  LogInfo("wrote {}", to);
  return 0;
}

}  // namespace strata
