#include "tools/run_data.h"

#include "data/token_file.h"
#include "data/tokenize.h"
#include "runtime/base/log.h"

namespace strata {
namespace {

bool IsTokenFile(const std::string& path) { return path.ends_with(".bin"); }

// The paths of token files for `files`; text among them is tokenised when this rank is the one to do it.
std::vector<std::string> TokenFiles(FileSystem& fs, const RunConfig& config,
                                    const std::vector<std::string>& files, const Tokenizer* tokenizer,
                                    ThreadPool& pool) {
  std::vector<std::string> paths;
  for (const std::string& file : files) {
    if (IsTokenFile(file)) {
      paths.push_back(file);
      continue;
    }
    TokenizeOptions options;
    paths.push_back(TokenizeToCache(fs, *tokenizer, file, options, JoinPath(config.run.dir, "tokens"), pool));
  }
  return paths;
}

std::unique_ptr<TokenDataset> OpenDataset(FileSystem& fs, const RunConfig& config,
                                          const std::vector<std::string>& paths, Split split) {
  std::vector<std::shared_ptr<const TokenFile>> files;
  for (const std::string& path : paths)
    files.push_back(TokenFile::Open(fs, path, config.model.sizes.vocab_size));
  TokenDatasetOptions options;
  options.seq_len = config.data.seq_len;
  options.valid_split = config.data.valid_split;
  options.split = split;
  return std::make_unique<TokenDataset>(std::move(files), options);
}

}  // namespace

std::unique_ptr<Tokenizer> OpenRunTokenizer(FileSystem& fs, const DataSection& data) {
  std::vector<std::string> texts;
  std::string carrier;  // the token file that the tokenizer was taken from
  std::unique_ptr<Tokenizer> carried;
  uint64_t hash = 0;
  for (const std::string& path : data.train) {
    if (!IsTokenFile(path)) {
      texts.push_back(path);
      continue;
    }
    const auto file = TokenFile::Open(fs, path);
    if (file->saved_tokenizer().empty()) continue;
    if (carrier.empty()) {
      carrier = path;
      hash = file->tokenizer_hash();
      carried = LoadTokenizer(file->saved_tokenizer(), path);
    } else if (file->tokenizer_hash() != hash) {
      throw DataError(StrCat(path, " was made with another tokenizer than ", carrier),
                      "tokenize both with the same one");
    }
  }
  if (data.tokenizer.empty()) {
    if (carried || texts.empty()) return carried;
    return OpenTokenizer(fs, "byte");
  }
  auto named = OpenTokenizer(fs, data.tokenizer, texts);
  if (carried && named->hash() != hash) {
    throw DataError(StrCat(carrier, " was made with another tokenizer than data.tokenizer: ", data.tokenizer),
                    "leave data.tokenizer out to use the file's own, or tokenize the text again");
  }
  return named;
}

int64_t VocabularySize(const Tokenizer* tokenizer) { return tokenizer ? tokenizer->vocab_size() : 0; }

RunDatasets OpenRunDatasets(FileSystem& fs, const RunConfig& config, const Tokenizer* tokenizer,
                            ThreadPool& pool, Communicator& world) {
  // Rank 0 fills the cache; everyone then finds it filled.
  if (world.rank() != 0) world.Barrier();
  const auto train = TokenFiles(fs, config, config.data.train, tokenizer, pool);
  const auto valid = TokenFiles(fs, config, config.data.valid, tokenizer, pool);
  if (world.rank() == 0) world.Barrier();

  RunDatasets datasets;
  datasets.train = OpenDataset(fs, config, train, config.data.valid_split > 0 ? Split::kTrain : Split::kAll);
  if (config.data.valid_split > 0) {
    datasets.valid = OpenDataset(fs, config, train, Split::kValid);
  } else if (!valid.empty()) {
    datasets.valid = OpenDataset(fs, config, valid, Split::kAll);
  }
  return datasets;
}

}  // namespace strata
