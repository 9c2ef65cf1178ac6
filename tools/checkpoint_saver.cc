#include <xxhash.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <thread>

#include "data/safetensors.h"
#include "runtime/base/log.h"
#include "tools/manifest.h"
#include "tools/slice_stretches.h"

namespace strata {
namespace {

// Taken at a time: small enough for the writer to copy from cache what was hashed.
constexpr int64_t kChunk = int64_t{128} << 10;

// A stretch of this rank's state as it goes to the shard.
struct Piece {
  StateSlice slice;
  int64_t global;  // its first element in the whole tensor
};

// Slices cut at multiples of kLongestSlice elements of this rank's part, whatever the layout; without padding
// at their ends.
std::vector<Piece> Cut(const std::vector<StateSlice>& slices) {
  std::vector<Piece> pieces;
  for (const StateSlice& slice : slices) {
    for (int64_t at = 0, n = 0; at < slice.count; at += n) {
      n = std::min(slice.count - at, kLongestSlice - (slice.begin + at) % kLongestSlice);
      int64_t begin = -1, end = -1, first = -1;
      ForEachGlobalStretch(*slice.parameter, slice.begin + at, n,
                           [&](int64_t local, int64_t global, int64_t count) {
                             if (begin < 0) begin = local, first = global;
                             end = local + count;
                           });
      if (begin < 0) continue;
      const int64_t offset = slice.offset + begin - slice.begin;
      pieces.push_back({{slice.kind, slice.parameter, begin, end - begin, slice.array, offset}, first});
    }
  }
  return pieces;
}

SavedPart PartOf(const Parameter& parameter) {
  if (parameter.placement.cuts.empty()) return {};
  return {parameter.shape, parameter.placement.cuts};
}

// One rank's shard being written, by a thread of its own when asynchronous.
struct PendingSave {
  CheckpointInfo info;
  std::string folder;  // the unpublished one
  std::vector<Piece> pieces;
  CheckpointSaver::ReadSlice read;      // of those without an array
  std::map<std::string, Shape> shapes;  // of every parameter of the model
  std::vector<SavedSlice> saved;
  std::exception_ptr error;
  std::atomic<bool> copied{false};  // nothing of the slices is needed any more
  std::atomic<bool> done{false};    // and what was written is durable, or failed
  std::thread thread;

  void ReleaseSlices() {
    copied.store(true, std::memory_order_release);
    copied.notify_all();
  }
};

// What all ranks' texts are, by rank. Collective.
std::vector<std::string> GatherTexts(Communicator& world, const std::string& text) {
  int64_t longest = static_cast<int64_t>(text.size());
  world.AllReduce(TensorView(&longest, DType::kI64, {1}), ReduceOp::kMax);
  std::string mine = text;
  mine.resize(static_cast<size_t>(longest), ' ');
  std::string all(static_cast<size_t>(longest) * static_cast<size_t>(world.size()), ' ');
  world.AllGather(TensorView(mine.data(), DType::kU8, {longest}),
                  TensorView(all.data(), DType::kU8, {longest * world.size()}));
  std::vector<std::string> texts;
  for (int r = 0; r < world.size(); ++r) {
    texts.push_back(
        all.substr(static_cast<size_t>(r) * static_cast<size_t>(longest), static_cast<size_t>(longest)));
  }
  return texts;
}

}  // namespace

struct CheckpointSaver::Impl {
  FileSystem& fs;
  std::string directory;
  int64_t keep;
  bool async;
  Device& device;
  Communicator& world;
  std::unique_ptr<PendingSave> pending;
  std::vector<std::string> complete;  // step folders that stand, oldest first

