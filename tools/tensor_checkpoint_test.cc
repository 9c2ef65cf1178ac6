// Checkpoints across tensor-parallel layouts: any part of a tensor to any other, published layouts from any
// of them, and what a manifest says of parts.
#include <stdlib.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <limits>
#include <set>
#include <utility>

#include "runtime/base/rng.h"
#include "runtime/base/testing.h"
#include "tests/tiny_run.h"
#include "tools/checkpoint.h"
#include "tools/initial_weights.h"
#include "tools/manifest.h"
#include "tools/saved_model.h"
#include "tools/tiny_checkpoint.h"

namespace strata {
namespace {

using testing::LoadTiny;
using testing::RestOn;
using testing::RunTiny;
using testing::SaveTiny;
using testing::TemporaryFolder;
using testing::TinyLayout;
using testing::TinyRank;
using testing::TinyResult;
using testing::WholeState;

struct Layout {
  int data, tensor, stage;
  Tier tier = Tier::kDevice;
};

// GPT: a tied table of an odd vocabulary. Llama: at four tensor-parallel ranks each has both key/value heads.
TinyLayout Tiny(ModelType type, const Layout& layout, const std::string& nvme) {
  TinyLayout tiny;
  tiny.type = type;
  tiny.num_heads = 4;
  tiny.dropout = 0.1;
  tiny.ranks = layout.data * layout.tensor;
  tiny.tensor = layout.tensor;
  tiny.sequence_parallel = layout.stage == 1;
  tiny.zero.stage = layout.stage;
  RestOn(layout.tier, nvme, tiny);
  return tiny;
}

std::string Export(const std::string& folder) {
  const std::string out = JoinPath(folder, "out");
  SavedModel saved(PosixFileSystem(), folder);
  WritePublished(PosixFileSystem(), out, saved.config().model.sizes, DType::kF32, saved.Weights());
  return ReadFile(PosixFileSystem(), JoinPath(out, "model.safetensors"));
}

const std::vector<Layout> kLayouts = {{4, 2, 3}, {2, 1, 0, Tier::kHost}, {1, 4, 1},
                                      {1, 1, 0}, {1, 4, 3, Tier::kNvme}, {3, 2, 2, Tier::kNvme},
                                      {4, 2, 3}};

TEST_CASE("a checkpoint passes from layout to layout and back: the same bits, the same losses, one export") {
  for (const ModelType type : testing::kModelTypes) {
    TemporaryFolder nvme;
    RunConfig config;
    config.model.type = type;
    config.model.sizes = testing::TinyConfig(Tiny(type, kLayouts[0], ""));
    TinyLayout first = Tiny(type, kLayouts[0], nvme.path());
    first.steps = 4;
    const TinyResult unbroken = RunTiny(first);
    auto folder = std::make_unique<TemporaryFolder>();
    WholeState saved;
    first.steps = 2;
    first.on_end = [&](const TinyRank& rank) {
      SaveTiny(rank, folder->path(), config);
      saved.AddSaved(rank.engine);
    };
    RunTiny(first);
    REQUIRE(saved.sound());
    const std::string exported = Export(folder->path());

    for (size_t i = 1; i < kLayouts.size(); ++i) {
      INFO(Name(type) << ": " << kLayouts[i].data << " x " << kLayouts[i].tensor << " stage "
                      << kLayouts[i].stage);
      // Each layout saves what it loaded, and the next one loads that.
      auto next = std::make_unique<TemporaryFolder>();
      WholeState loaded, again;
      TinyLayout tiny = Tiny(type, kLayouts[i], nvme.path());
      tiny.first_step = tiny.steps = 2;
      tiny.on_begin = [&](const TinyRank& rank) {
        LoadTiny(rank, folder->path());
        loaded.AddLoaded(rank.engine);
        again.AddSaved(rank.engine);
        SaveTiny(rank, next->path(), config);
      };
      const TinyResult resumed = RunTiny(tiny);
      CHECK((loaded.sound() && again.sound()));
      CHECK(loaded.values() == saved.values());
      CHECK(again.values() == saved.values());
      for (size_t step : {0, 1})
        CHECK(resumed.losses[step] == Approx(unbroken.losses[step + 2]).epsilon(1e-6));
      if (i + 1 == kLayouts.size()) {  // where it began
        CHECK(resumed.losses == std::vector(unbroken.losses.begin() + 2, unbroken.losses.end()));
        CHECK(resumed.weights == unbroken.weights);
      }
      CHECK(Export(next->path()) == exported);
      folder = std::move(next);
    }
  }
}

TEST_CASE("the first weights of a run come from any layout's checkpoint, and from what it exports") {
  for (const ModelType type : testing::kModelTypes) {
    TemporaryFolder folder;
    RunConfig config;
    TinyLayout source = Tiny(type, {2, 2, 3}, "");
    config.model.type = type;
    config.model.sizes = testing::TinyConfig(source);
    source.steps = 1;
    source.on_end = [&](const TinyRank& rank) { SaveTiny(rank, folder.path(), config); };
    const TinyResult trained = RunTiny(source);
    Export(folder.path());
    for (const std::string& from : {folder.path(), JoinPath(folder.path(), "out")}) {
      for (const Layout& layout : {Layout{1, 1, 0}, Layout{2, 2, 1}, Layout{1, 4, 3}}) {
        TinyLayout tiny = Tiny(type, layout, "");
        tiny.steps = 0;
        WholeState state;
        tiny.on_begin = [&](const TinyRank& rank) {
          LoadInitialWeights(PosixFileSystem(), from, rank.model, rank.engine);
          state.AddLoaded(rank.engine);
        };
        INFO(from << " to " << layout.data << " x " << layout.tensor);
        const TinyResult result = RunTiny(tiny);
        CHECK(result.weights == trained.weights);
        CHECK((result.replicas_agree && state.sound()));
      }
    }
  }
}

// A part of a tensor, drawn at random: dimensions cut into a few segments, with padding behind.
Parameter RandomPart(const Shape& whole, const RandomStream& random) {
  uint64_t drawn = 0;
  const auto below = [&](int64_t n) {
    return static_cast<int64_t>(random.Bits(drawn++) % static_cast<uint64_t>(n));
  };
  Parameter part;
  part.shape = part.global_shape = whole;
  for (int d = 0; d < whole.rank(); ++d) {
    if (below(3) == 0) continue;
    Placement::Cut cut{d, {}};
    int64_t held = 0;
    for (int64_t at = below(2); at < whole[d];) {
      const int64_t n = 1 + below(whole[d] - at);
      cut.segments.push_back({at, n});
      held += n;
      at += n + 1 + below(2);
    }
    if (cut.segments.empty()) continue;
    part.shape[d] = held + below(3);
    part.placement.cuts.push_back(cut);
  }
  return part;
}

TEST_CASE("where elements of the whole lie in a part is the inverse of where the part's lie in the whole") {
  for (uint32_t trial = 0; trial < 500; ++trial) {
    const RandomStream random{5, Purpose("parts"), trial};
    const auto extent = [&](uint64_t i) { return 1 + static_cast<int64_t>(random.Bits(1000 + i) % 6); };
    const Shape whole = trial % 2 == 0 ? Shape{extent(0), extent(1), extent(2)} : Shape{extent(0), extent(1)};
    const Parameter part = RandomPart(whole, random);
    const SavedPart saved{part.shape, part.placement.cuts};
    REQUIRE(saved.FitsInto(whole));
    REQUIRE(saved.NumElements(whole) == part.shape.num_elements());
    std::vector<int64_t> local(static_cast<size_t>(whole.num_elements()), -1);
    ForEachGlobalStretch(part, 0, part.shape.num_elements(), [&](int64_t at, int64_t global, int64_t n) {
      for (int64_t i = 0; i < n; ++i) local[static_cast<size_t>(global + i)] = at + i;
    });
    for (int64_t element = 0; element < whole.num_elements(); ++element) {
      const SavedPart::Place place = saved.Find(whole, element);
      REQUIRE(place.local == local[static_cast<size_t>(element)]);
      if (place.local < 0) continue;
      REQUIRE(place.run >= 1);
      for (int64_t i = 0; i < place.run; ++i)
        REQUIRE(local.at(static_cast<size_t>(element + i)) == place.local + i);
    }
  }
}

TEST_CASE("parts come through the manifest, and one that lies is refused") {
  Manifest manifest;
  manifest.info.config_yaml = "run: {}";
  manifest.info.trainer = nlohmann::json::object();
  manifest.tensors["a"] = {12, 4};
  const auto most = std::numeric_limits<int64_t>::max();
  // Rows 2, 3, 8 and 9, and two of padding; the slice is all of them.
  SavedSlice slice{"rank-00000.safetensors", "parameter", "a", 8, 24, 0, {{6, 4}, {{0, {{2, 2}, {8, 2}}}}}};
  const auto accepted = [&](const SavedSlice& saved) {
    manifest.slices = {saved};
    try {
      const auto read = Manifest::FromJson(manifest.ToJson(), "m").slices;
      return read.size() == 1 && read[0].part == saved.part && read[0].begin == saved.begin;
    } catch (const CheckpointError& error) {
      CHECK_THAT(error.what(), Catch::Contains("parameter/a/"));
      return false;
    }
  };
  const auto lies = [&](const std::function<void(SavedSlice&)>& change) {
    SavedSlice changed = slice;
    change(changed);
    return !accepted(changed);
  };
  CHECK(accepted(slice));
  CHECK(lies([](auto& s) { s.begin = 7; }));   // which is not in the part
  CHECK(lies([](auto& s) { s.begin = 48; }));  // beyond the tensor
  CHECK(lies([](auto& s) { s.begin = -1; }));
  CHECK(lies([](auto& s) { s.begin = 9; }));  // too far on for so many
  CHECK(lies([](auto& s) { s.count = 25; }));
  CHECK(lies([](auto& s) { s.count = -1; }));
  CHECK(lies([&](auto& s) { s.count = most; }));
  CHECK(lies([](auto& s) { s.part.shape = {6, 5}; }));  // a dimension that is not cut
  CHECK(lies([](auto& s) { s.part.shape = {24}; }));
  CHECK(lies([](auto& s) { s.part.shape = {-6, 4}; }));
  CHECK(lies([&](auto& s) { s.part.shape = {most, 4}; }));
  CHECK(lies([](auto& s) { s.part.shape = {3, 4}; }));  // less than its segments
  CHECK(lies([](auto& s) { s.part.cuts[0].dim = 2; }));
  CHECK(lies([](auto& s) { s.part.cuts[0].dim = -1; }));
  CHECK(lies([](auto& s) { s.part.cuts.push_back(s.part.cuts[0]); }));
  CHECK(lies([](auto& s) { s.part.cuts[0].segments[1].begin = 11; }));
  CHECK(lies([&](auto& s) { s.part.cuts[0].segments[1].begin = most; }));
  CHECK(lies([&](auto& s) { s.part.cuts[0].segments[1].count = most; }));
  CHECK(lies([](auto& s) { s.part.cuts[0].segments[1].count = 0; }));
  CHECK(lies([](auto& s) { s.part.cuts[0].segments[1].count = -1; }));
}

TEST_CASE("a rank's part of which another rank's shard is gone is an error that names it") {
  TemporaryFolder folder;
  TinyLayout source = Tiny(ModelType::kLlama, {1, 2, 0}, "");
  source.steps = 1;
  source.on_end = [&](const TinyRank& rank) { SaveTiny(rank, folder.path(), RunConfig{}); };
  RunTiny(source);
  const std::string step = JoinPath(folder.path(), StepFolder(2));
  // Every slice is in its shard once, by a name of its own.
  const Manifest manifest =
      Manifest::FromJson(ReadFile(PosixFileSystem(), JoinPath(step, "manifest.json")), "m");
  std::set<std::string> names;
  for (const SavedSlice& slice : manifest.slices) names.insert(slice.TensorName());
  CHECK(names.size() == manifest.slices.size());

  PosixFileSystem().Remove(JoinPath(step, "rank-00001.safetensors"));
  TinyLayout target = Tiny(ModelType::kLlama, {1, 1, 0}, "");
  target.steps = 0;
  target.on_begin = [&](const TinyRank& rank) {
    CHECK_THROWS_WITH(LoadTiny(rank, folder.path()),
                      Catch::Contains("rank-00001.safetensors, which holds parts of"));
  };
  RunTiny(target);
}

}  // namespace
}  // namespace strata
