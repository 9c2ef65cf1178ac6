// Checkpoints over any layout, through every fault and every damage.
#include "tools/checkpoint.h"

#include <stdlib.h>
#include <unistd.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <cmath>
#include <functional>
#include <map>

#include "runtime/base/faulty_file_system.h"
#include "runtime/base/rng.h"
#include "runtime/base/testing.h"
#include "tests/tiny_run.h"
#include "tools/manifest.h"

namespace strata {
namespace {

using testing::TemporaryFolder;
using testing::TinyConfig;
using testing::TinyLayout;

// A save waits for the disk a dozen times; in memory hundreds of them take a second.
const bool in_memory = access("/dev/shm", W_OK) == 0 && setenv("TMPDIR", "/dev/shm", 1) == 0;

constexpr float kUntouched = -7.0f;

// What element `i` of a state tensor holds at `step`: a number that no other element has nearby.
float Value(const std::string& kind, const std::string& parameter, int64_t i, int64_t step) {
  const RandomStream random{static_cast<uint64_t>(step), Purpose(kind + "/" + parameter), 0};
  return random.Uniform(static_cast<uint64_t>(i));
}

void Fill(const std::vector<StateSlice>& slices,
          const std::function<float(const StateSlice&, int64_t)>& value) {
  for (const StateSlice& slice : slices) {
    std::vector<float> values;
    for (int64_t i = 0; i < slice.count; ++i) values.push_back(value(slice, slice.begin + i));
    slice.Write(0, values.data(), slice.count);
  }
}

void FillForStep(const std::vector<StateSlice>& slices, int64_t step) {
  Fill(slices, [&](const StateSlice& s, int64_t i) { return Value(s.kind, s.parameter->name, i, step); });
}

void FillUntouched(const std::vector<StateSlice>& slices) {
  Fill(slices, [](const StateSlice&, int64_t) { return kUntouched; });
}

// Whether every element is as `value` says.
bool Holds(const std::vector<StateSlice>& slices,
           const std::function<float(const StateSlice&, int64_t)>& value) {
  for (const StateSlice& slice : slices) {
    std::vector<float> values(static_cast<size_t>(slice.count));
    slice.Read(0, values.data(), slice.count);
    for (int64_t i = 0; i < slice.count; ++i) {
      if (values[static_cast<size_t>(i)] != value(slice, slice.begin + i)) return false;
    }
  }
  return true;
}

bool HoldsStep(const std::vector<StateSlice>& slices, int64_t step) {
  return Holds(slices,
               [&](const StateSlice& s, int64_t i) { return Value(s.kind, s.parameter->name, i, step); });
}

bool HoldsUntouched(const std::vector<StateSlice>& slices) {
  return Holds(slices, [](const StateSlice&, int64_t) { return kUntouched; });
}

CheckpointInfo InfoOf(int64_t step) {
  CheckpointInfo info;
  info.step = step;
  info.config_yaml = StrCat("run: {seed: ", step, "}\n");
  info.trainer = {{"tokens", step * 100}, {"loss_scaler", {{"scale", 0.1 * static_cast<double>(step)}}}};
  info.tokenizer = std::string("\0\xff tokenizer ", 13) + std::to_string(step);
  return info;
}

bool SameInfo(const CheckpointInfo& a, const CheckpointInfo& b) {
  return a.step == b.step && a.config_yaml == b.config_yaml && a.trainer == b.trainer &&
         a.tokenizer == b.tokenizer;
}

// A rank with a device, communicators and a state of its own: two parameters, cut between the ranks inside
// the second.
class SmallRank {
 public:
  explicit SmallRank(Transport& transport)
      : device(NewCpuDevice(1)), engine_(transport, CommOptions{}), mesh(engine_, {transport.size(), 1, 1}) {
    for (const auto& [name, size] : {std::pair("a", 5), std::pair("b", 40)}) {
      auto& parameter = *owned_.emplace_back(std::make_unique<Parameter>());
      parameter.name = name;
      parameter.shape = parameter.global_shape = {size};
      parameters.push_back(&parameter);
    }
    const int64_t begin = mesh.rank() == 0 ? 0 : 13, end = mesh.rank() + 1 < transport.size() ? 13 : 40;
    for (const char* kind : {"parameter", "exp_avg"}) {
      if (mesh.rank() == 0) Add(kind, parameters[0], 0, 5);
      Add(kind, parameters[1], begin, end - begin);
    }
  }

