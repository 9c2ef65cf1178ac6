#include "data/dataset.h"

#include <numeric>
#include <set>

#include "data/batch.h"
#include "data/test_data.h"
#include "runtime/base/error.h"

namespace strata {
namespace {

using Ids = std::vector<int32_t>;
using testing::CountingFile;

Ids Range(int begin, int end) {
  Ids ids(static_cast<size_t>(end - begin));
  std::iota(ids.begin(), ids.end(), begin);
  return ids;
}

TEST_CASE("data shorter than a sample is an error with the numbers") {
  for (int tokens : {10, 16}) {
    try {
      TokenDataset({CountingFile({tokens})}, {.seq_len = 16});
      FAIL(tokens);
    } catch (const DataError& e) {
      CHECK_THAT(e.what(),
                 Catch::Contains(std::to_string(tokens) + " tokens") && Catch::Contains("takes 17"));
    }
  }
  const TokenDataset dataset({CountingFile({17})}, {.seq_len = 16});
  CHECK(dataset.num_samples() == 1);
  const Batch batch = MakeBatch(dataset, std::vector<int64_t>{0}, 16);
  CHECK(batch.inputs == Range(0, 16));
  CHECK(batch.targets == Range(1, 17));
  CHECK(batch.valid_tokens == 16);
}

TEST_CASE("samples are windows that share one token with the next, and do not reach across files") {
  const TokenDataset dataset({CountingFile({14}), CountingFile({3}, 50), CountingFile({9}, 100)},
                             {.seq_len = 4});
  CHECK(dataset.num_samples() == 3 + 0 + 2);
  CHECK(dataset.num_tokens() == 26);
  CHECK(dataset.corpus_ends() == std::vector<int64_t>{3, 3, 5});
  const Batch batch = MakeBatch(dataset, std::vector<int64_t>{2, 3, 4}, 4);
  CHECK(batch.inputs == Ids{8, 9, 10, 11, 100, 101, 102, 103, 104, 105, 106, 107});
  CHECK(batch.targets == Ids{9, 10, 11, 12, 101, 102, 103, 104, 105, 106, 107, 108});
  CHECK(batch.sample_ids == std::vector<int64_t>{2, 3, 4});
  CHECK(batch.positions.empty());
}

TEST_CASE("a corpus is as many files as are said to make it") {
  const TokenDatasetOptions options{.seq_len = 4, .files_per_corpus = {2, 1}};
  const TokenDataset dataset({CountingFile({14}), CountingFile({5}), CountingFile({9})}, options);
  CHECK(dataset.corpus_ends() == std::vector<int64_t>{3 + 1, 3 + 1 + 2});
}

TEST_CASE("the validation split is the end of each file, and shares no token with training") {
  const auto file = CountingFile({100});
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
  const TokenDataset dataset({CountingFile({17})}, {.seq_len = 8});
  const Batch batch = MakeBatch(dataset, std::vector<int64_t>{1, kNoSample}, 3);
  CHECK(batch.inputs == Ids{8, 9, 10, 0, 0, 0});
  CHECK(batch.targets == Ids{9, 10, 11, kIgnoredTarget, kIgnoredTarget, kIgnoredTarget});
  CHECK(batch.valid_tokens == 3);
}

TEST_CASE("a sample of several rows is cut where each ends, and each is a row of its own") {
  const TokenDataset dataset({CountingFile({3, 14})}, {.seq_len = 8, .document_mask = true});
  const Batch batch = MakeBatch(dataset, std::vector<int64_t>{1, kNoSample, 0}, 3, 2);
  CHECK(batch.batch_size == 6);
  CHECK(batch.inputs == Ids{8, 9, 10, 11, 12, 13, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5});
  const int32_t none = kIgnoredTarget;
  CHECK(batch.targets == Ids{9, 10, 11, 12, 13, 14, none, none, none, none, none, none, 1, 2, none, 4, 5, 6});
  CHECK(batch.positions == Ids{0, 1, 2, 0, 1, 2, 0, 0, 0, 0, 0, 0, 0, 1, 2, 0, 1, 2});
  CHECK(batch.sample_ids == std::vector<int64_t>{1, 1, kNoSample, kNoSample, 0, 0});
  CHECK(batch.valid_tokens == 11);
}

TEST_CASE("the fingerprint is that of the tokens, the part of them, and what samples are") {
  const auto file = CountingFile({40}), same = CountingFile({40}), documents = CountingFile({20, 20}),
             other = CountingFile({40}, 1);
  const TokenDatasetOptions options{.seq_len = 8};
  const auto of = [](std::vector<std::shared_ptr<const TokenFile>> files, TokenDatasetOptions o) {
    return TokenDataset(std::move(files), o).fingerprint();
  };
  CHECK(of({file}, options) == of({same}, options));
  const std::set<uint64_t> different = {
      of({file}, options),
      of({other}, options),
      of({documents}, options),
      of({file, other}, options),
      of({other, file}, options),
      of({file}, {.seq_len = 4}),
      of({file}, {.seq_len = 8, .document_mask = true}),
      of({file}, {.seq_len = 8, .valid_split = 0.5, .split = Split::kTrain}),
      of({file}, {.seq_len = 8, .valid_split = 0.5, .split = Split::kValid})};
  CHECK(different.size() == 9);

  // A layout without a checksum: bare 16-bit ids.
  const testing::TemporaryFolder folder;
  const std::string path = folder.path() + "/ids.bin";
  const auto of_bytes = [&](const std::string& bytes) {
    testing::PutFile(path, bytes);
    return of({TokenFile::Open(PosixFileSystem(), path)}, {.seq_len = 2});
  };
  const std::string bytes("\1\0\2\0\3\0\4\0", 8);
  const uint64_t before = of_bytes(bytes);
  CHECK(of_bytes(std::string("\1\0\2\0\3\0\5\0", 8)) != before);
  CHECK(of_bytes(bytes) == before);
}

TEST_CASE("documents are told apart where asked") {
  const TokenDataset dataset({CountingFile({3, 1, 4, 9})}, {.seq_len = 8, .document_mask = true});
  const Batch batch = MakeBatch(dataset, std::vector<int64_t>{0, 1}, 8);
  const int32_t none = kIgnoredTarget;
  CHECK(batch.segment_ids == Ids{0, 0, 0, 1, 2, 2, 2, 2, 0, 0, 0, 0, 0, 0, 0, 0});
  CHECK(batch.positions == Ids{0, 1, 2, 0, 0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7});
  CHECK(batch.targets == Ids{1, 2, none, none, 5, 6, 7, none, 9, 10, 11, 12, 13, 14, 15, 16});
  CHECK(batch.valid_tokens == 13);
  // Document ends inside the window that began in the middle of one.
  const TokenDataset shifted({CountingFile({6, 11})}, {.seq_len = 4, .document_mask = true});
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
    uint64_t fingerprint() const override { return 1; }
    DatasetFeatures features() const override { return {.documents = false, .padding = true}; }
    void Get(int64_t sample, int64_t begin, SampleRow row) const override {
      for (size_t i = 0; i < row.inputs.size(); ++i) {
        const bool real = begin + static_cast<int64_t>(i) <= sample;
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
