// Checkpoints across layouts: any number of ranks, ZeRO stage and tier to any other; published layouts from
// any of them; and what both take of memory.
#include <stdlib.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <cstdio>
#include <fstream>

#include "data/safetensors.h"
#include "runtime/base/faulty_file_system.h"
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
  int ranks, stage;
  Tier tier;
};

std::vector<Layout> AllLayouts() {
  std::vector<Layout> layouts;
  for (int ranks : {1, 2, 3, 4}) {
    for (int stage : {0, 1, 2, 3}) {
      for (Tier tier : {Tier::kDevice, Tier::kHost, Tier::kNvme}) layouts.push_back({ranks, stage, tier});
    }
  }
  return layouts;
}

void Use(const Layout& layout, const std::string& nvme, TinyLayout& tiny) {
  tiny.ranks = layout.ranks;
  tiny.zero.stage = layout.stage;
  RestOn(layout.tier, nvme, tiny);
  tiny.background = layout.tier == Tier::kNvme;
}

size_t PeakOf(Device& device) {
  return device.allocator().stats().total_peak + device.host_allocator().stats().total_peak;
}

// A run that is saved after two steps, and what two more would be.
struct SavedRun {
  Layout layout;
  DType precision;
  bool frozen;
  TemporaryFolder folder;
  WholeState state;
  TinyResult unbroken;

  TinyLayout Tiny() const {
    TinyLayout tiny;
    tiny.precision = precision;
    tiny.dropout = 0.1;
    if (frozen) tiny.freeze = {"embedding", "blocks.0."};
    return tiny;
  }
};

TEST_CASE("what one layout saves any other resumes: the same state to the bit, the same losses") {
  TemporaryFolder nvme;
  const std::vector<std::tuple<Layout, DType, bool>> sources = {
      {{1, 0, Tier::kHost}, DType::kF32, false},  {{2, 3, Tier::kNvme}, DType::kF32, false},
      {{3, 1, Tier::kNvme}, DType::kBF16, false}, {{4, 2, Tier::kDevice}, DType::kF32, true},
      {{4, 3, Tier::kHost}, DType::kBF16, true},  {{2, 0, Tier::kNvme}, DType::kF32, true},
      {{4, 0, Tier::kNvme}, DType::kBF16, false},
  };
  std::vector<std::unique_ptr<SavedRun>> runs;
  for (const auto& [layout, precision, frozen] : sources) {
    auto& run = *runs.emplace_back(new SavedRun{layout, precision, frozen, {}, {}, {}});
    TinyLayout tiny = run.Tiny();
    Use(layout, nvme.path(), tiny);
    tiny.steps = 4;
    run.unbroken = RunTiny(tiny);
    tiny.steps = 2;
    tiny.on_end = [&](const TinyRank& rank) {
      SaveTiny(rank, run.folder.path(), RunConfig{}, run.layout.stage != 1);
      run.state.AddSaved(rank.engine);
    };
    RunTiny(tiny);
  }
  // Every layout loads from one of them, each time from another.
  const std::vector<Layout> layouts = AllLayouts();
  for (size_t i = 0; i < layouts.size(); ++i) {
    const SavedRun& run = *runs[i % runs.size()];
    TinyLayout tiny = run.Tiny();
    Use(layouts[i], nvme.path(), tiny);
    tiny.first_step = tiny.steps = 2;
    WholeState state;
    std::atomic<int> modest = 0;
    std::map<int, size_t> loading;  // by rank: the most memory while loading
    std::mutex mutex;
    tiny.on_begin = [&](const TinyRank& rank) {
      rank.device.allocator().ResetPeak();
      rank.device.host_allocator().ResetPeak();
      LoadTiny(rank, run.folder.path());
      {
        std::lock_guard lock(mutex);
        loading[rank.mesh.rank()] = PeakOf(rank.device);
      }
      rank.device.allocator().ResetPeak();
      rank.device.host_allocator().ResetPeak();
      state.AddSaved(rank.engine);
    };
    tiny.on_end = [&](const TinyRank& rank) {
      std::lock_guard lock(mutex);
      modest += loading[rank.mesh.rank()] <= PeakOf(rank.device);
    };
    const TinyResult resumed = RunTiny(tiny);
    INFO("from " << run.layout.ranks << " ranks, stage " << run.layout.stage << ", " << Name(run.layout.tier)
                 << " to " << layouts[i].ranks << ", " << layouts[i].stage << ", " << Name(layouts[i].tier));
    CHECK((state.sound() && run.state.sound()));
    CHECK(state.values() == run.state.values());
    CHECK(modest == layouts[i].ranks);
    for (size_t step : {0, 1}) {
      const double loss = resumed.losses[step], expected = run.unbroken.losses[step + 2];
      // In bf16 the second step starts from weights that were rounded after sums in another order.
      const double bound = run.precision == DType::kBF16 && step == 1 ? 1e-3 : 1e-6;
      if (layouts[i].ranks == run.layout.ranks) {
        CHECK(loss == expected);
      } else {
        CHECK(loss == Approx(expected).epsilon(bound));
      }
    }
    if (layouts[i].ranks == run.layout.ranks) CHECK(resumed.weights == run.unbroken.weights);
  }
}

