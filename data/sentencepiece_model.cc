#include "data/sentencepiece_model.h"

#include <cstring>

#include "runtime/base/error.h"

namespace strata {
namespace {

// One field of a protocol-buffer message (encoding: protobuf.dev/programming-guides/encoding).
struct Field {
  enum Wire { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };
  uint32_t number = 0;
  Wire wire = kVarint;
  uint64_t value = 0;      // of a varint
  std::string_view bytes;  // of the others
};

class MessageReader {
 public:
  MessageReader(std::string_view message, const std::string& where) : rest_(message), where_(where) {}

  /// False at the end.
  bool Next(Field* field) {
    if (rest_.empty()) return false;
    const uint64_t tag = Varint();
    field->number = static_cast<uint32_t>(tag >> 3);
    field->wire = static_cast<Field::Wire>(tag & 7);
    switch (field->wire) {
      case Field::kVarint:
        field->value = Varint();
        break;
      case Field::kFixed64:
        field->bytes = Take(8);
        break;
      case Field::kBytes:
        field->bytes = Take(Varint());
        break;
      case Field::kFixed32:
        field->bytes = Take(4);
        break;
      default:
        Fail();
    }
    return true;
  }

 private:
  [[noreturn]] void Fail() const {
    throw DataError(StrCat(where_, ": not a SentencePiece model, or a damaged one"));
  }
  std::string_view Take(uint64_t size) {
    if (size > rest_.size()) Fail();
    const std::string_view bytes = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return bytes;
  }
  uint64_t Varint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      const auto byte = static_cast<uint8_t>(Take(1)[0]);
      value |= uint64_t{byte & 0x7Fu} << shift;
      if (byte < 0x80) return value;
    }
    Fail();
  }

  std::string_view rest_;
  const std::string& where_;
};

// The normalizer's table: the size of a trie (Darts-clone's double array, 32-bit units), the trie, and the
// replacements its leaves point to, each ended by a zero. The library walks it without looking at bounds.
void CheckCharsMap(std::string_view table, const std::string& where) {
  if (table.empty()) return;
  const auto require = [&](bool sound) {
    if (!sound) throw DataError(StrCat(where, ": the model's character table is damaged"));
  };
  uint32_t trie_bytes = 0;
  require(table.size() > sizeof trie_bytes);
  std::memcpy(&trie_bytes, table.data(), sizeof trie_bytes);
  const std::string_view trie = table.substr(sizeof trie_bytes).substr(0, trie_bytes);
  const std::string_view replacements = table.substr(sizeof trie_bytes + trie.size());
  const size_t units = trie.size() / 4;
  require(trie.size() == trie_bytes && trie_bytes % 4 == 0 && units > 0);
  require(!replacements.empty() && replacements.back() == '\0');
  for (size_t i = 0; i < units; ++i) {
    uint32_t unit = 0;
    std::memcpy(&unit, trie.data() + 4 * i, 4);
    const bool leaf = unit >> 31;
    if (leaf) {
      require((unit & 0x7FFFFFFFu) < replacements.size());
    } else {
      const uint32_t offset = (unit >> 10) << ((unit & (1u << 9)) >> 6);
      require(((i ^ offset) | 0xFF) < units);  // its 256 children
    }
  }
}

class MessageWriter {
 public:
  MessageWriter& Bytes(uint32_t number, std::string_view bytes) {
    Varint(number << 3 | Field::kBytes);
    Varint(bytes.size());
    out_ += bytes;
    return *this;
  }
  MessageWriter& Int(uint32_t number, uint64_t value) {
    Varint(number << 3 | Field::kVarint);
    Varint(value);
    return *this;
  }
  MessageWriter& Float(uint32_t number, float value) {
    Varint(number << 3 | Field::kFixed32);
    char bytes[sizeof value];
    std::memcpy(bytes, &value, sizeof value);
    out_.append(bytes, sizeof value);
    return *this;
  }
  const std::string& message() const { return out_; }

 private:
  void Varint(uint64_t value) {
    for (; value >= 0x80; value >>= 7) out_ += static_cast<char>(value | 0x80);
    out_ += static_cast<char>(value);
  }
  std::string out_;
};

// Field numbers of sentencepiece_model.proto.
enum ModelField : uint32_t { kPieces = 1, kTrainerSpec = 2, kNormalizerSpec = 3, kDenormalizerSpec = 5 };
enum PieceField : uint32_t { kText = 1, kScore = 2, kType = 3 };
enum TrainerField : uint32_t { kModelType = 3, kVocabSize = 4, kByteFallback = 35 };
enum NormalizerField : uint32_t {
  kName = 1,
  kCharsMap = 2,
  kDummyPrefix = 3,
  kRemoveSpaces = 4,
  kEscapeSpaces = 5
};
constexpr uint64_t kBpe = 2;

}  // namespace

SentencePieceFacts ReadSentencePieceFacts(std::string_view model, const std::string& where) {
  SentencePieceFacts facts;
  bool dummy_prefix = true, remove_spaces = true, escape_spaces = true, normalizes = false;
  int32_t id = 0;
  MessageReader reader(model, where);
  for (Field field; reader.Next(&field);) {
    if (field.number == kPieces) {
      MessageReader piece(field.bytes, where);
      for (Field f; piece.Next(&f);) {
        if (f.number == kText && f.bytes.find('\n') != f.bytes.npos) facts.has_line_feed = true;
        if (f.number == kType && f.value == static_cast<uint64_t>(Piece::Type::kControl)) {
          facts.control_ids.push_back(id);
        }
      }
      ++id;
    } else if (field.number == kNormalizerSpec || field.number == kDenormalizerSpec) {
      const bool forward = field.number == kNormalizerSpec;
      MessageReader spec(field.bytes, where);
      for (Field f; spec.Next(&f);) {
        if (f.number == kCharsMap) CheckCharsMap(f.bytes, where);
        if (!forward) continue;
        if (f.number == kCharsMap) normalizes = !f.bytes.empty();
        if (f.number == kDummyPrefix) dummy_prefix = f.value != 0;
        if (f.number == kRemoveSpaces) remove_spaces = f.value != 0;
        if (f.number == kEscapeSpaces) escape_spaces = f.value != 0;
      }
    }
  }
  facts.keeps_text = !normalizes && !dummy_prefix && !remove_spaces && escape_spaces;
  return facts;
}

std::string WriteSentencePieceModel(const std::vector<Piece>& pieces) {
  MessageWriter model;
  for (const Piece& piece : pieces) {
    MessageWriter m;
    m.Bytes(kText, piece.text).Float(kScore, piece.score).Int(kType, static_cast<uint64_t>(piece.type));
    model.Bytes(kPieces, m.message());
  }
  MessageWriter trainer, normalizer;
  trainer.Int(kModelType, kBpe).Int(kVocabSize, pieces.size()).Int(kByteFallback, 1);
  normalizer.Bytes(kName, "identity").Int(kDummyPrefix, 1).Int(kRemoveSpaces, 0).Int(kEscapeSpaces, 1);
  model.Bytes(kTrainerSpec, trainer.message()).Bytes(kNormalizerSpec, normalizer.message());
  return model.message();
}

}  // namespace strata
