// Token files: tokenized text on disk, mapped for reading.
//
// strata's own layout, little-endian, version 1:
//   offset 0    TokenFileHeader, 128 bytes
//   128         ids, header.id_bytes each (2 when the vocabulary has at most 65536 tokens, else 4)
//   ends_at     document ends: uint64 each, the number of tokens up to and including the document's last
//   saved_at    the tokenizer, as Tokenizer::Save gives it, to the end of the file
// with zeros before ends_at so that it is a multiple of 8.
//
// Read and written as well: llm.c's (a header of 256 int32, magic 20240520 for uint16 and 20240801 for uint32
// ids), nanoGPT's (bare uint16), Megatron's (bare ids in .bin, sequence lengths in .idx beside it). A file is
// recognised by its first bytes; one without a header is nanoGPT's, unless an .idx file lies beside it, or it
// looks like a damaged file of another layout.
//
// Every fault in a file is a DataError naming path and byte. What opening cannot see without reading
// everything (damaged ids) is caught by Verify, and by Read where an id is outside the vocabulary.
//
// Ownership: a TokenFile owns its mapping. Threading: TokenFile is immutable; a writer belongs to one thread.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "data/tokenizer.h"
#include "runtime/base/file_system.h"

namespace strata {

enum class TokenFileLayout { kStrata, kLlmC, kNanoGpt, kMegatron };
/// "strata", "llm.c", "nanoGPT", "Megatron".
std::string_view Name(TokenFileLayout layout);

struct TokenFileHeader {
  static constexpr char kMagic[8] = {'S', 'T', 'R', 'A', 'T', 'A', 'T', '\x1A'};
  static constexpr uint32_t kVersion = 1;

  char magic[8];
  uint32_t version;
  uint32_t id_bytes;
  uint64_t vocab_size;
  uint64_t tokenizer_hash;  // Tokenizer::hash
  uint64_t num_tokens;
  uint64_t num_documents;
  uint64_t ends_at;
  uint64_t saved_at;
  uint64_t file_size;
  uint64_t content_hash;  // XXH3-64 of everything behind the header
  uint64_t reserved[5];   // zero
  uint64_t header_hash;   // XXH3-64 of the header's bytes before this field
};
static_assert(sizeof(TokenFileHeader) == 128);

class TokenFile {
 public:
  /// `vocab_size`: that of the model which will take the ids; 0 when there is none. Throws DataError for a
  /// damaged file and for one of a larger vocabulary.
  static std::shared_ptr<const TokenFile> Open(FileSystem& fs, const std::string& path,
                                               int64_t vocab_size = 0);

  const std::string& path() const { return path_; }
  TokenFileLayout layout() const { return layout_; }
  int64_t num_tokens() const { return num_tokens_; }
  /// Where documents end, as counts of tokens, increasing to num_tokens(). A layout that does not say has one
  /// document.
  std::span<const uint64_t> document_ends() const { return ends_; }
  /// What only strata's layout says; 0 and "" in others.
  int64_t vocab_size() const { return vocab_size_; }
  uint64_t tokenizer_hash() const { return tokenizer_hash_; }
  std::string_view saved_tokenizer() const { return saved_tokenizer_; }
  /// XXH3-64 of ids, documents and tokenizer. Strata's layout states it; in others it is made from the whole
  /// file the first time it is asked for.
  uint64_t content_hash() const;

  /// Copies the ids from number `begin` on. Requires begin + out.size() ≤ num_tokens(). Throws DataError when
  /// one is not in the vocabulary.
  void Read(int64_t begin, std::span<int32_t> out) const;

  /// Reads the whole file: compares the checksum (strata's layout) and checks every id.
  void Verify() const;

 private:
  TokenFile() = default;
  void OpenStrata();
  void OpenLlmC(uint32_t id_bytes);
  void OpenBare();
  void OpenMegatron(FileSystem& fs, const std::string& index_path);

  std::string path_;
  std::unique_ptr<MappedFile> file_;
  std::string_view bytes_;  // of file_
  TokenFileLayout layout_ = TokenFileLayout::kStrata;
  uint32_t id_bytes_ = 2;
  int64_t num_tokens_ = 0;
  uint64_t ids_at_ = 0;
  int64_t vocab_size_ = 0;
  int64_t id_limit_ = 0;  // ids must be below
  uint64_t tokenizer_hash_ = 0;
  mutable std::once_flag hashed_;
  mutable uint64_t content_hash_ = 0;
  std::string_view saved_tokenizer_;
  std::vector<uint64_t> own_ends_;  // where the layout has none to point to
  std::span<const uint64_t> ends_;
};

/// Writes a token file as it grows: a buffer and eight bytes a document are all it holds in memory. The file
/// stands at `path` only once Finish has returned; before that, and after a failure, there is nothing there,
/// or what was there before.
class TokenFileWriter {
 public:
  /// Throws ConfigError when the layout cannot hold the tokenizer's ids. `tokenizer` outlives the writer.
  TokenFileWriter(FileSystem& fs, std::string path, const Tokenizer& tokenizer,
                  TokenFileLayout layout = TokenFileLayout::kStrata);
  ~TokenFileWriter();

  void Append(std::span<const int32_t> ids);
  /// Ends a document; one without tokens is none.
  void EndDocument();
  int64_t num_tokens() const { return num_tokens_; }
  int64_t num_documents() const { return static_cast<int64_t>(ends_.size()); }
  /// Ends the last document, completes the file and gives it its name. Throws DataError when there are no
  /// tokens.
  void Finish();

 private:
  struct Hash;

  void Write(const void* data, size_t size);
  void Flush();
  TokenFileHeader FinishStrata();

  FileSystem& fs_;
  std::string path_, temporary_;
  const Tokenizer& tokenizer_;
  TokenFileLayout layout_;
  uint32_t id_bytes_ = 2;
  std::unique_ptr<File> file_;
  uint64_t offset_ = 0;  // bytes flushed
  std::string buffer_;
  std::unique_ptr<Hash> hash_;
  int64_t num_tokens_ = 0;
  std::vector<uint64_t> ends_;
  bool finished_ = false;
};

}  // namespace strata