TEST_CASE("at equal ranks every stage and tier saves the same files") {
  TemporaryFolder nvme;
  std::map<std::string, std::string> first;
  for (int stage : {0, 1, 2, 3}) {
    for (Tier tier : {Tier::kDevice, Tier::kHost, Tier::kNvme}) {
      TemporaryFolder folder;
      TinyLayout tiny;
      Use({2, stage, tier}, nvme.path(), tiny);
      tiny.steps = 2;
      tiny.on_end = [&](const TinyRank& rank) { SaveTiny(rank, folder.path(), RunConfig{}, false); };
      RunTiny(tiny);
      std::map<std::string, std::string> files;
      const std::string step = JoinPath(folder.path(), StepFolder(2));
      for (const std::string& name : PosixFileSystem().List(step))
        files[name] = ReadFile(PosixFileSystem(), JoinPath(step, name));
      CHECK(files.size() == 4);
      if (first.empty()) first = files;
      CHECK(files == first);
    }
  }
}

// Counts what is read of files.
class CountingFileSystem : public FaultyFileSystem {
 public:
  CountingFileSystem() : FaultyFileSystem(PosixFileSystem(), {}) {}
  std::unique_ptr<File> OpenForRead(const std::string& path) override {
    return std::make_unique<Counted>(FaultyFileSystem::OpenForRead(path), bytes_);
  }
  uint64_t bytes() const { return bytes_; }

 private:
  class Counted : public File {
   public:
    Counted(std::unique_ptr<File> file, std::atomic<uint64_t>& bytes)
        : file_(std::move(file)), bytes_(bytes) {}
    void ReadAt(uint64_t offset, void* to, size_t bytes) override {
      bytes_ += bytes;
      file_->ReadAt(offset, to, bytes);
    }
    void WriteAt(uint64_t offset, const void* from, size_t bytes) override {
      file_->WriteAt(offset, from, bytes);
    }
    uint64_t Size() override { return file_->Size(); }
    void Truncate(uint64_t size) override { file_->Truncate(size); }
    void Sync() override { file_->Sync(); }
    const std::string& path() const override { return file_->path(); }

   private:
    std::unique_ptr<File> file_;
    std::atomic<uint64_t>& bytes_;
  };
  std::atomic<uint64_t> bytes_ = 0;
};

// By how much resident memory rises while `body` runs, at its highest; 0 where the system does not tell.
size_t PeakResident(const std::function<void()>& body) {
  const auto kib = [](const std::string& key) {
    std::ifstream status("/proc/self/status");
    for (std::string line; std::getline(status, line);) {
      if (line.starts_with(key)) return static_cast<size_t>(std::stoll(line.substr(key.size() + 1)));
    }
    return size_t{0};
  };
  const bool reset = static_cast<bool>(std::ofstream("/proc/self/clear_refs") << "5" << std::flush);
  const size_t before = kib("VmRSS");
  body();
  const size_t peak = kib("VmHWM");
  if (!reset) WARN("skipped: /proc/self/clear_refs cannot be written, so peaks of memory are not known");
  return reset && peak > before ? (peak - before) << 10 : 0;
}

float Element(int64_t i) { return RandomStream{3, Purpose("element"), 0}.Uniform(static_cast<uint64_t>(i)); }

