// What a run reads: its tokenizer and its datasets, made from the files that the configuration names.
//
// Text is tokenised once, by rank 0, into `run.dir/tokens/`; the other ranks wait and open what it wrote.
// Token files are used as they are. A path may be a pattern, `shards/*.bin`: it stands for the files that
// match its last part, sorted. Threading: each rank calls these functions in the same order.
#pragma once

#include <memory>

#include "data/dataset.h"
#include "data/tokenizer.h"
#include "parallel/communicator.h"
#include "tools/config.h"

namespace strata {

/// The tokenizer that `data.tokenizer` names, or the one that the token files carry; null for token files
/// that carry none. Throws DataError when token files carry different ones.
std::unique_ptr<Tokenizer> OpenRunTokenizer(FileSystem& fs, const DataSection& data);

struct RunDatasets {
  std::unique_ptr<FileDataset> train;  // a corpus for each entry of data.train
  std::unique_ptr<FileDataset> valid;  // null when none is configured
};

/// Opens the datasets of a resolved configuration. Collective over `world`.
RunDatasets OpenRunDatasets(FileSystem& fs, const RunConfig& config, const Tokenizer* tokenizer,
                            ThreadPool& pool, Communicator& world);

}  // namespace strata
