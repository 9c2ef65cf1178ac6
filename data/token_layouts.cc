#include "data/token_layouts.h"

#include <cstring>
#include <limits>

#include "runtime/base/error.h"

namespace strata {
namespace {

constexpr std::string_view kMegatronMagic("MMIDIDX\0\0", 9);
// Megatron's numbers for element types.
constexpr uint8_t kMegatronInt32 = 4, kMegatronUint16 = 8;

template <typename T>
void Append(T value, std::string* out) {
  char bytes[sizeof value];
  std::memcpy(bytes, &value, sizeof value);
  out->append(bytes, sizeof value);
}

}  // namespace

MegatronIndex ParseMegatronIndex(std::string_view bytes, const std::string& path) {
  size_t at = 0;
  const auto refuse = [&](const std::string& what) {
    throw DataError(StrCat(path, ": byte ", at, ": ", what),
                    "make the index again with Megatron's preprocess_data");
  };
  const auto read = [&]<typename T>(T* value) {
    if (bytes.size() - at < sizeof(T)) refuse("the index is truncated");
    std::memcpy(value, bytes.data() + at, sizeof(T));
    at += sizeof(T);
  };
  if (!bytes.starts_with(kMegatronMagic)) refuse("not a Megatron index");
  at = kMegatronMagic.size();
  uint64_t version = 0, sequences = 0, bounds = 0;
  uint8_t type = 0;
  read(&version);
  if (version != 1) refuse(StrCat("index version ", version, "; this program reads version 1"));
  read(&type);
  if (type != kMegatronInt32 && type != kMegatronUint16)
    refuse(StrCat("id type ", +type, " is not int32 or uint16"));
  read(&sequences);
  read(&bounds);
  if (sequences > bytes.size() / 12 || bounds > bytes.size() / 8 ||
      bytes.size() - at != 12 * sequences + 8 * bounds) {
    refuse(StrCat(sequences, " sequences and ", bounds, " document bounds do not make ", bytes.size(),
                  " bytes"));
  }
  MegatronIndex index;
  index.id_bytes = type == kMegatronInt32 ? 4 : 2;
  std::vector<uint64_t> ends = {0};  // in tokens, by sequence
  for (uint64_t i = 0; i < sequences; ++i) {
    int32_t length = 0;
    read(&length);
    if (length < 0) refuse(StrCat("sequence ", i, " has the length ", length));
    ends.push_back(ends.back() + static_cast<uint64_t>(length));
  }
  for (uint64_t i = 0; i < sequences; ++i) {
    int64_t pointer = 0;
    read(&pointer);
    if (pointer < 0 || static_cast<uint64_t>(pointer) != ends[i] * index.id_bytes) {
      refuse(StrCat("sequence ", i, " lies at byte ", pointer, " and not behind the one before"));
    }
  }
  for (uint64_t i = 0; i < bounds; ++i) {
    int64_t bound = 0;
    read(&bound);
    if (bound < 0 || static_cast<uint64_t>(bound) > sequences) refuse(StrCat("document bound ", bound));
    const uint64_t end = ends[static_cast<size_t>(bound)];
    const uint64_t last = index.document_ends.empty() ? 0 : index.document_ends.back();
    if (end < last) refuse(StrCat("document bound ", bound, " goes back"));
    if (end > last) index.document_ends.push_back(end);
  }
  index.num_tokens = ends.back();
  if (index.num_tokens > 0 &&
      (index.document_ends.empty() || index.document_ends.back() != index.num_tokens)) {
    index.document_ends.push_back(index.num_tokens);
  }
  return index;
}

std::string WriteMegatronIndex(const MegatronIndex& index) {
  std::string out(kMegatronMagic);
  Append(uint64_t{1}, &out);
  Append(index.id_bytes == 4 ? kMegatronInt32 : kMegatronUint16, &out);
  Append(uint64_t{index.document_ends.size()}, &out);
  Append(uint64_t{index.document_ends.size() + 1}, &out);
  uint64_t begin = 0;
  for (uint64_t end : index.document_ends) {
    if (end - begin > std::numeric_limits<int32_t>::max()) {
      throw DataError(
          StrCat("a document of ", end - begin, " tokens is more than Megatron's index can hold"));
    }
    Append(static_cast<int32_t>(end - begin), &out);
    begin = end;
  }
  begin = 0;
  for (uint64_t end : index.document_ends) {
    Append(static_cast<int64_t>(begin * index.id_bytes), &out);
    begin = end;
  }
  for (size_t i = 0; i <= index.document_ends.size(); ++i) Append(static_cast<int64_t>(i), &out);
  return out;
}

}  // namespace strata
