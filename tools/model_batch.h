// Between the data's batches and the model: a batch on the device, and losses on the host. For training and
// evaluation alike. Threading: the rank's thread.
#pragma once

#include <vector>

#include "data/batch.h"
#include "kernels/executor.h"
#include "models/model.h"
#include "runtime/base/rng.h"

namespace strata {

/// Random ids below `vocab`, for trials without data. Rows are numbered from `first_row` on in the batch of
/// the whole step, and a token is a function of `random` and its place there, so it is the same in any
/// layout.
Batch RandomBatch(const RandomStream& random, int64_t vocab, int64_t first_row, int64_t batch_size,
                  int64_t seq_len);
/// A micro-batch in device memory. Positions count from each row's begin where the batch has none of its own.
ModelInput UploadBatch(const Tape& tape, const Batch& batch);
/// Per-token losses ([rows] fp32) on the host.
std::vector<float> DownloadLosses(const Executor& executor, const Tensor& losses);
/// Their sum, in double, in the order of tokens.
double SumLosses(const Executor& executor, const Tensor& losses);

}  // namespace strata
