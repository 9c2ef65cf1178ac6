#include "tools/run_data.h"

#include <fnmatch.h>

#include <algorithm>

#include "data/packed_dataset.h"
#include "data/token_file.h"
#include "data/tokenize.h"
#include "runtime/base/log.h"

namespace strata {
namespace {

bool IsTokenFile(const std::string& path) { return path.ends_with(".bin"); }

// What an entry of data.train or data.valid stands for: itself, or the files that match it.
std::vector<std::string> Files(FileSystem& fs, const std::string& entry) {
  if (entry.find_first_of("*?[") == std::string::npos || fs.Exists(entry)) return {entry};
  const size_t slash = entry.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : entry.substr(0, std::max<size_t>(slash, 1));
  const std::string pattern = entry.substr(slash + 1);  // npos + 1 is 0
  std::vector<std::string> files;
  if (fs.IsDirectory(folder)) {
    for (const std::string& name : fs.List(folder)) {
      if (fnmatch(pattern.c_str(), name.c_str(), FNM_PERIOD) == 0)
        files.push_back(slash == std::string::npos ? name : JoinPath(folder, name));
    }
  }
  if (files.empty()) {
    throw DataError(StrCat("no file matches ", entry),
                    StrCat("patterns are for the names of files; the folder is ", folder));
  }
  return files;
}

// Token files, corpus after corpus.
struct Corpora {
  std::vector<std::string> paths;
  std::vector<int64_t> files_per_corpus;
};

// Those of `entries`; text among them is tokenised when this rank is the one to do it.
Corpora TokenFiles(FileSystem& fs, const RunConfig& config, const std::vector<std::string>& entries,
                   const Tokenizer* tokenizer, ThreadPool& pool) {
  Corpora corpora;
  for (const std::string& entry : entries) {
    const std::vector<std::string> files = Files(fs, entry);
    corpora.files_per_corpus.push_back(std::ssize(files));
    for (const std::string& file : files) {
      corpora.paths.push_back(IsTokenFile(file) ? file
                                                : TokenizeToCache(fs, *tokenizer, file, {},
                                                                  JoinPath(config.run.dir, "tokens"), pool));
    }
  }
  return corpora;
}

std::unique_ptr<FileDataset> OpenDataset(FileSystem& fs, const RunConfig& config, const Corpora& corpora,
                                         Split split, const char* use) {
  std::vector<std::shared_ptr<const TokenFile>> files;
  for (const std::string& path : corpora.paths)
    files.push_back(TokenFile::Open(fs, path, config.model.sizes.vocab_size));
  TokenDatasetOptions options;
  options.seq_len = config.data.seq_len;
  options.valid_split = config.data.valid_split;
  options.split = split;
  options.files_per_corpus = corpora.files_per_corpus;
  if (!config.data.packed) return std::make_unique<TokenDataset>(std::move(files), options);
  auto packed = std::make_unique<PackedDataset>(std::move(files), options);
  const auto places = static_cast<double>(packed->num_samples() * packed->seq_len());
  LogInfo("packed {} documents and pieces of documents into {} {} rows: {:.2f} % padding",
          packed->num_pieces(), packed->num_samples(), use,
          100 * (1 - static_cast<double>(packed->num_targets()) / places));
  return packed;
}

}  // namespace

std::unique_ptr<Tokenizer> OpenRunTokenizer(FileSystem& fs, const DataSection& data) {
  std::vector<std::string> texts;
  std::string carrier;  // the token file that the tokenizer was taken from
  std::unique_ptr<Tokenizer> carried;
  uint64_t hash = 0;
  std::vector<std::string> paths;
  for (const std::string& entry : data.train) {
    for (std::string& file : Files(fs, entry)) paths.push_back(std::move(file));
  }
  for (const std::string& path : paths) {
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

RunDatasets OpenRunDatasets(FileSystem& fs, const RunConfig& config, const Tokenizer* tokenizer,
                            ThreadPool& pool, Communicator& world) {
  // Rank 0 fills the cache; everyone then finds it filled.
  if (world.rank() != 0) world.Barrier();
  const auto train = TokenFiles(fs, config, config.data.train, tokenizer, pool);
  const auto valid = TokenFiles(fs, config, config.data.valid, tokenizer, pool);
  if (world.rank() == 0) world.Barrier();

  RunDatasets datasets;
  const Split split = config.data.valid_split > 0 ? Split::kTrain : Split::kAll;
  datasets.train = OpenDataset(fs, config, train, split, "training");
  if (config.data.valid_split > 0) {
    datasets.valid = OpenDataset(fs, config, train, Split::kValid, "validation");
  } else if (!valid.paths.empty()) {
    datasets.valid = OpenDataset(fs, config, valid, Split::kAll, "validation");
  }
  return datasets;
}

}  // namespace strata
