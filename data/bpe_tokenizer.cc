#include "data/bpe_tokenizer.h"

#include <algorithm>
#include <cstring>
#include <functional>

#include "data/bpe_files.h"
#include "data/utf8.h"
#include "runtime/base/error.h"

namespace strata {

// Pair of ids → rank and product, in open addressing at a load of at most a half.
class BpeTokenizer::PairTable {
 public:
  static constexpr uint32_t kNoRank = ~uint32_t{0};

  explicit PairTable(size_t num_pairs) {
    while (size_t{1} << bits_ < 2 * num_pairs) ++bits_;
    slots_.resize(size_t{1} << bits_);
  }

  void Insert(int32_t left, int32_t right, uint32_t rank, int32_t product) {
    Slot& slot = slots_[Find(Key(left, right))];
    if (slot.rank == kNoRank) slot = {Key(left, right), rank, product};
  }
  struct Merge {
    uint32_t rank;
    int32_t product;
  };
  Merge Lookup(int32_t left, int32_t right) const {
    const Slot& slot = slots_[Find(Key(left, right))];
    return {slot.rank, slot.product};
  }

 private:
  struct Slot {
    uint64_t key = ~uint64_t{0};
    uint32_t rank = kNoRank;
    int32_t product = 0;
  };
  static uint64_t Key(int32_t left, int32_t right) {
    return uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
  }
  size_t Find(uint64_t key) const {
    size_t i = (key * 0x9E3779B97F4A7C15u ^ key >> 29) * 0xBF58476D1CE4E5B9u >> (64 - bits_);
    while (slots_[i].key != key && slots_[i].rank != kNoRank) i = (i + 1) & (slots_.size() - 1);
    return i;
  }

  int bits_ = 4;
  std::vector<Slot> slots_;
};

namespace {

// Stretch → ids, direct-mapped: a newcomer takes its slot from whoever is there. Stretches of up to 23 bytes
// with up to five ids fill their slots entirely, most of text; longer ones are merged anew each time.
class StretchCache {
 public:
  static constexpr size_t kMaxBytes = 23;
  static constexpr size_t kMaxIds = 5;

  struct Key {
    std::array<uint64_t, 3> words{};
    bool operator==(const Key& o) const {  // the library's comparison of arrays is a call
      return ((words[0] ^ o.words[0]) | (words[1] ^ o.words[1]) | (words[2] ^ o.words[2])) == 0;
    }
  };
  struct Slot {
    Key key;
    uint32_t count = 0;
    std::array<int32_t, kMaxIds> ids;
  };

  // The bytes, zeros, and the length in the last byte. `slack`: bytes readable from the stretch's begin.
  static Key MakeKey(std::string_view stretch, size_t slack) {
    Key key;
    if (slack >= 24) {
      std::memcpy(&key, stretch.data(), 24);
      const size_t n = stretch.size();
      key.words[0] &= Mask(n);
      key.words[1] &= Mask(n < 8 ? 0 : n - 8);
      key.words[2] &= Mask(n < 16 ? 0 : n - 16);
    } else {
      std::memcpy(&key, stretch.data(), stretch.size());
    }
    key.words[2] |= uint64_t{stretch.size()} << 56;
    return key;
  }
  Slot& SlotOf(const Key& key) {
    uint64_t h = key.words[0] * 0x9E3779B97F4A7C15u ^ key.words[1] * 0xC2B2AE3D27D4EB4Fu ^
                 key.words[2] * 0x165667B19E3779F9u;
    h = (h ^ h >> 32) * 0xD6E8FEB86659FD93u;
    return slots_[h >> (64 - kBits)];
  }

 private:
  static constexpr int kBits = 15;
  static uint64_t Mask(size_t bytes) { return bytes >= 8 ? ~uint64_t{0} : (uint64_t{1} << 8 * bytes) - 1; }

  std::vector<Slot> slots_ = std::vector<Slot>(size_t{1} << kBits);
};

}  // namespace

struct BpeTokenizer::Scratch {
  static constexpr uint32_t kEnd = ~uint32_t{0};

