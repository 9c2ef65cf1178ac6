#include "data/difficulty.h"

#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <utility>

#include "runtime/base/error.h"

namespace strata {
namespace {

constexpr int64_t kIndexChunk = 1 << 18;  // samples that indexing holds at a time
constexpr char kRemedy[] = "strata analyze makes it anew";

uint64_t Padded(uint64_t bytes) { return (bytes + 7) / 8 * 8; }

// A header of so many samples and values; what depends on neither is zero.
DifficultyHeader Layout(uint64_t num_samples, uint64_t num_bins) {
  DifficultyHeader header{};
  std::memcpy(header.magic, DifficultyHeader::kMagic, sizeof header.magic);
  header.version = DifficultyHeader::kVersion;
  header.id_bytes = num_samples <= std::numeric_limits<uint32_t>::max() ? 4 : 8;
  header.num_samples = num_samples;
  header.num_bins = num_bins;
  header.order_at = Padded(sizeof header + sizeof(uint32_t) * num_samples);
  header.bins_at = Padded(header.order_at + header.id_bytes * num_samples);
  header.file_size = header.bins_at + 16 * num_bins;
  return header;
}

uint64_t HeaderHash(const DifficultyHeader& header) {
  return XXH3_64bits(&header, offsetof(DifficultyHeader, header_hash));
}

[[noreturn]] void Refuse(const std::string& path, uint64_t byte, const std::string& what) {
  throw DataError(StrCat(path, ": byte ", byte, ": ", what), kRemedy);
}

// The header of a file, whose places and sizes are those of its layout.
DifficultyHeader ReadHeader(std::span<const std::byte> bytes, const std::string& path) {
  DifficultyHeader header;
  if (bytes.size() < sizeof header) Refuse(path, bytes.size(), "the file ends within its header");
  std::memcpy(&header, bytes.data(), sizeof header);
  if (std::memcmp(header.magic, DifficultyHeader::kMagic, sizeof header.magic) != 0)
    Refuse(path, 0, "this is no difficulty file, or its header is damaged");
  if (header.header_hash != HeaderHash(header)) {
    Refuse(path, offsetof(DifficultyHeader, header_hash),
           "the header does not match its checksum: it is damaged");
  }
  if (header.version != DifficultyHeader::kVersion) {
    Refuse(path, offsetof(DifficultyHeader, version),
           StrCat("difficulty file version ", header.version, "; this program reads version ",
                  DifficultyHeader::kVersion));
  }
  if (header.file_size != bytes.size()) {
    Refuse(path, bytes.size(),
           StrCat("the file ends here, but has ", header.file_size, " bytes by its header"));
  }
  // The checks below hold for any file that was written here; a header may also be forged.
  const bool sizes = header.num_samples >= 1 && header.num_samples <= bytes.size() && header.num_bins >= 1 &&
                     header.num_bins <= header.num_samples;
  const DifficultyHeader layout = sizes ? Layout(header.num_samples, header.num_bins) : DifficultyHeader{};
  const bool sound = sizes && header.id_bytes == layout.id_bytes && header.order_at == layout.order_at &&
                     header.bins_at == layout.bins_at && header.file_size == layout.file_size &&
                     header.resolution > 0 && std::isfinite(header.resolution);
  if (!sound) Refuse(path, 0, "the header contradicts itself: it is damaged");
  return header;
}

void CheckName(const std::string& name) {
  const bool sound = !name.empty() && name.size() < sizeof(DifficultyHeader::metric) &&
                     name.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_") == name.npos;
  if (!sound) {
    throw ConfigError(StrCat("a difficulty metric is called '", name, "'"),
                      StrCat("use 1 to ", sizeof(DifficultyHeader::metric) - 1,
                             " lower-case letters, digits and underscores"));
  }
}

// The samples of a dataset in blocks, and the file of each while a metric is being measured: its values, then
// their XXH3-64, seeded by all that they depend on. A file that another run left, or wrote in part, so shows.
class Blocks {
 public:
  Blocks(FileSystem& fs, const std::string& folder, const Dataset& dataset, const DifficultyMetric& metric)
      : fs_(fs),
        folder_(JoinPath(folder, metric.name() + ".blocks")),
        num_samples_(dataset.num_samples()),
        // Enough of them for many workers, and small ones, so that little is lost.
        size_(std::clamp<int64_t>((num_samples_ + 63) / 64, 1, 1 << 14)) {
    const std::string made_of = StrCat(metric.name(), " ", metric.fingerprint(), " ", metric.resolution(),
                                       " ", dataset.fingerprint(), " ", num_samples_, " ", dataset.seq_len());
    key_ = XXH3_64bits(made_of.data(), made_of.size());
  }

