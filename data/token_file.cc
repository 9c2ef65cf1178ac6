#include "data/token_file.h"

#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "data/token_layouts.h"
#include "runtime/base/error.h"

namespace strata {

static_assert(std::endian::native == std::endian::little, "token files are read as they lie");

namespace {

template <typename T>
T Load(std::string_view bytes, size_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

[[noreturn]] void Refuse(const std::string& path, uint64_t byte, const std::string& what,
                         const std::string& hint = "write the token file again from its text") {
  throw DataError(StrCat(path, ": byte ", byte, ": ", what), hint);
}

int DifferingBits(std::string_view a, std::string_view b) {
  int bits = 0;
  for (size_t i = 0; i < b.size(); ++i) bits += std::popcount(static_cast<uint8_t>(a[i] ^ b[i]));
  return bits;
}

// Whether bytes without a known magic are rather a damaged header than bare ids: a byte of strata's magic may
// differ, or of llm.c's, whose header is zeros from the fourth number on.
bool LooksDamaged(std::string_view bytes) {
  const std::string_view magic(TokenFileHeader::kMagic, sizeof TokenFileHeader::kMagic);
  if (bytes.size() >= magic.size() && DifferingBits(bytes, magic) <= 8) return true;
  if (bytes.size() < kLlmCHeaderBytes) return false;
  const std::string_view rest = bytes.substr(12, kLlmCHeaderBytes - 12);
  return std::all_of(rest.begin(), rest.end(), [](char c) { return c == 0; });
}

template <typename T>
int64_t FirstIdBeyond(std::string_view ids, int64_t limit, std::span<int32_t> out) {
  int64_t bad = -1;
  for (size_t i = 0; i < out.size(); ++i) {
    const T id = Load<T>(ids, i * sizeof(T));
    if (id >= limit && bad < 0) bad = static_cast<int64_t>(i);
    out[i] = static_cast<int32_t>(id);
  }
  return bad;
}

}  // namespace

std::string_view Name(TokenFileLayout layout) {
  switch (layout) {
    case TokenFileLayout::kStrata:
      return "strata";
    case TokenFileLayout::kLlmC:
      return "llm.c";
    case TokenFileLayout::kNanoGpt:
      return "nanoGPT";
    case TokenFileLayout::kMegatron:
      return "Megatron";
  }
  return "?";
}

std::string MegatronIndexPath(const std::string& path) {
  return path.ends_with(".bin") ? path.substr(0, path.size() - 4) + ".idx" : path + ".idx";
}

std::shared_ptr<const TokenFile> TokenFile::Open(FileSystem& fs, const std::string& path,
                                                 int64_t vocab_size) {
  const std::shared_ptr<TokenFile> file(new TokenFile);
  file->path_ = path;
  file->file_ = fs.Map(path);
  const auto bytes = file->file_->bytes();
  file->bytes_ = {reinterpret_cast<const char*>(bytes.data()), bytes.size()};

  const std::string_view content = file->bytes_;
  const std::string_view magic(TokenFileHeader::kMagic, sizeof TokenFileHeader::kMagic);
  const int32_t number = content.size() >= 4 ? Load<int32_t>(content, 0) : 0;
  const std::string index_path = MegatronIndexPath(path);
  if (content.starts_with(magic)) {
    file->OpenStrata();
  } else if (number == kLlmCMagic16 || number == kLlmCMagic32) {
    file->OpenLlmC(number == kLlmCMagic16 ? 2 : 4);
  } else if (fs.Exists(index_path)) {
    file->OpenMegatron(fs, index_path);
  } else {
    file->OpenBare();
  }
  if (file->ends_.empty()) {
    file->own_ends_ = {static_cast<uint64_t>(file->num_tokens_)};
    file->ends_ = file->own_ends_;
  }
  if (file->num_tokens_ == 0) Refuse(path, file->ids_at_, "the file has no tokens");
  if (vocab_size > 0 && file->vocab_size_ > vocab_size) {
    throw DataError(
        StrCat(path, ": byte ", offsetof(TokenFileHeader, vocab_size), ": tokenized with a vocabulary of ",
               file->vocab_size_, ", but the model has ", vocab_size),
        "set model.vocab_size to auto, or tokenize with the model's tokenizer");
  }
  const int64_t limit = file->vocab_size_ > 0 ? file->vocab_size_ : vocab_size;
  file->id_limit_ = limit > 0 ? limit : std::numeric_limits<int32_t>::max();
  return file;
}

void TokenFile::OpenStrata() {
  layout_ = TokenFileLayout::kStrata;
  if (bytes_.size() < sizeof(TokenFileHeader))
    Refuse(path_, bytes_.size(), "the file ends within its header");
  const auto header = Load<TokenFileHeader>(bytes_, 0);
  if (header.header_hash != XXH3_64bits(&header, offsetof(TokenFileHeader, header_hash))) {
    Refuse(path_, offsetof(TokenFileHeader, header_hash),
           "the header does not match its checksum: it is damaged");
  }
  if (header.version != TokenFileHeader::kVersion) {
    Refuse(path_, offsetof(TokenFileHeader, version),
           StrCat("token file version ", header.version, "; this program reads version ",
                  TokenFileHeader::kVersion),
           "write the token file again from its text, or use the program that wrote it");
  }
  if (bytes_.size() != header.file_size) {
    Refuse(path_, bytes_.size(),
           StrCat("the file ends here, but has ", header.file_size, " bytes by its header"));
  }
  // The checks below hold for any file that the writer made; a header may also be forged.
  constexpr uint64_t kIdsAt = sizeof(TokenFileHeader);
  const bool sound = (header.id_bytes == 2 || header.id_bytes == 4) && header.vocab_size <= kMaxTokenIds &&
                     header.num_tokens <= header.file_size && header.num_documents <= header.file_size &&
                     header.ends_at % 8 == 0 && header.ends_at <= header.saved_at &&
                     header.saved_at <= header.file_size &&
                     kIdsAt + header.num_tokens * header.id_bytes <= header.ends_at &&
                     header.ends_at + 8 * header.num_documents == header.saved_at;
  if (!sound) Refuse(path_, 0, "the header contradicts itself: it is damaged");
  id_bytes_ = header.id_bytes;
  ids_at_ = kIdsAt;
  num_tokens_ = static_cast<int64_t>(header.num_tokens);
  vocab_size_ = static_cast<int64_t>(header.vocab_size);
  tokenizer_hash_ = header.tokenizer_hash;
  saved_tokenizer_ = bytes_.substr(header.saved_at);
  ends_ = {reinterpret_cast<const uint64_t*>(bytes_.data() + header.ends_at), header.num_documents};
  uint64_t last = 0;
  for (size_t i = 0; i < ends_.size(); ++i) {
    if (ends_[i] <= last || ends_[i] > header.num_tokens) {
      Refuse(path_, header.ends_at + 8 * i,
             StrCat("document ", i, " ends at token ", ends_[i], ", after ", last));
    }
    last = ends_[i];
  }
  if (last != header.num_tokens) {
    Refuse(path_, header.saved_at,
           StrCat("the last document ends at token ", last, " of ", header.num_tokens));
  }
}

void TokenFile::OpenLlmC(uint32_t id_bytes) {
  layout_ = TokenFileLayout::kLlmC;
  if (bytes_.size() < kLlmCHeaderBytes) Refuse(path_, bytes_.size(), "the file ends within llm.c's header");
  const auto version = Load<int32_t>(bytes_, 4);
  const auto count = Load<int32_t>(bytes_, 8);
  const int32_t expected = id_bytes == 2 ? kLlmCVersion16 : kLlmCVersion32;
  if (version != expected) {
    Refuse(path_, 4, StrCat("llm.c token file version ", version, "; this program reads version ", expected));
  }
  const uint64_t size = kLlmCHeaderBytes + uint64_t{id_bytes} * static_cast<uint32_t>(count);
  if (count < 0 || bytes_.size() != size) {
    Refuse(path_, std::min<uint64_t>(bytes_.size(), size),
           StrCat("the file has ", bytes_.size(), " bytes, its header promises ", count, " tokens, ", size,
                  " bytes"));
  }
  id_bytes_ = id_bytes;
  ids_at_ = kLlmCHeaderBytes;
  num_tokens_ = count;
}

void TokenFile::OpenBare() {
  layout_ = TokenFileLayout::kNanoGpt;
  if (LooksDamaged(bytes_)) {
    Refuse(path_, 0, "this is no token file, or its header is damaged");
  }
  if (bytes_.size() % 2 != 0) {
    Refuse(path_, bytes_.size(), "neither a token file with a header nor bare uint16 ids: the size is odd",
           "text files end in .txt; token files come from strata tokenize, llm.c, nanoGPT or Megatron");
  }
  num_tokens_ = static_cast<int64_t>(bytes_.size() / 2);
}

void TokenFile::OpenMegatron(FileSystem& fs, const std::string& index_path) {
  layout_ = TokenFileLayout::kMegatron;
  const std::string index = ReadFile(fs, index_path);
  const MegatronIndex parsed = ParseMegatronIndex(index, index_path);
  id_bytes_ = parsed.id_bytes;
  own_ends_ = parsed.document_ends;
  ends_ = own_ends_;
  num_tokens_ = static_cast<int64_t>(parsed.num_tokens);
  if (bytes_.size() != parsed.num_tokens * id_bytes_) {
    Refuse(path_, bytes_.size(),
           StrCat("the file has ", bytes_.size(), " bytes, ", index_path, " promises ", parsed.num_tokens,
                  " ids of ", id_bytes_));
  }
}

void TokenFile::Read(int64_t begin, std::span<int32_t> out) const {
  STRATA_CHECK(begin >= 0 && begin + static_cast<int64_t>(out.size()) <= num_tokens_)
      << path_ << ": " << begin << "+" << out.size() << " of " << num_tokens_;
  const uint64_t at = ids_at_ + static_cast<uint64_t>(begin) * id_bytes_;
  const std::string_view ids = bytes_.substr(at, out.size() * id_bytes_);
  const int64_t bad = id_bytes_ == 2 ? FirstIdBeyond<uint16_t>(ids, id_limit_, out)
                                     : FirstIdBeyond<uint32_t>(ids, id_limit_, out);
  if (bad >= 0) {
    Refuse(path_, at + bad * id_bytes_,
           StrCat("token ", begin + bad, " is ", static_cast<uint32_t>(out[bad]),
                  ", outside the vocabulary of ", id_limit_),
           "the file is damaged, or was tokenized for another vocabulary");
  }
}

uint64_t TokenFile::content_hash() const {
  if (layout_ == TokenFileLayout::kStrata) return Load<TokenFileHeader>(bytes_, 0).content_hash;
  std::call_once(hashed_, [this] {
    // Documents lie in Megatron's other file.
    content_hash_ =
        XXH3_64bits_withSeed(bytes_.data(), bytes_.size(), XXH3_64bits(ends_.data(), ends_.size_bytes()));
  });
  return content_hash_;
}

void TokenFile::Verify() const {
  if (layout_ == TokenFileLayout::kStrata) {
    const std::string_view content = bytes_.substr(sizeof(TokenFileHeader));
    if (XXH3_64bits(content.data(), content.size()) != Load<TokenFileHeader>(bytes_, 0).content_hash) {
      Refuse(path_, sizeof(TokenFileHeader), "the content behind the header does not match its checksum");
    }
  }
  std::vector<int32_t> ids(1 << 16);
  for (int64_t begin = 0; begin < num_tokens_; begin += static_cast<int64_t>(ids.size())) {
    const auto count = std::min<int64_t>(static_cast<int64_t>(ids.size()), num_tokens_ - begin);
    Read(begin, std::span(ids).first(static_cast<size_t>(count)));
  }
}

}  // namespace strata