  struct Symbol {
    int32_t id;
    uint32_t previous, next;  // positions, kEnd at the ends
    uint32_t rank;            // of the pair that begins here, kNoRank when it merges no more
    int32_t product;
  };

  PreTokenizer::State state;
  StretchCache cache;
  std::vector<Symbol> symbols;
  std::vector<uint64_t> queue;  // rank << 32 | position: a heap, lowest first
};

BpeTokenizer::BpeTokenizer(BpeModel model, const std::string& where)
    : model_(std::move(model)), pre_tokenizer_(model_.pattern, where), bytes_(model_.tokens.size()) {
  byte_ids_.fill(-1);
  for (size_t id = 0; id < bytes_.size(); ++id) {
    bytes_[id] = BytesOfToken(model_.tokens[id]);
    if (bytes_[id].size() == 1) byte_ids_[static_cast<uint8_t>(bytes_[id][0])] = static_cast<int32_t>(id);
  }
  for (const SpecialToken& token : model_.special) {
    bytes_[token.id] = token.text;
    if (token.text == "<|endoftext|>" || token.text == "<|end_of_text|>" || token.text == "</s>") {
      eos_id_ = token.id;
    }
  }
  for (int byte = 0; byte < 256; ++byte) {
    if (byte_ids_[byte] < 0) {
      throw DataError(StrCat(where, ": the vocabulary has no token for byte ", byte),
                      "a byte-level vocabulary has all 256; is this file complete?");
    }
  }
  pairs_ = std::make_unique<PairTable>(model_.merges.size());
  for (size_t rank = 0; rank < model_.merges.size(); ++rank) {
    const auto [left, right] = model_.merges[rank];
    pairs_->Insert(left, right, static_cast<uint32_t>(rank), model_.products[rank]);
  }
  if (model_.ignore_merges) {
    for (size_t id = 0; id < bytes_.size(); ++id) whole_.emplace(bytes_[id], static_cast<int32_t>(id));
    for (const SpecialToken& token : model_.special) whole_.erase(token.text);
  }
}

BpeTokenizer::~BpeTokenizer() = default;

std::string BpeTokenizer::Decode(std::span<const int32_t> ids) const {
  std::string text;
  for (int32_t id : ids) {
    if (id < 0 || id >= vocab_size() || bytes_[id].empty()) {
      throw DataError(StrCat("token ", id, " is not in the vocabulary of ", vocab_size()));
    }
    text += bytes_[id];
  }
  return text;
}

void BpeTokenizer::EncodePlain(std::string_view text, std::vector<int32_t>* ids) const {
  std::unique_ptr<Scratch> scratch;
  {
    std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      scratch = std::move(idle_.back());
      idle_.pop_back();
    }
  }
  if (!scratch) scratch = std::make_unique<Scratch>();

  std::string with_blank;
  if (model_.add_prefix_space && text[0] != ' ') text = with_blank = StrCat(" ", text);
  ids->reserve(ids->size() + text.size() / 3);
  while (!text.empty()) {
    const size_t valid = ValidUtf8Prefix(text);
    EncodeValid(text.substr(0, valid), *scratch, ids);
    if (valid == text.size()) break;
    ids->push_back(byte_ids_[static_cast<uint8_t>(text[valid])]);
    text.remove_prefix(valid + 1);
  }
  std::lock_guard lock(mutex_);
  idle_.push_back(std::move(scratch));
}

size_t BpeTokenizer::PlainCut(std::string_view text, size_t limit) const {
  // GPT-2's pattern has white space at a stretch's begin only, and never looks back: a stretch ends wherever
  // white space follows something else. Nothing of the kind is known of other patterns.
  const bool known = pre_tokenizer_.is_gpt2() && !model_.add_prefix_space && !model_.ignore_merges;
  return known ? LastWordEnd(text, limit) : 0;
}

std::string BpeTokenizer::Payload() const { return TokenizerJson(model_); }