  const std::string& folder() const { return folder_; }
  int64_t number() const { return (num_samples_ + size_ - 1) / size_; }
  int64_t begin(int64_t block) const { return block * size_; }
  int64_t end(int64_t block) const { return std::min(num_samples_, (block + 1) * size_); }

  /// Nothing where the block is not there, or not whole.
  std::optional<std::vector<uint32_t>> Read(int64_t block) const {
    const std::string path = Path(block);
    if (!fs_.Exists(path)) return std::nullopt;
    const std::unique_ptr<File> file = fs_.OpenForRead(path);
    std::vector<uint32_t> values(static_cast<size_t>(end(block) - begin(block)));
    const size_t bytes = values.size() * sizeof(uint32_t);
    uint64_t seal = 0;
    if (file->Size() != bytes + sizeof seal) return std::nullopt;
    file->ReadAt(0, values.data(), bytes);
    file->ReadAt(bytes, &seal, sizeof seal);
    if (seal != Seal(block, values)) return std::nullopt;
    return values;
  }

  void Write(int64_t block, const std::vector<uint32_t>& values) const {
    const std::string path = Path(block), beside = path + ".tmp";
    const size_t bytes = values.size() * sizeof(uint32_t);
    const uint64_t seal = Seal(block, values);
    const std::unique_ptr<File> file = fs_.Create(beside);
    file->WriteAt(0, values.data(), bytes);
    file->WriteAt(bytes, &seal, sizeof seal);
    fs_.Rename(beside, path);  // not synced: what a power cut takes is measured again
  }

 private:
  std::string Path(int64_t block) const { return JoinPath(folder_, std::to_string(block)); }
  uint64_t Seal(int64_t block, const std::vector<uint32_t>& values) const {
    return XXH3_64bits_withSeed(values.data(), values.size() * sizeof(uint32_t),
                                key_ + static_cast<uint64_t>(block));
  }

