#include "data/packed_dataset.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <set>
#include <utility>

#include "data/batch.h"
#include "data/loader.h"
#include "data/mixture.h"
#include "data/test_data.h"
#include "runtime/base/error.h"

namespace strata {
namespace {

using Ids = std::vector<int32_t>;
using testing::CountingFile;
constexpr int32_t kNone = kIgnoredTarget;

Batch Rows(const Dataset& dataset, const std::vector<int64_t>& samples) {
  return MakeBatch(dataset, samples, dataset.seq_len());
}

Batch AllRows(const Dataset& dataset) {
  std::vector<int64_t> samples(static_cast<size_t>(dataset.num_samples()));
  std::iota(samples.begin(), samples.end(), 0);
  return Rows(dataset, samples);
}

// Best fit decreasing as its definition says: every piece looks at every row.
std::vector<int64_t> PackPlainly(const Ids& lengths, int64_t space) {
  struct Row {
    int64_t left, filled_at;
    size_t longest;
  };
  std::vector<size_t> order(lengths.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return lengths[a] > lengths[b]; });
  std::vector<Row> rows;
  std::vector<size_t> row_of(lengths.size());
  int64_t now = 0;
  for (size_t piece : order) {
    size_t best = rows.size();
    for (size_t r = 0; r < rows.size(); ++r) {
      if (rows[r].left < lengths[piece]) continue;
      if (best == rows.size() ||
          std::pair(rows[r].left, -rows[r].filled_at) < std::pair(rows[best].left, -rows[best].filled_at))
        best = r;
    }
    if (best == rows.size()) rows.push_back({space, 0, piece});
    rows[best].left -= lengths[piece];
    rows[best].filled_at = ++now;
    row_of[piece] = best;
  }
  std::vector<int64_t> numbers;
  for (size_t row : row_of) {
    numbers.push_back(std::count_if(rows.begin(), rows.end(),
                                    [&](const Row& other) { return other.longest < rows[row].longest; }));
  }
  return numbers;
}

Ids RandomLengths(std::mt19937& random, size_t count, int32_t longest) {
  Ids lengths(count);
  for (int32_t& length : lengths) {
    const auto limit = random() % 2 == 0 ? longest : std::max(1, longest / 4);
    length = static_cast<int32_t>(1 + random() % static_cast<uint32_t>(limit));
  }
  return lengths;
}

TEST_CASE("pieces lie where a plain best fit decreasing puts them") {
  std::mt19937 random(1);
  for (int round = 0; round < 60; ++round) {
    const auto space = static_cast<int32_t>(1 + random() % 40);
    const Ids lengths = RandomLengths(random, random() % 200, space);
    CHECK(PackPieces(lengths, space) == PackPlainly(lengths, space));
  }
  CHECK(PackPieces({}, 8).empty());
}

TEST_CASE("rows are full but for little, and no two could have been one") {
  std::mt19937 random(2);
  const Ids lengths = RandomLengths(random, 5000, 512);
  std::vector<int64_t> filled;
  const std::vector<int64_t> row_of = PackPieces(lengths, 512);
  for (size_t i = 0; i < lengths.size(); ++i) {
    filled.resize(std::max(filled.size(), static_cast<size_t>(row_of[i]) + 1));
    filled[static_cast<size_t>(row_of[i])] += lengths[i];
  }
  CHECK(*std::max_element(filled.begin(), filled.end()) <= 512);
  const int64_t total = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
  CHECK(static_cast<double>(total) / (512.0 * static_cast<double>(filled.size())) > 0.995);
  std::sort(filled.begin(), filled.end());
  CHECK(filled[0] + filled[1] > 512);
}

// Documents of 5, 1, 12, 3 and 3 tokens take 4, none, 8 and 3, 2, 2 places. Longest first: 8 fills a row; 4
// opens the next, where 3 fits; 2 opens another, where the other 2 fits. The row of 4 has the first longest
// piece in the text.
TEST_CASE("rows hold whole documents, each with positions and a segment of its own, then padding") {
  const PackedDataset dataset({CountingFile({5, 1, 12, 3, 3})}, {.seq_len = 8});
  CHECK(dataset.num_samples() == 3);
  CHECK(dataset.num_pieces() == 5);
  CHECK(dataset.num_targets() == 19);
  const Batch batch = AllRows(dataset);
  CHECK(batch.inputs == Ids{0,  1,  2,  3,  14, 15, 16, 0,   //
                            6,  7,  8,  9,  10, 11, 12, 13,  //
                            18, 19, 21, 22, 0,  0,  0,  0});
  CHECK(batch.targets == Ids{1,  2,  3,  4,  15,    16,    17,    kNone,  //
                             7,  8,  9,  10, 11,    12,    13,    14,     //
                             19, 20, 22, 23, kNone, kNone, kNone, kNone});
  CHECK(batch.positions == Ids{0, 1, 2, 3, 0, 1, 2, 0,  //
                               0, 1, 2, 3, 4, 5, 6, 7,  //
                               0, 1, 0, 1, 0, 0, 0, 0});
  CHECK(batch.segment_ids == Ids{0, 0, 0, 0, 1, 1, 1, 2,  //
                                 0, 0, 0, 0, 0, 0, 0, 0,  //
                                 0, 0, 1, 1, 2, 2, 2, 2});
  CHECK(batch.key_mask == std::vector<uint8_t>{1, 1, 1, 1, 1, 1, 1, 0,  //
                                               1, 1, 1, 1, 1, 1, 1, 1,  //
                                               1, 1, 1, 1, 0, 0, 0, 0});
  CHECK(batch.valid_tokens == 19);
}

TEST_CASE("a row shorter than the sample is that part of it") {
  const PackedDataset dataset({CountingFile({5, 1, 12, 3, 3})}, {.seq_len = 8});
  const Batch cut = MakeBatch(dataset, std::vector<int64_t>{0, 2}, 3, 2);
  CHECK(cut.inputs == Ids{0, 1, 2, 3, 14, 15, 18, 19, 21, 22, 0, 0});
  CHECK(cut.targets == Ids{1, 2, 3, 4, 15, 16, 19, 20, 22, 23, kNone, kNone});
  CHECK(cut.positions == Ids{0, 1, 2, 0, 0, 1, 0, 1, 0, 0, 0, 0});
  CHECK(cut.segment_ids == Ids{0, 0, 0, 0, 1, 1, 0, 0, 1, 0, 1, 1});
  CHECK(cut.key_mask == std::vector<uint8_t>{1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0});
  const Batch padding = MakeBatch(dataset, std::vector<int64_t>{2}, 2, 4);
  CHECK(std::vector(padding.key_mask.end() - 4, padding.key_mask.end()) == std::vector<uint8_t>(4, 0));
}

TEST_CASE("every token but each document's first is predicted once, from the one before it") {
  std::mt19937 random(3);
  std::vector<std::shared_ptr<const TokenFile>> files;
  std::set<int32_t> targets;  // that must come
  int32_t next = 0;
  for (int file = 0; file < 3; ++file) {
    std::vector<int> documents;
    const int32_t first = next;
    for (int i = 0; i < 60; ++i) {
      documents.push_back(1 + static_cast<int>(random() % (i % 10 == 0 ? 90 : 20)));
      for (int token = 1; token < documents.back(); ++token) targets.insert(next + token);
      next += documents.back();
    }
    files.push_back(CountingFile(documents, first));
  }
  const PackedDataset dataset(files, {.seq_len = 16});
  const Batch batch = AllRows(dataset);
  CHECK(batch.valid_tokens == dataset.num_targets());
  for (size_t i = 0; i < batch.targets.size(); ++i) {
    if (batch.targets[i] == kNone) {
      CHECK(batch.key_mask[i] == 0);
      continue;
    }
    CHECK(batch.inputs[i] == batch.targets[i] - 1);
    CHECK(targets.erase(batch.targets[i]) == 1);
    // Within a segment tokens and positions count on; at its beginning positions are 0.
    const bool goes_on = i % 16 > 0 && batch.segment_ids[i] == batch.segment_ids[i - 1];
    CHECK(batch.positions[i] == (goes_on ? batch.positions[i - 1] + 1 : 0));
    if (goes_on) CHECK(batch.inputs[i] == batch.inputs[i - 1] + 1);
  }
  CHECK(targets.empty());

  // Rows do not mix files.
  const std::vector<int64_t> ends = dataset.corpus_ends();
  REQUIRE(ends.size() == 3);
  CHECK(ends.back() == dataset.num_samples());
  const PackedDataset second({files[1]}, {.seq_len = 16});
  const Batch alone = AllRows(second);
  CHECK(second.num_samples() == ends[1] - ends[0]);
  CHECK(std::equal(alone.inputs.begin(), alone.inputs.end(), batch.inputs.begin() + ends[0] * 16));
}

TEST_CASE("a document belongs to the part of the file that it begins in") {
  const auto file = CountingFile({4, 4, 4, 4});
  const PackedDataset train({file}, {.seq_len = 8, .valid_split = 0.4, .split = Split::kTrain});
  const PackedDataset valid({file}, {.seq_len = 8, .valid_split = 0.4, .split = Split::kValid});
  CHECK(AllRows(train).inputs == Ids{0, 1, 2, 4, 5, 6, 0, 0, 8, 9, 10, 0, 0, 0, 0, 0});  // the cut is at 9
  CHECK(AllRows(valid).inputs == Ids{12, 13, 14, 0, 0, 0, 0, 0});
  CHECK_THROWS_WITH(
      PackedDataset({CountingFile({40})}, {.seq_len = 8, .valid_split = 0.1, .split = Split::kValid}),
      Catch::Contains("no document of two tokens or more begins in the 4 tokens of this part"));
  CHECK_THROWS_AS(PackedDataset({CountingFile({1, 1, 1})}, {.seq_len = 8}), DataError);
  CHECK_THROWS_AS(PackedDataset({file}, {.seq_len = 0}), ConfigError);
}

TEST_CASE("packed data have a fingerprint of their own") {
  const auto file = CountingFile({9, 9}), other = CountingFile({10, 8});
  const std::set<uint64_t> different = {
      PackedDataset({file}, {.seq_len = 8}).fingerprint(),
      PackedDataset({other}, {.seq_len = 8}).fingerprint(),
      PackedDataset({file}, {.seq_len = 4}).fingerprint(), TokenDataset({file}, {.seq_len = 8}).fingerprint(),
      TokenDataset({file}, {.seq_len = 8, .document_mask = true}).fingerprint()};
  CHECK(different.size() == 5);
  CHECK(PackedDataset({CountingFile({9, 9})}, {.seq_len = 8}).fingerprint() ==
        PackedDataset({file}, {.seq_len = 8}).fingerprint());
}

// Corpora of one file and of two; ranks put together see the mixture's order, a file's rows in their shares.
TEST_CASE("a mixture of packed corpora is the same for any number of ranks") {
  const std::vector<int> documents(40, 6);
  const PackedDataset dataset(
      {CountingFile(documents), CountingFile(documents, 1000), CountingFile(documents, 2000)},
      {.seq_len = 10, .files_per_corpus = {1, 2}});
  CHECK(dataset.corpus_ends() == std::vector<int64_t>{20, 60});
  std::vector<int32_t> expected;
  for (int64_t ranks : {1, 2, 4}) {
    constexpr int64_t kSteps = 15, kBatch = 8;
    std::vector<int32_t> seen(kSteps * kBatch, -1);  // first token of each row
    for (int64_t rank = 0; rank < ranks; ++rank) {
      Loader loader(
          dataset,
          std::make_unique<MixtureSampler>(dataset.corpus_ends(), std::vector<double>{3, 1}, kBatch, 7),
          {.micro_batch_size = 2, .dp_rank = rank, .dp_size = ranks});
      for (int64_t i = 0; i < kSteps * kBatch / (2 * ranks); ++i) {
        const Batch batch = loader.Next();
        for (int64_t row = 0; row < 2; ++row)
          seen[(batch.step - 1) * kBatch + batch.first_row + row] = batch.inputs[row * 10];
      }
    }
    if (ranks == 1) expected = seen;
    CHECK(seen == expected);
  }
  CHECK(std::count_if(expected.begin(), expected.end(), [](int32_t id) { return id < 1000; }) == 90);
}

}  // namespace
}  // namespace strata