  void Save(FileSystem& fs, const std::string& folder, int64_t step, bool async = false, int64_t keep = 0) {
    FillForStep(slices, step);
    CheckpointSaver saver(fs, folder, keep, async, *device, mesh.world());
    saver.Save(InfoOf(step), slices, parameters);
    saver.Finish();
  }

  std::unique_ptr<Device> device;
  CommEngine engine_;
  ProcessMesh mesh;
  std::vector<Parameter*> parameters;
  std::vector<StateSlice> slices;

 private:
  void Add(const char* kind, const Parameter* parameter, int64_t begin, int64_t count) {
    state_.emplace_back(store_, Tier::kDevice, count, DType::kF32, MemoryTag::kOptimizer, true);
    slices.push_back({kind, parameter, begin, count, &state_.back(), 0});
  }

  std::vector<std::unique_ptr<Parameter>> owned_;
  TierStore store_{*device, PosixFileSystem(), "", "", {}};
  std::deque<TierArray> state_;
};

// One rank alone.
struct SmallJob {
  ThreadJob job{1};
  SmallRank rank{job.transport(0)};
};

// Whether what `path` holds is the state of one of `steps`, whole.
bool LoadsAsOneOf(const std::string& path, const std::vector<int64_t>& steps) {
  SmallJob job;
  CheckpointReader reader(PosixFileSystem(), path);
  FillUntouched(job.rank.slices);
  reader.Read(job.rank.slices, job.rank.parameters, false);
  for (int64_t step : steps) {
    if (SameInfo(reader.info(), InfoOf(step)) && HoldsStep(job.rank.slices, step)) return true;
  }
  return false;
}

std::vector<std::string> Split(const std::vector<std::string>& names, bool partial) {
  std::vector<std::string> found;
  for (const std::string& name : names) {
    if ((name.ends_with(kPartialSuffix) || name.ends_with(kOldSuffix)) == partial) found.push_back(name);
  }
  return found;
}

// A rank with the tiny transformer under ZeRO.
struct ModelRank {
  ModelRank(Transport& transport, int stage, DType precision, const std::string& frozen = "none")
      : device(NewCpuDevice(1)), comm(transport, CommOptions{}), mesh(comm, {transport.size(), 1, 1}) {
    for (Parameter* parameter : model.Parameters()) {
      if (parameter->name.starts_with(frozen)) parameter->requires_grad = false;
    }
    ZeroOptions zero;
    zero.stage = stage;
    engine = std::make_unique<ZeroEngine>(ZeroSetup{executor, mesh}, model.Units(), precision,
                                          OptimizerConfig{}, zero);
  }