TEST_CASE("a rank reads its own part of a large tensor, in little memory, from and to NVMe") {
  constexpr int64_t kCount = int64_t{20} << 20;  // 80 MiB
  TemporaryFolder folder, nvme;
  ThreadJob job(1);
  const auto device = NewCpuDevice(1);
  CommEngine comm(job.transport(0), CommOptions{});
  ProcessMesh mesh(comm, {1, 1, 1});
  Parameter large;
  large.name = "large";
  large.shape = large.global_shape = {kCount};
  AsyncFileOptions options;
  options.direct = false;
  TierStore store(*device, PosixFileSystem(), nvme.path(), "state", options);
  const TierArray array(store, Tier::kNvme, kCount + 16, DType::kF32, MemoryTag::kOptimizer, true);
  store.Commit();
  const StateSlice whole{"parameter", &large, 0, kCount, &array, 16};
  std::vector<float> stretch(1 << 20);
  for (int64_t at = 0; at < kCount; at += std::ssize(stretch)) {
    for (size_t i = 0; i < stretch.size(); ++i) stretch[i] = static_cast<float>(at) + static_cast<float>(i);
    stretch[0] = Element(at);
    whole.Write(at, stretch.data(), std::ssize(stretch));
  }
  const size_t saving = PeakResident([&] {
    CheckpointSaver saver(PosixFileSystem(), folder.path(), 0, false, *device, mesh.world());
    saver.Save(CheckpointInfo{}, {whole}, {&large});
  });
  CHECK(saving < kCount * sizeof(float) / 2);

  // Another layout's part, which begins and ends inside saved slices and inside blocks of the disk.
  constexpr int64_t kBegin = (int64_t{6} << 20) + 3, kEnd = (int64_t{11} << 20) + 5;
  TierStore other_store(*device, PosixFileSystem(), nvme.path(), "other", options);
  const TierArray other(other_store, Tier::kNvme, kEnd - kBegin + 40, DType::kF32, MemoryTag::kOptimizer,
                        true);
  other_store.Commit();
  const StateSlice part{"parameter", &large, kBegin, kEnd - kBegin, &other, 32};
  CountingFileSystem counting;
  const size_t loading =
      PeakResident([&] { CheckpointReader(counting, folder.path()).Read({part}, {&large}, false); });
  CHECK(loading < kCount * sizeof(float) / 2);
  // Once to verify, with what else is in the slices at its ends, and once to load.
  CHECK(counting.bytes() < (2 * (kEnd - kBegin) + 2 * kLongestSlice) * sizeof(float) + 20000);
  for (int64_t at = kBegin, n = 0; at < kEnd; at += n) {
    n = std::min<int64_t>(std::ssize(stretch), kEnd - at);
    part.Read(at - kBegin, stretch.data(), n);
    int64_t wrong = 0;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t in_stretch = (at + i) % std::ssize(stretch);
      const float expected = in_stretch == 0
                                 ? Element(at + i)
                                 : static_cast<float>(at + i - in_stretch) + static_cast<float>(in_stretch);
      wrong += stretch[static_cast<size_t>(i)] != expected;
    }
    CHECK(wrong == 0);
  }
  // What lies beside the part was left alone.
  float beside[40];
  other.Read(0, TensorView(beside, DType::kF32, {32}), MemorySpace::kHost);
  other.Read(32 + kEnd - kBegin, TensorView(beside + 32, DType::kF32, {8}), MemorySpace::kHost);
  CHECK(std::all_of(beside, beside + 40, [](float value) { return value == 0; }));
}