  void WriteShard(PendingSave& save);
  bool AllDone(bool wait);
  void Publish();
  void SetAside(const std::string& folder);
  void RemoveAll(std::string_view suffix);
  void Prune();
};

// Runs beside training: touches nothing but the slices, which do not change before BeforeUpdate has returned.
void CheckpointSaver::Impl::WriteShard(PendingSave& save) {
  const std::string name = fmt::format("rank-{:05d}.safetensors", world.rank());
  SafetensorsWriter writer(fs, JoinPath(save.folder, name));
  size_t longest = 0;
  for (const auto& [slice, global] : save.pieces) {
    longest = std::max(longest, static_cast<size_t>(std::min(slice.count, kStretchElements)));
    save.saved.push_back(
        {name, slice.kind, slice.parameter->name, global, slice.count, 0, PartOf(*slice.parameter)});
    writer.Declare(save.saved.back().TensorName(), DType::kF32, {slice.count});
  }
  Buffer bounce;  // for state that does not lie in the host's memory
  const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> hash(XXH3_createState(), &XXH3_freeState);
  for (size_t i = 0; i < save.pieces.size(); ++i) {
    const StateSlice& slice = save.pieces[i].slice;
    XXH3_64bits_reset(hash.get());
    for (int64_t at = 0, n = 0; at < slice.count; at += n) {
      const float* from = slice.array ? slice.InPlace(at) : nullptr;
      n = from ? std::min(kChunk, slice.count - at) : NextStretch(slice, at, slice.count);
      if (!from) {
        if (!bounce.defined())
          bounce = device.host_allocator().Allocate(longest * sizeof(float), MemoryTag::kBuffers);
        auto* to = static_cast<float*>(bounce.data());
        slice.array ? slice.Read(at, to, n) : save.read(slice, at, to, n);
        from = to;
      }
      const size_t bytes = static_cast<size_t>(n) * sizeof(float);
      XXH3_64bits_update(hash.get(), from, bytes);
      writer.Write(from, bytes);
    }
    save.saved[i].checksum = XXH3_64bits_digest(hash.get());
  }
  save.ReleaseSlices();  // training goes on while the disk catches up
  writer.Finish();
}

// Whether every rank has written its shard; throws this rank's error, once the others know that there is one.
bool CheckpointSaver::Impl::AllDone(bool wait) {
  if (wait && pending->thread.joinable()) pending->thread.join();
  const bool done = pending->done.load(std::memory_order_acquire);
  int64_t status[2] = {done ? 1 : 0, done && pending->error ? -1 : 0};
  world.AllReduce(TensorView(status, DType::kI64, {2}), ReduceOp::kMin);
  if (status[1] < 0) {
    const auto failed = std::move(pending);
    if (failed->thread.joinable()) failed->thread.join();
    if (failed->error) std::rethrow_exception(failed->error);
    throw CheckpointError(StrCat("another rank could not write its part of ", failed->folder));
  }
  return status[0] == 1;
}

void CheckpointSaver::Impl::Publish() {
  PendingSave& save = *pending;
  if (save.thread.joinable()) save.thread.join();
  const std::vector<std::string> shards = GatherTexts(world, SlicesToJson(save.saved).dump());
  if (world.rank() == 0) {
    Manifest manifest;
    manifest.info = save.info;
    for (const std::string& shard : shards) {
      for (SavedSlice& slice : SlicesFromJson(nlohmann::json::parse(shard)))
        manifest.slices.push_back(std::move(slice));
    }
    manifest.tensors = save.shapes;
    const std::string folder = JoinPath(directory, StepFolder(save.info.step));
    WriteFileAtomically(fs, JoinPath(save.folder, kTokenizerName), save.info.tokenizer);
    // Syncs the folder too, with everyone's shards.
    WriteFileAtomically(fs, JoinPath(save.folder, kManifestName), manifest.ToJson());
    // One left there by an earlier run goes out of the way first, so that a name never stands for a mixture.
    if (fs.Exists(folder)) SetAside(folder);
    fs.Rename(save.folder, folder);
    fs.SyncDirectory(directory);
    WriteFileAtomically(fs, JoinPath(directory, "latest"), StepFolder(save.info.step) + "\n");
    std::erase(complete, StepFolder(save.info.step));
    complete.push_back(StepFolder(save.info.step));
    Prune();
    LogInfo("saved {}", folder);
  }
  pending.reset();
}

// Renames a folder that is no longer wanted: what is left of a removal cut short must be no checkpoint.
void CheckpointSaver::Impl::SetAside(const std::string& folder) {
  if (fs.Exists(folder + kOldSuffix)) fs.RemoveTree(folder + kOldSuffix);
  fs.Rename(folder, folder + kOldSuffix);
}

void CheckpointSaver::Impl::RemoveAll(std::string_view suffix) {
  for (const std::string& name : fs.List(directory)) {
    if (name.ends_with(suffix)) fs.RemoveTree(JoinPath(directory, name));
  }
}

void CheckpointSaver::Impl::Prune() {
  while (keep > 0 && static_cast<int64_t>(complete.size()) > keep) {
    SetAside(JoinPath(directory, complete.front()));
    complete.erase(complete.begin());
  }
  RemoveAll(kOldSuffix);
}

CheckpointSaver::CheckpointSaver(FileSystem& fs, std::string checkpoints_dir, int64_t keep, bool async,
                                 Device& device, Communicator& world)
    : impl_(std::make_unique<Impl>(
          Impl{fs, std::move(checkpoints_dir), keep, async, device, world, nullptr, {}})) {
  if (world.rank() != 0 || !fs.Exists(impl_->directory)) return;
  for (const std::string& name : fs.List(impl_->directory)) {
    const bool unfinished = name.ends_with(kPartialSuffix) || name.ends_with(kOldSuffix);
    if (!unfinished && fs.Exists(JoinPath(JoinPath(impl_->directory, name), kManifestName)))
      impl_->complete.push_back(name);
  }
}

CheckpointSaver::~CheckpointSaver() {
  if (impl_->pending && impl_->pending->thread.joinable()) impl_->pending->thread.join();
}

void CheckpointSaver::Save(const CheckpointInfo& info, const std::vector<StateSlice>& slices,
                           const std::vector<Parameter*>& parameters, ReadSlice read) {
  Impl& m = *impl_;
  Finish();
  m.pending = std::make_unique<PendingSave>();
  PendingSave& save = *m.pending;
  save.info = info;
  save.folder = JoinPath(m.directory, StepFolder(info.step) + kPartialSuffix);
  save.pieces = Cut(slices);
  save.read = std::move(read);
  for (const Parameter* parameter : parameters) save.shapes[parameter->name] = parameter->global_shape;
  if (m.world.rank() == 0) {
    if (m.fs.Exists(m.directory)) {
      m.RemoveAll(kPartialSuffix);  // of saves that came to nothing: they take space
    } else {
      m.fs.CreateDirectories(m.directory);
      m.fs.SyncDirectory(JoinPath(m.directory, ".."));
    }
    m.fs.CreateDirectories(save.folder);
  }
  m.world.Barrier();
  auto write = [&m, &save, rank = ThreadRank(), world = ThreadWorldSize()] {
    SetThreadRank(rank, world);
    try {
      m.WriteShard(save);
    } catch (...) {
      save.error = std::current_exception();
    }
    save.ReleaseSlices();
    save.done.store(true, std::memory_order_release);
  };
  if (m.async) {
    save.thread = std::thread(write);
    return;
  }
  write();
  Finish();
}

void CheckpointSaver::BeforeUpdate() {
  if (impl_->pending) impl_->pending->copied.wait(false, std::memory_order_acquire);
}

void CheckpointSaver::Poll() {
  if (impl_->pending && impl_->AllDone(false)) impl_->Publish();
}

void CheckpointSaver::Finish() {
  if (impl_->pending && impl_->AllDone(true)) impl_->Publish();
}

}  // namespace strata