void BpeTokenizer::EncodeValid(std::string_view text, Scratch& scratch, std::vector<int32_t>* ids) const {
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = pre_tokenizer_.End(text, begin, scratch.state);
    const std::string_view stretch = text.substr(begin, end - begin);
    if (stretch.size() > StretchCache::kMaxBytes) {
      EncodeStretch(stretch, scratch, ids);
    } else {
      const StretchCache::Key key = StretchCache::MakeKey(stretch, text.size() - begin);
      StretchCache::Slot& slot = scratch.cache.SlotOf(key);
      if (slot.key == key) {
        for (uint32_t i = 0; i < slot.count; ++i) ids->push_back(slot.ids[i]);
      } else {
        const size_t before = ids->size();
        EncodeStretch(stretch, scratch, ids);
        const size_t count = ids->size() - before;
        if (count <= StretchCache::kMaxIds) {
          slot.key = key;
          slot.count = static_cast<uint32_t>(count);
          std::copy(ids->begin() + before, ids->end(), slot.ids.begin());
        }
      }
    }
    begin = end;
  }
}

void BpeTokenizer::EncodeStretch(std::string_view stretch, Scratch& scratch,
                                 std::vector<int32_t>* ids) const {
  if (model_.ignore_merges) {
    if (const auto it = whole_.find(stretch); it != whole_.end()) {
      ids->push_back(it->second);
      return;
    }
  }
  Merge(stretch, scratch, ids);
}

void BpeTokenizer::Merge(std::string_view stretch, Scratch& scratch, std::vector<int32_t>* ids) const {
  constexpr uint32_t kEnd = Scratch::kEnd;
  auto& symbols = scratch.symbols;
  auto& queue = scratch.queue;
  const size_t size = stretch.size();
  if (size >= kEnd) throw DataError(StrCat("one word of ", size, " bytes is more than can be tokenized"));

  symbols.resize(size);
  queue.clear();
  const auto rank_pair = [&](uint32_t at) {
    Scratch::Symbol& s = symbols[at];
    const PairTable::Merge merge =
        s.next == kEnd ? PairTable::Merge{PairTable::kNoRank, 0} : pairs_->Lookup(s.id, symbols[s.next].id);
    s.rank = merge.rank;
    s.product = merge.product;
    return s.rank != PairTable::kNoRank;
  };
  const auto entry = [&](uint32_t at) { return uint64_t{symbols[at].rank} << 32 | at; };

  for (uint32_t i = 0; i < size; ++i) {
    symbols[i].id = byte_ids_[static_cast<uint8_t>(stretch[i])];
    symbols[i].previous = i == 0 ? kEnd : i - 1;
    symbols[i].next = i + 1 == size ? kEnd : i + 1;
  }
  for (uint32_t i = 0; i < size; ++i) {
    if (rank_pair(i)) queue.push_back(entry(i));
  }
  std::make_heap(queue.begin(), queue.end(), std::greater<>());
  const auto requeue = [&](uint32_t at) {
    if (!rank_pair(at)) return;
    queue.push_back(entry(at));
    std::push_heap(queue.begin(), queue.end(), std::greater<>());
  };

  while (!queue.empty()) {
    std::pop_heap(queue.begin(), queue.end(), std::greater<>());
    const uint64_t best = queue.back();
    queue.pop_back();
    const uint32_t at = static_cast<uint32_t>(best);
    Scratch::Symbol& left = symbols[at];
    if (best >> 32 != left.rank) continue;  // the pair that was here is gone
    const Scratch::Symbol& right = symbols[left.next];
    symbols[left.next].rank = PairTable::kNoRank;
    left.id = left.product;
    left.next = right.next;
    if (left.next != kEnd) symbols[left.next].previous = at;
    requeue(at);
    if (left.previous != kEnd) requeue(left.previous);
  }
  for (uint32_t i = 0; i != kEnd; i = symbols[i].next) ids->push_back(symbols[i].id);
}

}  // namespace strata