// Compares every tensor of a published folder with weights of ours: theirs, element by element, is ours
// rounded to `dtype`.
void CheckPublished(const std::string& folder, const TransformerConfig& config, DType dtype,
                    const std::function<float(const std::string& parameter, int64_t i)>& ours) {
  std::map<std::string, std::unique_ptr<SafetensorsFile>> files;
  const std::string index = JoinPath(folder, "model.safetensors.index.json");
  nlohmann::json map;
  if (PosixFileSystem().Exists(index))
    map = nlohmann::json::parse(ReadFile(PosixFileSystem(), index)).at("weight_map");
  const PublishedFamily family = ExportFamily(config);
  for (const PublishedTensor& tensor : PublishedTensors(family, config)) {
    const std::string name = map.empty() ? "model.safetensors" : map.at(tensor.name);
    auto& file = files[name];
    if (!file) file = SafetensorsFile::Open(PosixFileSystem(), JoinPath(folder, name));
    const SafetensorsEntry* entry = file->Find(tensor.name);
    INFO(tensor.name);
    REQUIRE(entry);
    REQUIRE(entry->shape == tensor.shape);
    REQUIRE(entry->dtype == dtype);
    const int64_t rows = tensor.shape[0], cols = tensor.shape.rank() == 2 ? tensor.shape[1] : 1;
    std::vector<float> values(static_cast<size_t>(rows * cols));
    ReadFloats(file->file(), entry->offset, dtype, rows * cols, values.data());
    int64_t wrong = 0;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) {
        const int64_t i =
            tensor.transposed ? (tensor.row_begin + c) * rows + r : (tensor.row_begin + r) * cols + c;
        const float value = ours(tensor.parameter, i);
        const float rounded = dtype == DType::kBF16 ? static_cast<float>(BFloat16(value)) : value;
        wrong += values[static_cast<size_t>(r * cols + c)] != rounded;
      }
    }
    CHECK(wrong == 0);
  }
  size_t tensors = 0;
  for (const auto& [name, file] : files) tensors += file->entries().size();
  CHECK(tensors == PublishedTensors(family, config).size());
}

