#include "tools/run_data.h"

#include <catch2/catch.hpp>

#include "data/packed_dataset.h"
#include "data/test_data.h"
#include "tests/single_rank.h"
#include "tools/masking.h"

namespace strata {
namespace {

// A run of bytes over files of this many letters each, in a folder of its own.
class Folder {
 public:
  explicit Folder(const std::vector<std::pair<std::string, size_t>>& files) {
    PosixFileSystem().CreateDirectories(path("shards"));
    for (const auto& [name, size] : files) testing::PutFile(path(name), std::string(size, name.back()));
  }
  std::string path(const std::string& name) const { return JoinPath(folder_.path(), name); }

  RunDatasets Open(std::string data) {
    for (size_t at; (at = data.find('@')) != std::string::npos;) data.replace(at, 1, folder_.path());
    RunConfig config =
        RunConfig::Parse("model: {max_seq_len: 8}\ntrain: {micro_batch_size: 1}\nrun: {dir: " + path("run") +
                             "}\ndata: {" + data + "}",
                         "test", {});
    const auto tokenizer = OpenRunTokenizer(PosixFileSystem(), config.data);
    config.Resolve(1, SettleVocabulary(tokenizer.get(), config));
    return OpenRunDatasets(PosixFileSystem(), config, tokenizer.get(), rank_.device->pool(),
                           rank_.mesh.world());
  }

 private:
  testing::TemporaryFolder folder_;
  testing::SingleRank rank_;
};

using Ends = std::vector<int64_t>;

TEST_CASE("a pattern stands for the files that match, sorted, and is one corpus") {
  Folder folder({{"a", 17}, {"shards/2.b", 9}, {"shards/1.a", 25}, {"shards/3.c", 17}, {"shards/.4.d", 33}});
  const RunDatasets data = folder.Open("train: ['@/shards/*', '@/a'], valid: ['@/shards/[12].?']");
  CHECK(data.train->corpus_ends() == Ends{3 + 1 + 2, 3 + 1 + 2 + 2});
  CHECK(data.valid->corpus_ends() == Ends{3 + 1});
  std::string first_letters;
  for (int64_t sample = 0; sample < data.train->num_samples(); ++sample)
    first_letters += static_cast<char>(MakeBatch(*data.train, {{sample}}, 1).inputs[0]);
  CHECK(first_letters == "aaabccaa");
}

TEST_CASE("a file whose name looks like a pattern is itself; a pattern that matches nothing is refused") {
  Folder folder({{"a*", 9}, {"ab", 17}});
  CHECK(folder.Open("train: ['@/a*']").train->num_samples() == 1);
  for (const std::string pattern : {"@/b*", "@/nowhere/*", "@/*/a"}) {
    CHECK_THROWS_WITH(folder.Open("train: ['" + pattern + "']"),
                      Catch::Contains("no file matches") && Catch::Contains(pattern.substr(1)));
  }
}

TEST_CASE("samples are windows, or documents when the configuration says so") {
  Folder folder({{"a", 6}, {"b", 20}});
  const std::string files = "train: ['@/a', '@/b']";
  CHECK(folder.Open(files).train->corpus_ends() == Ends{0, 2});
  const RunDatasets packed = folder.Open(files + ", valid: ['@/a'], samples: documents");
  CHECK(packed.train->corpus_ends() == Ends{1, 4});
  CHECK(packed.train->features().documents);
  CHECK(packed.valid->num_samples() == 1);
}

}  // namespace
}  // namespace strata
