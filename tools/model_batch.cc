#include "tools/model_batch.h"

#include <numeric>

namespace strata {

Batch RandomBatch(const RandomStream& random, int64_t vocab, int64_t first_row, int64_t batch_size,
                  int64_t seq_len) {
  Batch batch;
  batch.batch_size = batch_size;
  batch.seq_len = seq_len;
  batch.first_row = first_row;
  batch.valid_tokens = batch_size * seq_len;
  const auto id = [&](int64_t element) {
    return static_cast<int32_t>(random.Bits(static_cast<uint64_t>(element)) % static_cast<uint64_t>(vocab));
  };
  for (int64_t i = first_row * seq_len; i < (first_row + batch_size) * seq_len; ++i) {
    batch.inputs.push_back(id(2 * i));
    batch.targets.push_back(id(2 * i + 1));
  }
  return batch;
}

ModelInput UploadBatch(const Tape& tape, const Batch& batch) {
  ModelInput input;
  input.batch = batch.batch_size;
  input.seq_len = batch.seq_len;
  const int64_t rows = batch.batch_size * batch.seq_len;
  auto upload = [&](const auto& values, DType dtype, Shape shape) {
    if (values.empty()) return Tensor();
    return tape.Upload(TensorView(const_cast<void*>(static_cast<const void*>(values.data())), dtype, shape));
  };
  input.tokens = upload(batch.inputs, DType::kI32, {rows});
  input.targets = upload(batch.targets, DType::kI32, {rows});
  input.segment_ids = upload(batch.segment_ids, DType::kI32, {batch.batch_size, batch.seq_len});
  input.key_mask = upload(batch.key_mask, DType::kU8, {batch.batch_size, batch.seq_len});
  std::vector<int32_t> positions = batch.positions;
  if (positions.empty()) {
    positions.resize(static_cast<size_t>(rows));
    for (int64_t i = 0; i < rows; ++i)
      positions[static_cast<size_t>(i)] = static_cast<int32_t>(i % batch.seq_len);
  }
  input.positions = upload(positions, DType::kI32, {rows});
  return input;
}

std::vector<float> DownloadLosses(const Executor& executor, const Tensor& losses) {
  return HostCopy(executor.device(), losses.view());
}

double SumLosses(const Executor& executor, const Tensor& losses) {
  const std::vector<float> host = DownloadLosses(executor, losses);
  return std::accumulate(host.begin(), host.end(), 0.0);
}

}  // namespace strata