  std::unique_ptr<Device> device;
  Executor executor{*device, CpuKernels()};
  CommEngine comm;
  ProcessMesh mesh;
  Transformer model{TinyConfig(TinyLayout{})};
  std::unique_ptr<ZeroEngine> engine;
};

TEST_CASE("what four ranks save loads on one, two or three, at any stage, bit for bit") {
  for (DType precision : {DType::kF32, DType::kBF16}) {
    for (int saved_stage : {0, 1, 3}) {
      TemporaryFolder folder;
      ThreadJob::Run(4, [&](Transport& transport) {
        ModelRank rank(transport, saved_stage, precision, "blocks.0");
        FillForStep(rank.engine->SlicesToLoad(), 5);
        CheckpointSaver saver(PosixFileSystem(), folder.path(), 0, saved_stage == 1, *rank.device,
                              rank.mesh.world());
        saver.Save(InfoOf(5), rank.engine->SlicesToSave(), rank.model.Parameters());
        saver.Finish();
      });
      for (int ranks : {1, 2, 3}) {
        for (int stage : {0, 1, 2, 3}) {
          std::atomic<int> right = 0;
          ThreadJob::Run(ranks, [&](Transport& transport) {
            ModelRank rank(transport, stage, precision, "blocks.0");
            const auto slices = rank.engine->SlicesToLoad();
            FillUntouched(slices);
            CheckpointReader reader(PosixFileSystem(), folder.path());
            reader.Read(slices, rank.model.Parameters(), false);
            rank.engine->FinishLoad();
            bool whole = HoldsStep(slices, 5) && SameInfo(reader.info(), InfoOf(5));
            rank.engine->ForEachParameter([&](const Parameter& parameter, const TensorView& values) {
              for (int64_t i = 0; i < values.num_elements(); ++i)
                whole &= values.f32()[i] == Value("parameter", parameter.name, i, 5);
            });
            right += whole;
          });
          INFO("stage " << saved_stage << " to " << ranks << " ranks at stage " << stage);
          CHECK(right == ranks);
        }
      }
    }
  }
}

// Saves these steps one after another, two kept; returns how many came through before the fault.
int SaveSeries(FileSystem& fs, const std::string& folder, const std::vector<int64_t>& steps, int ranks,
               bool async) {
  std::atomic<int> published = 0;
  try {
    ThreadJob::Run(ranks, [&](Transport& transport) {
      SmallRank rank(transport);
      for (int64_t step : steps) {
        rank.Save(fs, folder, step, async, 2);
        if (rank.mesh.rank() == 0) ++published;
      }
    });
  } catch (const Error& error) {
    INFO(error.what());
    CHECK((dynamic_cast<const IoError*>(&error) || dynamic_cast<const CheckpointError*>(&error)));
  }
  return published;
}

TEST_CASE("wherever a save fails, the one before loads whole and the next one succeeds") {
  const std::vector<int64_t> steps = {1, 2, 2, 3};  // a first, a second, one in another's place, a removal
  using Kind = FaultPlan::Kind;
  for (Kind kind : {Kind::kNoSpace, Kind::kIoError, Kind::kShortWrite, Kind::kCrash}) {
    for (int ranks : {1, 2}) {
      const bool async = ranks == 2;
      // The operations of two ranks come in another order each time: a sample of them will do.
      int64_t nth = 1;
      for (bool through = false; !through; nth += ranks == 2 ? 5 : 1) {
        TemporaryFolder folder;
        const std::string checkpoints = JoinPath(folder.path(), "checkpoints");
        FaultyFileSystem faulty(PosixFileSystem(), {kind, nth});
        const int published = SaveSeries(faulty, checkpoints, steps, ranks, async);
        through = !faulty.struck();
        INFO("fault " << static_cast<int>(kind) << " at operation " << nth << " on " << ranks
                      << " ranks, after " << published << " saves");
        REQUIRE(through == (published == 4));
        const std::string latest = LatestCheckpoint(PosixFileSystem(), checkpoints);
        if (published > 0) REQUIRE(!latest.empty());
        if (!latest.empty()) {
          std::vector<int64_t> possible;
          if (published > 0) possible.push_back(steps[published - 1]);
          if (published < 4) possible.push_back(steps[published]);
          REQUIRE(LoadsAsOneOf(latest, possible));
          REQUIRE(LoadsAsOneOf(folder.path(), possible));
        }
        if (through) continue;
        // The next run saves the same step again, and then another.
        REQUIRE(SaveSeries(PosixFileSystem(), checkpoints, {2, 3}, 1, false) == 2);
        REQUIRE(LoadsAsOneOf(folder.path(), {3}));
        REQUIRE(PosixFileSystem().List(checkpoints) ==
                std::vector<std::string>{"latest", StepFolder(2), StepFolder(3)});
      }
      CHECK(nth > 50);  // the faults did strike
    }
  }
}

// What loading `path` into `rank` throws, "" when nothing; nothing may be touched when it throws.
std::string ErrorOfLoad(const std::string& path, SmallRank& rank, bool partial = false) {
  FillUntouched(rank.slices);
  try {
    CheckpointReader(PosixFileSystem(), path).Read(rank.slices, rank.parameters, partial);
    return "";
  } catch (const CheckpointError& error) {
    CHECK(HoldsUntouched(rank.slices));
    return error.what();
  }
}

TEST_CASE("keys that do not fit are listed, and nothing is half loaded") {
  using Catch::Contains;
  TemporaryFolder folder;
  ThreadJob::Run(
      2, [&](Transport& transport) { SmallRank(transport).Save(PosixFileSystem(), folder.path(), 4); });
  SmallJob job;
  SmallRank& rank = job.rank;
  REQUIRE(ErrorOfLoad(folder.path(), rank) == "");

  SECTION("renamed: one is missing, one is extra") {
    rank.parameters[1]->name = "renamed";
    const std::string error = ErrorOfLoad(folder.path(), rank);
    CHECK_THAT(error,
               Contains("missing: renamed") && Contains("not in the model: b") && Contains(folder.path()));
    // A partial load takes what is there.
    CHECK(ErrorOfLoad(folder.path(), rank, true) == "");
    for (const StateSlice& slice : rank.slices) {
      const bool absent = slice.parameter == rank.parameters[1];
      CHECK((absent ? HoldsUntouched({slice}) : HoldsStep({slice}, 4)));
    }
  }
  SECTION("of another shape, even for a partial load") {
    rank.parameters[1]->global_shape = {4, 10};
    for (bool partial : {false, true}) {
      CHECK_THAT(ErrorOfLoad(folder.path(), rank, partial),
                 Contains("of another shape: b (saved [40], the model's is [4, 10])"));
    }
  }
  SECTION("state that was not saved") {
    rank.slices[2].kind = "momentum";
    rank.slices[3].kind = "momentum";
    CHECK_THAT(ErrorOfLoad(folder.path(), rank), Contains("missing: momentum of a, momentum of b"));
  }
  SECTION("a shard that is gone") {
    const std::string shard = JoinPath(JoinPath(folder.path(), StepFolder(4)), "rank-00001.safetensors");
    PosixFileSystem().Remove(shard);
    CHECK_THAT(ErrorOfLoad(folder.path(), rank),
               Contains(StepFolder(4)) && Contains("rank-00001.safetensors, which holds parts of b"));
  }
  SECTION("no checkpoint at all") {
    CHECK_THAT(ErrorOfLoad(JoinPath(folder.path(), "nowhere"), rank), Contains("nowhere is no checkpoint"));
  }
}

TEST_CASE("damage of any file is an error that names it, or changes nothing") {
  FileSystem& fs = PosixFileSystem();
  TemporaryFolder folder;
  ThreadJob::Run(2, [&](Transport& transport) { SmallRank(transport).Save(fs, folder.path(), 4); });
  SmallJob job;
  SmallRank& rank = job.rank;
  const std::string step = JoinPath(folder.path(), StepFolder(4));
  std::vector<std::string> files = {JoinPath(folder.path(), "latest")};
  for (const std::string& name : fs.List(step)) files.push_back(JoinPath(step, name));
  REQUIRE(files.size() == 5);

  for (const std::string& path : files) {
    const std::string whole = ReadFile(fs, path);
    int64_t harmless = 0;
    // Loads with the file's content replaced; true when that went unnoticed, and then nothing is different.
    const auto goes_unnoticed = [&](const std::string& content) {
      fs.Create(path)->WriteAt(0, content.data(), content.size());
      FillUntouched(rank.slices);
      try {
        CheckpointReader reader(fs, folder.path());
        reader.Read(rank.slices, rank.parameters, false);
        REQUIRE(HoldsStep(rank.slices, 4));
        REQUIRE(SameInfo(reader.info(), InfoOf(4)));
        return true;
      } catch (const CheckpointError& error) {
        INFO(error.what());
        REQUIRE(std::string(error.what()).find(folder.path()) != std::string::npos);
        REQUIRE(HoldsUntouched(rank.slices));
        return false;
      }
    };
    INFO(path);
    for (size_t at = 0; at < whole.size(); ++at) {
      std::string flipped = whole;
      flipped[at] = static_cast<char>(flipped[at] ^ (1 << at % 8));
      harmless += goes_unnoticed(flipped) ? 1 : 0;
    }
    const bool json = path.ends_with("manifest.json"), latest = path.ends_with("latest");
    for (size_t size = 0; size<whole.size(); size += whole.size()> 500 ? 7 : 1) {
      // But for its last line end.
      CHECK(goes_unnoticed(whole.substr(0, size)) == (latest && size + 1 == whole.size()));
    }
    // A blank that became a tab, say.
    CHECK(harmless <= (json || path.ends_with(".safetensors") ? static_cast<int64_t>(whole.size() / 10) : 1));
    fs.Remove(path);
    CHECK(ErrorOfLoad(folder.path(), rank) != "");
    REQUIRE(goes_unnoticed(whole));
  }
}

TEST_CASE("a manifest that lies is refused") {
  Manifest manifest;
  manifest.info = InfoOf(1);
  manifest.tensors["a"] = {5};
  const auto slice = [](int64_t begin, int64_t count) {
    return SavedSlice{"rank-00000.safetensors", "parameter", "a", begin, count, 0};
  };
  manifest.slices = {slice(0, 5)};
  CHECK(Manifest::FromJson(manifest.ToJson(), "m").slices.size() == 1);
  const auto most = std::numeric_limits<int64_t>::max();
  for (const SavedSlice& lie : {slice(0, 6), slice(-1, 3), slice(4, -2), slice(3, most), slice(most, most)}) {
    manifest.slices = {lie};
    CHECK_THROWS_AS(Manifest::FromJson(manifest.ToJson(), "m"), CheckpointError);
  }
  manifest.slices = {slice(0, 5)};
  manifest.slices[0].parameter = "b";
  CHECK_THROWS_AS(Manifest::FromJson(manifest.ToJson(), "m"), CheckpointError);
  for (const char* text : {"", "[]", "{}", "{\"format\": 5}", "{\"format\": \"strata checkpoint\"}",
                           "{\"format\": \"strata checkpoint\", \"version\": \"1\"}"}) {
    CHECK_THROWS_AS(Manifest::FromJson(text, "m"), CheckpointError);
  }
  const std::string deep(200000, '[');
  CHECK_THROWS_AS(Manifest::FromJson(deep + std::string(deep.size(), ']'), "m"), CheckpointError);
  CHECK_THROWS_WITH(Manifest::FromJson("{\"format\": \"strata checkpoint\", \"version\": 99}", "m"),
                    Catch::Contains("version 99"));
}

TEST_CASE("the oldest are removed beyond keep, by a later run too") {
  FileSystem& fs = PosixFileSystem();
  TemporaryFolder folder;
  SmallJob job;
  const auto left = [&] {
    auto names = fs.List(folder.path());
    CHECK(Split(names, true).empty());
    names.erase(names.begin());  // latest
    return names;
  };
  {
    CheckpointSaver saver(fs, folder.path(), 2, true, *job.rank.device, job.rank.mesh.world());
    for (int64_t step : {9, 10, 11}) saver.Save(InfoOf(step), job.rank.slices, job.rank.parameters);
    saver.Finish();
  }
  CHECK(left() == std::vector{StepFolder(10), StepFolder(11)});
  job.rank.Save(fs, folder.path(), 11, false, 2);  // the same step again
  CHECK(left() == std::vector{StepFolder(10), StepFolder(11)});
  CHECK(LoadsAsOneOf(folder.path(), {11}));
  job.rank.Save(fs, folder.path(), 12, false, 1);
  CHECK(left() == std::vector{StepFolder(12)});
  job.rank.Save(fs, folder.path(), 13, false, 0);  // 0 keeps all
  CHECK(left() == std::vector{StepFolder(12), StepFolder(13)});
}

TEST_CASE("what a broken-off save and a broken-off removal left is cleared by the next save") {
  FileSystem& fs = PosixFileSystem();
  TemporaryFolder folder;
  SmallJob job;
  job.rank.Save(fs, folder.path(), 1);
  for (const std::string& name : {StepFolder(2) + kPartialSuffix, StepFolder(0) + kOldSuffix}) {
    fs.CreateDirectories(JoinPath(folder.path(), name));
    fs.Create(JoinPath(JoinPath(folder.path(), name), "rank-00000.safetensors"));
  }
  CHECK(LoadsAsOneOf(folder.path(), {1}));
  job.rank.Save(fs, folder.path(), 3);
  CHECK(fs.List(folder.path()) == std::vector<std::string>{"latest", StepFolder(1), StepFolder(3)});
}

TEST_CASE("state that changes once BeforeUpdate has returned is saved as it was") {
  TemporaryFolder folder;
  std::atomic<int> right = 0;
  ThreadJob::Run(2, [&](Transport& transport) {
    SmallRank rank(transport);
    // Enough for the writing thread to be at it for a while.
    Parameter large;
    large.name = StrCat("large.", transport.rank());
    large.shape = large.global_shape = {1 << 21};
    TierStore store(*rank.device, PosixFileSystem(), "", "", {});
    const TierArray array(store, Tier::kDevice, 1 << 21, DType::kF32, MemoryTag::kParameters, true);
    const std::vector<StateSlice> slices = {{"parameter", &large, 0, 1 << 21, &array, 0}};
    Parameter other = large;
    other.name = StrCat("large.", 1 - transport.rank());
    CheckpointSaver saver(PosixFileSystem(), folder.path(), 0, true, *rank.device, rank.mesh.world());
    for (int64_t step : {1, 2, 3}) {
      FillForStep(slices, step);
      saver.Save(InfoOf(step), slices, {&large, &other});
      saver.BeforeUpdate();
      FillUntouched(slices);
      saver.Poll();
    }
    saver.Finish();
    for (int64_t step : {1, 2, 3}) {
      CheckpointReader reader(PosixFileSystem(), JoinPath(folder.path(), StepFolder(step)));
      reader.Read(slices, {&large, &other}, false);
      right += HoldsStep(slices, step);
    }
  });
  CHECK(right == 6);
}

}  // namespace
}  // namespace strata