  FileSystem& fs_;
  std::string folder_;
  int64_t num_samples_, size_;
  uint64_t key_;
};

uint32_t Quantise(double difficulty, const DifficultyMetric& metric, int64_t sample) {
  const double multiple = std::round(difficulty / metric.resolution());
  // Written so that it refuses a NaN.
  if (difficulty >= 0 && multiple <= std::numeric_limits<uint32_t>::max())
    return static_cast<uint32_t>(multiple);
  throw DataError(StrCat("the ", metric.name(), " of sample ", sample, " is ", difficulty),
                  StrCat("a difficulty is finite, at least 0, and at most 2^32 - 1 times the metric's "
                         "resolution of ",
                         metric.resolution()));
}

using Bin = DifficultyFile::Bin;

// Calls body(begin, keys) for chunk after chunk of samples: keys are value · 2³² + sample − begin, sorted.
template <typename Body>
void ForEachSortedChunk(File& file, int64_t num_samples, const Body& body) {
  std::vector<uint32_t> values;
  std::vector<uint64_t> keys;
  for (int64_t begin = 0; begin < num_samples; begin += kIndexChunk) {
    values.resize(static_cast<size_t>(std::min(kIndexChunk, num_samples - begin)));
    file.ReadAt(sizeof(DifficultyHeader) + sizeof(uint32_t) * static_cast<uint64_t>(begin), values.data(),
                values.size() * sizeof(uint32_t));
    keys.resize(values.size());
    for (size_t i = 0; i < keys.size(); ++i) keys[i] = uint64_t{values[i]} << 32 | i;
    std::sort(keys.begin(), keys.end());
    body(begin, std::span<const uint64_t>(keys));
  }
}

// Calls body(value, run) for each run of keys of one value.
template <typename Body>
void ForEachRun(std::span<const uint64_t> keys, const Body& body) {
  for (size_t begin = 0, end; begin < keys.size(); begin = end) {
    const uint64_t value = keys[begin] >> 32;
    for (end = begin + 1; end < keys.size() && keys[end] >> 32 == value;) ++end;
    body(static_cast<uint32_t>(value), keys.subspan(begin, end - begin));
  }
}

bool ByValue(const Bin& a, const Bin& b) { return a.value < b.value; }

// The values that occur, increasing; their `end`s are how many samples have them.
std::vector<Bin> CountValues(File& file, int64_t num_samples) {
  std::vector<Bin> bins;
  ForEachSortedChunk(file, num_samples, [&](int64_t, std::span<const uint64_t> keys) {
    const auto old = static_cast<int64_t>(bins.size());
    ForEachRun(keys, [&](uint32_t value, auto run) { bins.push_back({value, 0, run.size()}); });
    std::inplace_merge(bins.begin(), bins.begin() + old, bins.end(), ByValue);
    size_t kept = 0;
    for (const Bin& bin : bins) {
      if (kept > 0 && bins[kept - 1].value == bin.value) {
        bins[kept - 1].end += bin.end;
      } else {
        bins[kept++] = bin;
      }
    }
    bins.resize(kept);
  });
  return bins;
}

// Writes the samples by difficulty: each bin's from where the one before ends, chunk by chunk. Turns the
// bins' counts into their ends.
void WriteOrder(File& file, const DifficultyHeader& header, std::vector<Bin>& bins) {
  uint64_t begin = 0;
  for (Bin& bin : bins) begin += std::exchange(bin.end, begin);
  std::string ids;
  const auto num_samples = static_cast<int64_t>(header.num_samples);
  ForEachSortedChunk(file, num_samples, [&](int64_t first, std::span<const uint64_t> keys) {
    ForEachRun(keys, [&](uint32_t value, auto run) {
      ids.clear();
      for (uint64_t key : run) {
        const uint64_t sample = static_cast<uint64_t>(first) + static_cast<uint32_t>(key);
        ids.append(reinterpret_cast<const char*>(&sample), header.id_bytes);  // the low bytes come first
      }
      Bin& bin = *std::lower_bound(bins.begin(), bins.end(), Bin{value, 0, 0}, ByValue);
      file.WriteAt(header.order_at + bin.end * header.id_bytes, ids.data(), ids.size());
      bin.end += run.size();
    });
  });
}

// Writes the whole file at `path` and makes its content durable.
void WriteDifficulty(FileSystem& fs, const std::string& path, const Blocks& blocks, const Dataset& dataset,
                     const DifficultyMetric& metric) {
  const std::unique_ptr<File> file = fs.Create(path);
  for (int64_t block = 0; block < blocks.number(); ++block) {
    const auto values = blocks.Read(block);
    if (!values) {
      throw DataError(StrCat(blocks.folder(), ": samples ", blocks.begin(block), " to ",
                             blocks.end(block) - 1, " are not measured"),
                      kRemedy);
    }
    file->WriteAt(sizeof(DifficultyHeader) + sizeof(uint32_t) * static_cast<uint64_t>(blocks.begin(block)),
                  values->data(), values->size() * sizeof(uint32_t));
  }
  std::vector<Bin> bins = CountValues(*file, dataset.num_samples());
  DifficultyHeader header = Layout(static_cast<uint64_t>(dataset.num_samples()), bins.size());
  WriteOrder(*file, header, bins);
  file->WriteAt(header.bins_at, bins.data(), bins.size() * sizeof(Bin));

  const std::unique_ptr<MappedFile> written = fs.Map(path);
  const auto content = written->bytes().subspan(sizeof header);
  header.content_hash = XXH3_64bits(content.data(), content.size());
  header.fingerprint = dataset.fingerprint();
  header.resolution = metric.resolution();
  metric.name().copy(header.metric, sizeof header.metric - 1);
  header.header_hash = HeaderHash(header);
  file->WriteAt(0, &header, sizeof header);
  file->Sync();
}

}  // namespace

std::string DifficultyPath(const std::string& folder, const std::string& metric) {
  return JoinPath(folder, metric + ".difficulty");
}

void MeasureDifficulty(FileSystem& fs, const std::string& folder, const Dataset& dataset,
                       DifficultyMetric& metric, int64_t batch_size, const DifficultyWorker& worker) {
  CheckName(metric.name());
  const Blocks blocks(fs, folder, dataset, metric);
  fs.CreateDirectories(blocks.folder());
  int64_t done = 0, of = 0;
  for (int64_t block = worker.rank; block < blocks.number(); block += worker.num_workers)
    of += blocks.end(block) - blocks.begin(block);

  std::vector<uint32_t> values;
  std::vector<int64_t> samples;
  std::vector<double> difficulty;
  for (int64_t block = worker.rank; block < blocks.number(); block += worker.num_workers) {
    const int64_t begin = blocks.begin(block), end = blocks.end(block);
    const bool measured = blocks.Read(block).has_value();
    values.clear();
    for (int64_t at = begin; at < end && !measured; at += std::ssize(samples)) {
      samples.resize(static_cast<size_t>(std::min(batch_size, end - at)));
      std::iota(samples.begin(), samples.end(), at);
      difficulty.assign(samples.size(), std::numeric_limits<double>::quiet_NaN());
      metric.Measure(MakeBatch(dataset, samples, dataset.seq_len()), difficulty);
      for (size_t i = 0; i < samples.size(); ++i)
        values.push_back(Quantise(difficulty[i], metric, samples[i]));
      if (worker.progress) worker.progress(done + std::ssize(values), of);
    }
    if (!measured) blocks.Write(block, values);
    done += end - begin;
  }
  if (worker.progress) worker.progress(done, of);
}

void IndexDifficulty(FileSystem& fs, const std::string& folder, const Dataset& dataset,
                     const DifficultyMetric& metric) {
  const Blocks blocks(fs, folder, dataset, metric);
  const std::string path = DifficultyPath(folder, metric.name()), beside = path + ".tmp";
  try {
    WriteDifficulty(fs, beside, blocks, dataset, metric);
    fs.Rename(beside, path);
  } catch (const Error&) {
    try {
      if (fs.Exists(beside)) fs.Remove(beside);
    } catch (const IoError&) {
      // The first failure is the one to tell; the next file replaces what is left.
    }
    throw;
  }
  fs.SyncDirectory(folder);
  fs.RemoveTree(blocks.folder());
}

std::unique_ptr<DifficultyFile> DifficultyFile::Open(FileSystem& fs, const std::string& path,
                                                     const Dataset& dataset) {
  if (!fs.Exists(path)) throw DataError(path + " is not there", "strata analyze makes it");
  std::unique_ptr<DifficultyFile> file(new DifficultyFile);
  file->path_ = path;
  file->file_ = fs.Map(path);
  const std::span<const std::byte> bytes = file->file_->bytes();
  const DifficultyHeader header = ReadHeader(bytes, path);
  if (header.fingerprint != dataset.fingerprint() ||
      header.num_samples != static_cast<uint64_t>(dataset.num_samples())) {
    throw DataError(
        StrCat(path, " is of other data: ", header.num_samples, " samples of fingerprint ",
               header.fingerprint, ", not ", dataset.num_samples(), " of ", dataset.fingerprint()),
        "a difficulty file belongs to one set of token files, split and sequence length; strata "
        "analyze makes one for these");
  }
  const auto content = bytes.subspan(sizeof header);
  if (header.content_hash != XXH3_64bits(content.data(), content.size()))
    Refuse(path, sizeof header, "the content behind the header does not match its checksum");

  const size_t n = header.num_samples;
  const std::byte* const order = bytes.data() + header.order_at;
  file->num_samples_ = static_cast<int64_t>(n);
  file->resolution_ = header.resolution;
  file->values_ = {reinterpret_cast<const uint32_t*>(content.data()), n};
  if (header.id_bytes == 4) file->order32_ = {reinterpret_cast<const uint32_t*>(order), n};
  if (header.id_bytes == 8) file->order64_ = {reinterpret_cast<const uint64_t*>(order), n};
  file->bins_ = {reinterpret_cast<const Bin*>(bytes.data() + header.bins_at), header.num_bins};
  file->CheckIndex(header);
  return file;
}

// Checksums do not say that a file is sound, only that it is as it was written.
void DifficultyFile::CheckIndex(const DifficultyHeader& header) const {
  for (int64_t i = 0; i < num_samples_; ++i) {
    if (const int64_t sample = Ordered(i); sample < 0 || sample >= num_samples_)
      Refuse(path_, header.order_at + header.id_bytes * static_cast<uint64_t>(i),
             StrCat("sample ", sample, " of ", num_samples_));
  }
  for (size_t i = 0; i < bins_.size(); ++i) {
    const Bin& bin = bins_[i];
    const bool increases =
        i == 0 ? bin.end > 0 : bin.value > bins_[i - 1].value && bin.end > bins_[i - 1].end;
    if (!increases || bin.end > header.num_samples || bin.zero != 0)
      Refuse(path_, header.bins_at + sizeof(Bin) * i,
             StrCat("value ", bin.value, " ends at sample ", bin.end));
  }
  if (bins_.back().end != header.num_samples)
    Refuse(path_, header.file_size, StrCat("the last value ends at sample ", bins_.back().end));
}

int64_t DifficultyFile::Ordered(int64_t i) const {
  const auto at = static_cast<size_t>(i);
  return order64_.empty() ? order32_[at] : static_cast<int64_t>(order64_[at]);
}

int64_t DifficultyFile::CountUpToValue(int64_t value) const {
  const auto above = std::upper_bound(bins_.begin(), bins_.end(), value,
                                      [](int64_t v, const Bin& bin) { return v < int64_t{bin.value}; });
  return above == bins_.begin() ? 0 : static_cast<int64_t>((above - 1)->end);
}

}  // namespace strata
