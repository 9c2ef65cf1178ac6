#include "data/sentencepiece_tokenizer.h"
#include "data/token_file.h"
#include "data/tokenize.h"
#include "runtime/base/log.h"
#include "runtime/base/units.h"
#include "tools/arguments.h"
#include "tools/commands.h"

namespace strata {
namespace {

constexpr char kUsage[] =
    "usage: strata tokenize --tokenizer SPEC --out F.bin [--train-vocab N] [--layout strata|llm.c|nanogpt] "
    "[--separator TEXT]\n"
    "                       [--threads N] TEXT...\n"
    "SPEC: gpt2:FOLDER, hf:tokenizer.json, sentencepiece:FILE, wordpiece:FILE, char or byte\n"
    "--train-vocab N first trains the SentencePiece vocabulary FILE of N tokens on the texts\n"
    "example: strata tokenize --tokenizer sentencepiece:runs/sp.model --train-vocab 4096 --out "
    "runs/train.bin novels.txt";

TokenFileLayout ParseLayout(const Arguments& arguments, const std::string& name) {
  if (name == "strata") return TokenFileLayout::kStrata;
  if (name == "llm.c") return TokenFileLayout::kLlmC;
  if (name == "nanogpt") return TokenFileLayout::kNanoGpt;
  arguments.Fail("--layout wants strata, llm.c or nanogpt, not '" + name + "'");
}

}  // namespace

int TokenizeCommand(CommandLine& line) {
  Arguments arguments(line.arguments, kUsage);
  const auto spec = arguments.Option("tokenizer"), out = arguments.Option("out");
  const auto vocab = arguments.Integer("train-vocab", 1);
  const TokenFileLayout layout = ParseLayout(arguments, arguments.Option("layout").value_or("strata"));
  TokenizeOptions options;
  options.separator = arguments.Option("separator").value_or("");
  const int64_t threads = arguments.Integer("threads", 1).value_or(ThreadPool::AvailableCores());
  const std::vector<std::string> texts = arguments.Rest();
  if (!spec) arguments.Fail("missing --tokenizer SPEC");
  if (!out) arguments.Fail("missing --out F.bin");
  if (texts.empty()) arguments.Fail("missing TEXT");
  FileSystem& fs = PosixFileSystem();
  if (vocab) {
    constexpr std::string_view kPrefix = "sentencepiece:";
    if (!spec->starts_with(kPrefix))
      arguments.Fail("--train-vocab trains a sentencepiece:FILE, not " + *spec);
    SentencePieceTraining training;
    training.vocab_size = static_cast<int>(*vocab);
    TrainSentencePiece(fs, texts, training, spec->substr(kPrefix.size()));
    LogInfo("trained {} of {} tokens", spec->substr(kPrefix.size()), *vocab);
  }
  const auto tokenizer = OpenTokenizer(fs, *spec, texts);
  ThreadPool pool(static_cast<int>(threads));
  TokenFileWriter writer(fs, *out, *tokenizer, layout);
  const double begin = Now();
  TokenizeFiles(fs, *tokenizer, texts, options, pool, writer);
  writer.Finish();
  const auto file = TokenFile::Open(fs, *out);
  LogInfo("wrote {}: {} tokens in {} document{}, {}", *out, file->num_tokens(), file->document_ends().size(),
          file->document_ends().size() == 1 ? "" : "s", FormatSeconds(Now() - begin));
  return 0;
}

}  // namespace strata
