#include "data/tokenize.h"

#include <xxhash.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "runtime/base/error.h"
#include "runtime/base/log.h"

namespace strata {
namespace {

// Text in memory at a time (more only where a document cannot be cut), and text of one piece of work.
constexpr size_t kWindowBytes = 16 << 20;
constexpr size_t kPieceBytes = 256 << 10;

// A stretch of text to be encoded by one thread.
struct Piece {
  size_t begin, end;  // in the window
  bool ends_document;
};

// One file's text, a window at a time.
class Window {
 public:
  Window(FileSystem& fs, const std::string& path) : file_(fs.OpenForRead(path)), size_(file_->Size()) {}

  std::string_view text() const { return buffer_; }
  uint64_t offset() const { return offset_; }  // of text() in the file
  bool at_end() const { return offset_ + buffer_.size() == size_; }

  void Drop(size_t bytes) {
    buffer_.erase(0, bytes);
    offset_ += bytes;
  }
  // Reads at least as much as there is already, so that windows that must grow cost linear time.
  void Grow() {
    const size_t kept = buffer_.size();
    const uint64_t left = size_ - offset_ - kept;
    const auto read = static_cast<size_t>(std::min<uint64_t>(left, std::max(kWindowBytes, kept)));
    buffer_.resize(kept + read);
    file_->ReadAt(offset_ + kept, buffer_.data() + kept, read);
  }

 private:
  std::unique_ptr<File> file_;
  uint64_t size_;
  uint64_t offset_ = 0;
  std::string buffer_;
};

class FileTokenizer {
 public:
  FileTokenizer(const Tokenizer& tokenizer, const TokenizeOptions& options, ThreadPool& pool,
                TokenFileWriter& writer)
      : tokenizer_(tokenizer), options_(options), pool_(pool), writer_(writer) {}

  void Run(FileSystem& fs, const std::string& path, const std::function<void(uint64_t)>& progress) {
    Window window(fs, path);
    do {
      window.Grow();
      const size_t used = CutPieces(window.text(), window.at_end());
      Encode(window.text(), window.offset(), path);
      window.Drop(used);
      progress(window.offset());
    } while (!window.at_end() || !window.text().empty());
  }

 private:
  // Fills pieces_ from the window's text as far as it can be cut for certain; returns how far that is.
  size_t CutPieces(std::string_view text, bool at_end) {
    pieces_.clear();
    const std::string& separator = options_.separator;
    size_t begin = 0;
    while (!separator.empty()) {
      const size_t found = text.find(separator, begin);
      if (found == text.npos) break;
      CutStretch(text, begin, found, true);
      begin = found + separator.size();
    }
    if (at_end) {
      CutStretch(text, begin, text.size(), true);
      return text.size();
    }
    // The rest may end within a separator, and within what the tokenizer must see as a whole.
    const size_t margin = std::max<size_t>(separator.size(), 1);
    if (text.size() - begin <= margin) return begin;
    const std::string_view rest = text.substr(begin);
    const size_t cut = tokenizer_.SafeCut(rest, rest.size() - margin);
    CutStretch(text, begin, begin + cut, false);
    return begin + cut;
  }

  // Cuts [begin, end), which ends a document or is followed by more of it, into pieces of about kPieceBytes.
  void CutStretch(std::string_view text, size_t begin, size_t end, bool ends_document) {
    while (end - begin > kPieceBytes) {
      const size_t cut = tokenizer_.SafeCut(text.substr(begin, end - begin), kPieceBytes);
      if (cut == 0) break;
      pieces_.push_back({begin, begin + cut, false});
      begin += cut;
    }
    if (begin < end || ends_document) pieces_.push_back({begin, end, ends_document});
  }

  void Encode(std::string_view text, uint64_t offset, const std::string& path) {
    std::vector<std::vector<int32_t>> ids(pieces_.size());
    pool_.ParallelFor(static_cast<int64_t>(pieces_.size()), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const Piece& piece = pieces_[i];
        try {
          tokenizer_.EncodeTo(text.substr(piece.begin, piece.end - piece.begin), {options_.allow_special},
                              &ids[i]);
        } catch (const DataError& e) {
          throw DataError(StrCat(path, ": text from byte ", offset + piece.begin, " on: ", e.what()),
                          e.hint());
        }
      }
    });
    for (size_t i = 0; i < pieces_.size(); ++i) {
      writer_.Append(ids[i]);
      open_ |= !ids[i].empty();
      if (!pieces_[i].ends_document || !open_) continue;
      if (const auto eos = tokenizer_.eos_id(); eos && options_.append_eos)
        writer_.Append(std::span(&*eos, 1));
      writer_.EndDocument();
      open_ = false;
    }
  }

  const Tokenizer& tokenizer_;
  const TokenizeOptions& options_;
  ThreadPool& pool_;
  TokenFileWriter& writer_;
  std::vector<Piece> pieces_;
  bool open_ = false;  // the document being written has tokens
};

uint64_t HashFile(FileSystem& fs, const std::string& path) {
  const std::unique_ptr<File> file = fs.OpenForRead(path);
  const uint64_t size = file->Size();
  std::string buffer(std::min<uint64_t>(size, 1 << 20), '\0');
  const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state(XXH3_createState(), &XXH3_freeState);
  XXH3_64bits_reset(state.get());
  for (uint64_t offset = 0; offset < size; offset += buffer.size()) {
    const auto read = static_cast<size_t>(std::min<uint64_t>(buffer.size(), size - offset));
    file->ReadAt(offset, buffer.data(), read);
    XXH3_64bits_update(state.get(), buffer.data(), read);
  }
  return XXH3_64bits_digest(state.get());
}

std::string Hex(uint64_t value) { return fmt::format("{:016x}", value); }

// "dir/some text.txt" → "some text".
std::string Stem(const std::string& path) {
  const std::string name = path.substr(path.rfind('/') + 1);
  return name.substr(0, name.rfind('.'));
}

}  // namespace

void TokenizeFiles(FileSystem& fs, const Tokenizer& tokenizer, std::span<const std::string> texts,
                   const TokenizeOptions& options, ThreadPool& pool, TokenFileWriter& writer) {
  uint64_t total = 0, before = 0;
  for (const std::string& path : texts) total += fs.OpenForRead(path)->Size();
  for (const std::string& path : texts) {
    uint64_t size = 0;
    FileTokenizer(tokenizer, options, pool, writer).Run(fs, path, [&](uint64_t done) {
      size = done;
      if (options.progress) options.progress(before + done, total);
    });
    before += size;
  }
}

std::string TokenizeToCache(FileSystem& fs, const Tokenizer& tokenizer, const std::string& text,
                            const TokenizeOptions& options, const std::string& cache_dir, ThreadPool& pool) {
  const std::string settings = StrCat(options.append_eos, options.allow_special, options.separator);
  const uint64_t key = XXH3_64bits_withSeed(settings.data(), settings.size(), tokenizer.hash());
  std::string path =
      JoinPath(cache_dir, StrCat(Stem(text), "-", Hex(HashFile(fs, text)), "-", Hex(key), ".bin"));
  if (fs.Exists(path)) {
    try {
      TokenFile::Open(fs, path)->Verify();
      return path;
    } catch (const DataError& e) {
      LogWarning("{}; tokenizing {} again", e.what(), text);
    }
  }
  fs.CreateDirectories(cache_dir);
  TokenFileWriter writer(fs, path, tokenizer);
  TokenizeFiles(fs, tokenizer, std::span(&text, 1), options, pool, writer);
  writer.Finish();
  return path;
}

}  // namespace strata
