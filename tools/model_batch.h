// Between the data's batches and the model: a batch on the device, and losses on the host. For training and
// evaluation alike. Threading: the rank's thread.
#pragma once

#include "data/batch.h"
#include "kernels/executor.h"
#include "models/model.h"

namespace strata {

/// A micro-batch in device memory. Positions count from each row's begin where the batch has none of its own.
ModelInput UploadBatch(const Tape& tape, const Batch& batch);
/// Sum of per-token losses ([rows] fp32), in double, in the order of tokens.
double SumLosses(const Executor& executor, const Tensor& losses);

}  // namespace strata
