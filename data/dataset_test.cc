#include "data/dataset.h"

#include <numeric>

#include "data/batch.h"
#include "data/symbol_tokenizer.h"
#include "data/test_data.h"
#include "runtime/base/error.h"
#include "runtime/base/testing.h"

namespace strata {
namespace {

using Ids = std::vector<int32_t>;

// A token file of 0, 1, 2 … with documents of the given lengths.
std::shared_ptr<const TokenFile> Counting(const std::vector<int>& documents, int first = 0) {
  const testing::TemporaryFolder folder;
  const ByteTokenizer tokenizer;
  TokenFileWriter writer(PosixFileSystem(), folder.path() + "/t.bin", tokenizer);
  for (int length : documents) {
    for (int i = 0; i < length; ++i) writer.Append(Ids{first++});
    writer.EndDocument();
  }
  writer.Finish();
  return TokenFile::Open(PosixFileSystem(), folder.path() + "/t.bin");
}

Ids Range(int begin, int end) {
  Ids ids(static_cast<size_t>(end - begin));
  std::iota(ids.begin(), ids.end(), begin);
  return ids;
}

TEST_CASE("data shorter than a sample is an error with the numbers") {
  for (int tokens : {10, 16}) {
    try {
      TokenDataset({Counting({tokens})}, {.seq_len = 16});
      FAIL(tokens);
    } catch (const DataError& e) {
      CHECK_THAT(e.what(),
                 Catch::Contains(std::to_string(tokens) + " tokens") && Catch::Contains("takes 17"));
    }
  }
  const TokenDataset dataset({Counting({17})}, {.seq_len = 16});
  CHECK(dataset.num_samples() == 1);
  const Batch batch = MakeBatch(dataset, std::vector<int64_t>{0}, 16);
  CHECK(batch.inputs == Range(0, 16));
  CHECK(batch.targets == Range(1, 17));
  CHECK(batch.valid_tokens == 16);
}

TEST_CASE("samples are windows that share one token with the next, and do not reach across files") {
  const TokenDataset dataset({Counting({14}), Counting({3}, 50), Counting({9}, 100)}, {.seq_len = 4});
  CHECK(dataset.num_samples() == 3 + 0 + 2);
  CHECK(dataset.num_tokens() == 26);
  const Batch batch = MakeBatch(dataset, std::vector<int64_t>{2, 3, 4}, 4);
  CHECK(batch.inputs == Ids{8, 9, 10, 11, 100, 101, 102, 103, 104, 105, 106, 107});
  CHECK(batch.targets == Ids{9, 10, 11, 12, 101, 102, 103, 104, 105, 106, 107, 108});
  CHECK(batch.sample_ids == std::vector<int64_t>{2, 3, 4});
  CHECK(batch.positions.empty());
}

TEST_CASE("the validation split is the end of each file, and shares no token with training") {
  const auto file = Counting({100});
  const TokenDataset train({file}, {.seq_len = 8, .valid_split = 0.25, .split = Split::kTrain});
  const TokenDataset valid({file}, {.seq_len = 8, .valid_split = 0.25, .split = Split::kValid});
  CHECK(train.num_tokens() == 75);
  CHECK(valid.num_tokens() == 25);
  CHECK(train.num_samples() == 9);
  CHECK(valid.num_samples() == 3);
  CHECK(MakeBatch(valid, std::vector<int64_t>{0}, 8).inputs == Range(75, 83));
  CHECK(MakeBatch(train, std::vector<int64_t>{8}, 8).targets.back() == 72);
  CHECK_THROWS_AS(TokenDataset({file}, {.seq_len = 8, .valid_split = 1.0}), ConfigError);
  CHECK_THROWS_AS(TokenDataset({file}, {.seq_len = 0}), ConfigError);
}

TEST_CASE("a shorter row is the sample's beginning, a row without a sample is all ignored") {
  const TokenDataset dataset({Counting({17})}, {.seq_len = 8});
  const Batch batch = MakeBatch(dataset, std::vector<int64_t>{1, kNoSample}, 3);
  CHECK(batch.inputs == Ids{8, 9, 10, 0, 0, 0});
  CHECK(batch.targets == Ids{9, 10, 11, kIgnoredTarget, kIgnoredTarget, kIgnoredTarget});
  CHECK(batch.valid_tokens == 3);
}

TEST_CASE("documents are told apart where asked") {
  const TokenDataset dataset({Counting({3, 1, 4, 9})}, {.seq_len = 8, .document_mask = true});
  const Batch batch = MakeBatch(dataset, std::vector<int64_t>{0, 1}, 8);
  const int32_t none = kIgnoredTarget;
  CHECK(batch.segment_ids == Ids{0, 0, 0, 1, 2, 2, 2, 2, 0, 0, 0, 0, 0, 0, 0, 0});
  CHECK(batch.positions == Ids{0, 1, 2, 0, 0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7});
  CHECK(batch.targets == Ids{1, 2, none, none, 5, 6, 7, none, 9, 10, 11, 12, 13, 14, 15, 16});
  CHECK(batch.valid_tokens == 13);
  // Document ends inside the window that began in the middle of one.
  const TokenDataset shifted({Counting({6, 11})}, {.seq_len = 4, .document_mask = true});
  const Batch second = MakeBatch(shifted, std::vector<int64_t>{1}, 4);
  CHECK(second.inputs == Ids{4, 5, 6, 7});
  CHECK(second.segment_ids == Ids{0, 0, 1, 1});
  CHECK(second.positions == Ids{0, 1, 0, 1});
  CHECK(second.targets == Ids{5, none, 7, 8});
}

TEST_CASE("a dataset of the user's own, with padding") {
  class Padded : public Dataset {
   public:
    int64_t num_samples() const override { return 2; }
    int64_t seq_len() const override { return 4; }
    DatasetFeatures features() const override { return {.documents = false, .padding = true}; }
    void Get(int64_t sample, SampleRow row) const override {
      for (size_t i = 0; i < row.inputs.size(); ++i) {
        const bool real = static_cast<int64_t>(i) <= sample;
        row.inputs[i] = 7;
        row.key_mask[i] = real;
        row.targets[i] = real ? 8 : kIgnoredTarget;
      }
    }
  };
  const Batch batch = MakeBatch(Padded(), std::vector<int64_t>{1, 0}, 4);
  CHECK(batch.key_mask == std::vector<uint8_t>{1, 1, 0, 0, 1, 0, 0, 0});
  CHECK(batch.valid_tokens == 3);
}

}  // namespace
}  // namespace strata
