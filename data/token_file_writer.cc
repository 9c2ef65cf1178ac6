#include <unistd.h>
#include <xxhash.h>

#include <cstring>
#include <limits>

#include "data/token_file.h"
#include "data/token_layouts.h"
#include "runtime/base/error.h"

namespace strata {
namespace {

constexpr size_t kBufferBytes = 1 << 20;

}  // namespace

struct TokenFileWriter::Hash {
  XXH3_state_t* state = XXH3_createState();
  Hash() { XXH3_64bits_reset(state); }
  ~Hash() { XXH3_freeState(state); }
};

TokenFileWriter::TokenFileWriter(FileSystem& fs, std::string path, const Tokenizer& tokenizer,
                                 TokenFileLayout layout)
    : fs_(fs),
      path_(std::move(path)),
      // Processes, and threads of one, may write the same file at once; each renames its own.
      temporary_(StrCat(path_, ".", ::getpid(), ".", this, ".tmp")),
      tokenizer_(tokenizer),
      layout_(layout),
      id_bytes_(tokenizer.vocab_size() <= 65536 ? 2 : 4),
      hash_(std::make_unique<Hash>()) {
  if (layout == TokenFileLayout::kNanoGpt && id_bytes_ != 2) {
    throw ConfigError(StrCat(path_, ": nanoGPT's token files hold ids below 65536, the tokenizer has ",
                             tokenizer.vocab_size()),
                      "use another layout");
  }
  file_ = fs_.Create(temporary_);
  if (layout == TokenFileLayout::kStrata) offset_ = sizeof(TokenFileHeader);
  if (layout == TokenFileLayout::kLlmC) offset_ = kLlmCHeaderBytes;
}

TokenFileWriter::~TokenFileWriter() {
  if (finished_) return;
  file_.reset();
  try {
    if (fs_.Exists(temporary_)) fs_.Remove(temporary_);
  } catch (const Error&) {
    // The writer is given up because of a first failure; a second must not hide it.
  }
}

void TokenFileWriter::Append(std::span<const int32_t> ids) {
  for (int32_t id : ids) {
    STRATA_CHECK(id >= 0 && id < tokenizer_.vocab_size()) << "id " << id;
    Write(&id, id_bytes_);  // the low bytes come first
  }
  num_tokens_ += static_cast<int64_t>(ids.size());
}

void TokenFileWriter::EndDocument() {
  const auto end = static_cast<uint64_t>(num_tokens_);
  if (end > (ends_.empty() ? 0 : ends_.back())) ends_.push_back(end);
}

void TokenFileWriter::Write(const void* data, size_t size) {
  buffer_.append(static_cast<const char*>(data), size);
  if (buffer_.size() >= kBufferBytes) Flush();
}

void TokenFileWriter::Flush() {
  XXH3_64bits_update(hash_->state, buffer_.data(), buffer_.size());
  file_->WriteAt(offset_, buffer_.data(), buffer_.size());
  offset_ += buffer_.size();
  buffer_.clear();
}

TokenFileHeader TokenFileWriter::FinishStrata() {
  TokenFileHeader header{};
  std::memcpy(header.magic, TokenFileHeader::kMagic, sizeof header.magic);
  header.version = TokenFileHeader::kVersion;
  header.id_bytes = id_bytes_;
  header.vocab_size = static_cast<uint64_t>(tokenizer_.vocab_size());
  header.num_tokens = static_cast<uint64_t>(num_tokens_);
  header.num_documents = ends_.size();
  const uint64_t ids_end = sizeof header + header.num_tokens * id_bytes_;
  header.ends_at = (ids_end + 7) / 8 * 8;
  header.saved_at = header.ends_at + 8 * header.num_documents;
  const std::string saved = tokenizer_.Save();
  header.tokenizer_hash = XXH3_64bits(saved.data(), saved.size());
  header.file_size = header.saved_at + saved.size();

  const uint64_t zeros = 0;
  Write(&zeros, header.ends_at - ids_end);
  for (uint64_t end : ends_) Write(&end, sizeof end);
  Write(saved.data(), saved.size());
  Flush();
  header.content_hash = XXH3_64bits_digest(hash_->state);
  header.header_hash = XXH3_64bits(&header, offsetof(TokenFileHeader, header_hash));
  return header;
}

void TokenFileWriter::Finish() {
  EndDocument();
  if (num_tokens_ == 0) throw DataError(StrCat(path_, ": there is no text to write tokens of"));
  Flush();
  if (layout_ == TokenFileLayout::kStrata) {
    const TokenFileHeader header = FinishStrata();
    file_->WriteAt(0, &header, sizeof header);
  } else if (layout_ == TokenFileLayout::kLlmC) {
    if (num_tokens_ > std::numeric_limits<int32_t>::max()) {
      throw DataError(StrCat(path_, ": ", num_tokens_, " tokens are more than llm.c's header can count"),
                      "write several files");
    }
    int32_t header[kLlmCHeaderBytes / 4] = {id_bytes_ == 2 ? kLlmCMagic16 : kLlmCMagic32,
                                            id_bytes_ == 2 ? kLlmCVersion16 : kLlmCVersion32,
                                            static_cast<int32_t>(num_tokens_)};
    file_->WriteAt(0, header, sizeof header);
  } else if (layout_ == TokenFileLayout::kMegatron) {
    WriteFileAtomically(fs_, MegatronIndexPath(path_),
                        WriteMegatronIndex({id_bytes_, static_cast<uint64_t>(num_tokens_), ends_}));
  }
  file_->Sync();
  file_.reset();
  fs_.Rename(temporary_, path_);
  finished_ = true;
  const size_t slash = path_.rfind('/');
  fs_.SyncDirectory(slash == path_.npos ? "." : slash == 0 ? "/" : path_.substr(0, slash));
}

}  // namespace strata