TEST_CASE(
    "what is exported at one to four ranks is what they gather, in fp32 and bf16, in one file or more") {
  TemporaryFolder nvme;
  for (const Layout& layout : {Layout{1, 0, Tier::kDevice}, Layout{2, 3, Tier::kNvme},
                               Layout{3, 2, Tier::kHost}, Layout{4, 3, Tier::kNvme}}) {
    for (const ModelType type : testing::kModelTypes) {
      TemporaryFolder folder;
      TinyLayout tiny;
      Use(layout, nvme.path(), tiny);
      tiny.type = type;
      tiny.precision =
          type == ModelType::kLlama ? DType::kBF16 : DType::kF32;  // it is the fp32 masters that are exported
      tiny.steps = 2;
      RunConfig config;
      config.model.type = type;
      config.model.sizes = testing::TinyConfig(tiny);
      tiny.on_end = [&](const TinyRank& rank) { SaveTiny(rank, folder.path(), config, false); };
      const TinyResult trained = RunTiny(tiny);
      SavedModel saved(PosixFileSystem(), folder.path());
      for (DType dtype : {DType::kF32, DType::kBF16}) {
        for (uint64_t largest_file : {uint64_t{5'000'000'000}, uint64_t{6000}}) {
          const std::string out = JoinPath(folder.path(), "out");
          WritePublished(PosixFileSystem(), out, saved.config().model.sizes, dtype, saved.Weights(),
                         largest_file);
          INFO(layout.ranks << " ranks, " << Name(dtype) << ", files of " << largest_file);
          CHECK(PosixFileSystem().Exists(JoinPath(out, "model.safetensors")) == (largest_file > 6000));
          CheckPublished(out, saved.config().model.sizes, dtype,
                         [&](const std::string& parameter, int64_t i) {
                           return trained.weights.at(parameter)[static_cast<size_t>(i)];
                         });
        }
      }
      // And read back by whatever parts another layout wants, out of several files.
      const auto published = PublishedCheckpoint::Open(PosixFileSystem(), JoinPath(folder.path(), "out"));
      for (const auto& [name, weights] : trained.weights) {
        std::vector<float> read(weights.size());
        for (size_t at = 0, n = 1; at < read.size(); at += n, n = n * 3 % 101 + 1) {
          n = std::min(n, read.size() - at);
          published->Read(name, static_cast<int64_t>(at), static_cast<int64_t>(n), &read[at]);
        }
        bool same = true;
        for (size_t i = 0; i < read.size(); ++i) same &= read[i] == static_cast<float>(BFloat16(weights[i]));
        INFO(name);
        CHECK(same);
      }
      TinyLayout other = tiny;
      Use({2, 3, Tier::kNvme}, nvme.path(), other);
      other.steps = 0;
      other.on_end = {};
      other.on_begin = [&](const TinyRank& rank) {
        LoadInitialWeights(PosixFileSystem(), JoinPath(folder.path(), "out"), rank.model, rank.engine);
      };
      std::map<std::string, std::vector<float>> rounded = trained.weights;
      for (auto& [name, weights] : rounded) {
        for (float& value : weights) value = static_cast<float>(BFloat16(value));
      }
      CHECK(RunTiny(other).weights == rounded);
    }
  }
}

TEST_CASE("a model passes through export and import in little memory, transposed on the way") {
  TransformerConfig config;
  config.num_layers = 1;
  config.hidden_size = 1040;  // matrices of several stretches, and not of whole tiles
  config.num_heads = 13;
  config.max_seq_len = 24;
  config.vocab_size = 50;
  config.Resolve();
  const auto bytes = static_cast<size_t>(config.NumParameters()) * sizeof(float);
  REQUIRE(bytes > 49 << 20);
  const auto value = [](const std::string& parameter, int64_t i) {
    return static_cast<float>((static_cast<uint64_t>(i) * 2654435761u + parameter.size()) % 16777213);
  };
  TemporaryFolder folder;
  const std::string published = JoinPath(folder.path(), "published"), out = JoinPath(folder.path(), "out");
  int64_t most = 0;
  const size_t exporting = PeakResident([&] {
    WritePublished(PosixFileSystem(), published, config, DType::kF32,
                   [&](const std::string& parameter, int64_t begin, int64_t count, float* to) {
                     most = std::max(most, count);
                     for (int64_t i = 0; i < count; ++i) to[i] = value(parameter, begin + i);
                   });
  });
  CHECK(exporting < bytes / 2);
  CHECK(most <= 1 << 20);
  CheckPublished(published, config, DType::kF32, value);

  ThreadJob job(1);
  const auto device = NewCpuDevice(1);
  CommEngine comm(job.transport(0), CommOptions{});
  ProcessMesh mesh(comm, {1, 1, 1});
  const size_t importing = PeakResident([&] {
    SavedModel saved(PosixFileSystem(), published);
    Transformer model(saved.config().model.sizes);
    CheckpointInfo info;
    info.config_yaml = saved.config().ToYaml();
    CheckpointSaver saver(PosixFileSystem(), folder.path(), 0, false, *device, mesh.world());
    saver.Save(info, WholeWeights(model.Parameters()), model.Parameters(),
               [read = saved.Weights()](const StateSlice& slice, int64_t at, float* to, int64_t n) {
                 read(slice.parameter->name, slice.begin + at, n, to);
               });
  });
  CHECK(importing < bytes / 2);
  const size_t again = PeakResident([&] {
    SavedModel saved(PosixFileSystem(), folder.path());
    WritePublished(PosixFileSystem(), out, saved.config().model.sizes, DType::kF32, saved.Weights());
  });
  CHECK(again < bytes / 2);
  for (const char* name : {"model.safetensors", "config.json"}) {
    CHECK(ReadFile(PosixFileSystem(), JoinPath(out, name)) ==
          ReadFile(PosixFileSystem(), JoinPath(published, name)));
  }
}

TEST_CASE("a damaged checkpoint is not exported, and the export before it stands") {
  TemporaryFolder folder;
  TinyLayout tiny;
  RunConfig config;
  config.model.sizes = testing::TinyConfig(tiny);
  tiny.steps = 1;
  tiny.on_end = [&](const TinyRank& rank) { SaveTiny(rank, folder.path(), config, false); };
  RunTiny(tiny);
  FileSystem& fs = PosixFileSystem();
  const std::string out = JoinPath(folder.path(), "out");
  const auto export_it = [&] {
    SavedModel saved(fs, folder.path());
    WritePublished(fs, out, saved.config().model.sizes, DType::kF32, saved.Weights());
  };
  export_it();
  const std::string before = ReadFile(fs, JoinPath(out, "model.safetensors"));
  const std::string shard = JoinPath(JoinPath(folder.path(), StepFolder(2)), "rank-00000.safetensors");
  std::string content = ReadFile(fs, shard);
  const auto header = SafetensorsFile::Open(fs, shard);
  content[header->Find("parameter/head.norm.bias/0")->offset] ^= 1;
  fs.Create(shard)->WriteAt(0, content.data(), content.size());
  CHECK_THROWS_WITH(export_it(), Catch::Contains(shard) && Catch::Contains("parameter/head.norm.bias/0"));
  CHECK(ReadFile(fs, JoinPath(out, "model.safetensors")) == before);
  CHECK(fs.List(out) == std::vector<std::string>{"config.json", "model.safetensors"});
}

}  // namespace
}  // namespace strata
