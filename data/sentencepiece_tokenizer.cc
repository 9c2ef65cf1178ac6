#include "data/sentencepiece_tokenizer.h"

#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "data/sentencepiece_model.h"
#include "data/utf8.h"
#include "runtime/base/error.h"

namespace strata {

SentencePieceTokenizer::SentencePieceTokenizer(std::string model, const std::string& where)
    : model_(std::move(model)), processor_(std::make_unique<sentencepiece::SentencePieceProcessor>()) {
  const SentencePieceFacts facts = ReadSentencePieceFacts(model_, where);
  try {
    const auto status = processor_->LoadFromSerializedProto(model_);
    if (!status.ok()) throw DataError(StrCat(where, ": not a SentencePiece model: ", status.ToString()));
  } catch (const Error&) {
    throw;
  } catch (const std::exception& e) {  // from the library's index of pieces
    throw DataError(StrCat(where, ": not a SentencePiece model: ", e.what()));
  }
  if (processor_->GetPieceSize() == 0) throw DataError(StrCat(where, ": the model has no pieces"));
  for (int32_t id : facts.control_ids) special_.push_back({processor_->IdToPiece(id), id});
  by_line_ = facts.keeps_text && !facts.has_line_feed;
}

SentencePieceTokenizer::~SentencePieceTokenizer() = default;

int32_t SentencePieceTokenizer::vocab_size() const { return processor_->GetPieceSize(); }

std::optional<int32_t> SentencePieceTokenizer::bos_id() const {
  const int id = processor_->bos_id();
  return id < 0 ? std::nullopt : std::optional<int32_t>(id);
}

std::optional<int32_t> SentencePieceTokenizer::eos_id() const {
  const int id = processor_->eos_id();
  return id < 0 ? std::nullopt : std::optional<int32_t>(id);
}

std::string SentencePieceTokenizer::Decode(std::span<const int32_t> ids) const {
  for (int32_t id : ids) {
    if (id < 0 || id >= vocab_size()) {
      throw DataError(StrCat("token ", id, " is not in the vocabulary of ", vocab_size()));
    }
  }
  std::string text;
  const auto status = processor_->Decode(std::vector<int>(ids.begin(), ids.end()), &text);
  if (!status.ok()) throw DataError(StrCat("SentencePiece cannot decode: ", status.ToString()));
  return text;
}

void SentencePieceTokenizer::EncodePlain(std::string_view text, std::vector<int32_t>* ids) const {
  std::vector<int> part;
  while (!text.empty()) {
    const size_t line = by_line_ ? text.find('\n') : text.npos;
    const size_t end = line == text.npos ? text.size() : line + 1;
    const auto status = processor_->Encode(text.substr(0, end), &part);
    if (!status.ok()) throw DataError(StrCat("SentencePiece cannot encode: ", status.ToString()));
    ids->insert(ids->end(), part.begin(), part.end());
    text.remove_prefix(end);
  }
}

size_t SentencePieceTokenizer::PlainCut(std::string_view text, size_t limit) const {
  if (!by_line_ || limit == 0) return 0;
  const size_t line = text.rfind('\n', limit - 1);
  return line == text.npos ? 0 : line + 1;
}

namespace {

// Feeds the trainer every `stride`-th line of the files. Lines beyond kMaxLine are cut, at a word's end where
// there is one: the library skips long ones.
class LineIterator : public sentencepiece::SentenceIterator {
 public:
  LineIterator(FileSystem& fs, std::span<const std::string> paths, uint64_t stride)
      : fs_(fs), paths_(paths), stride_(stride) {
    ReadLine();
  }

  bool done() const override { return done_; }
  void Next() override {
    for (uint64_t i = 0; i < stride_ && !done_; ++i) ReadLine();
  }
  const std::string& value() const override { return line_; }
  sentencepiece::util::Status status() const override { return {}; }

 private:
  static constexpr size_t kMaxLine = 4096, kPiece = 1 << 20;

  // The next line that is not empty, or done_.
  void ReadLine() {
    do {
      while (buffer_.find('\n', begin_) == buffer_.npos && buffer_.size() - begin_ <= kMaxLine &&
             ReadMore()) {
      }
      if (begin_ == buffer_.size()) {
        done_ = true;
        return;
      }
      const std::string_view rest = std::string_view(buffer_).substr(begin_);
      size_t end = std::min(rest.find('\n'), rest.size());
      const bool whole = end <= kMaxLine;
      if (!whole) {
        const size_t cut = LastWordEnd(rest, kMaxLine);
        end = cut > 0 ? cut : kMaxLine;
      }
      line_ = rest.substr(0, end);
      begin_ = std::min(buffer_.size(), begin_ + end + (whole ? 1 : 0));
    } while (line_.empty());
  }

  // False when nothing more follows in this file; a file's end is a line's end.
  bool ReadMore() {
    buffer_.erase(0, begin_);
    begin_ = 0;
    while (!file_ || offset_ == size_) {
      if (file_ && !buffer_.empty()) return false;
      if (next_path_ == paths_.size()) return false;
      file_ = fs_.OpenForRead(paths_[next_path_++]);
      offset_ = 0;
      size_ = file_->Size();
    }
    const size_t kept = buffer_.size(), read = std::min<uint64_t>(kPiece, size_ - offset_);
    buffer_.resize(kept + read);
    file_->ReadAt(offset_, buffer_.data() + kept, read);
    offset_ += read;
    return true;
  }

  FileSystem& fs_;
  std::span<const std::string> paths_;
  uint64_t stride_;
  size_t next_path_ = 0;
  std::unique_ptr<File> file_;
  uint64_t offset_ = 0, size_ = 0;
  std::string buffer_;
  size_t begin_ = 0;
  std::string line_;
  bool done_ = false;
};

}  // namespace

void TrainSentencePiece(FileSystem& fs, std::span<const std::string> texts,
                        const SentencePieceTraining& training, const std::string& out) {
  if (training.model_type != "bpe" && training.model_type != "unigram") {
    throw ConfigError(StrCat("SentencePiece model type \"", training.model_type, "\""), "use bpe or unigram");
  }
  uint64_t bytes = 0;
  for (const std::string& path : texts) bytes += fs.OpenForRead(path)->Size();
  LineIterator lines(fs, texts, bytes / std::max<uint64_t>(training.max_bytes, 1) + 1);
  if (lines.done()) throw DataError("there is no text to train a vocabulary on");

  std::string model;
  const auto status =
      sentencepiece::SentencePieceTrainer::Train({{"model_type", training.model_type},
                                                  {"vocab_size", std::to_string(training.vocab_size)},
                                                  {"byte_fallback", "true"},
                                                  {"normalization_rule_name", "identity"},
                                                  {"add_dummy_prefix", "false"},
                                                  {"remove_extra_whitespaces", "false"},
                                                  {"allow_whitespace_only_pieces", "true"},
                                                  {"num_threads", "1"},  // its sums depend on it
                                                  {"minloglevel", "2"}},
                                                 &lines, &model);
  if (!status.ok()) {
    throw ConfigError(
        StrCat("SentencePiece cannot train a ", training.model_type, " vocabulary of ", training.vocab_size,
               " on ", bytes, " bytes of text: ", status.ToString()),
        "the vocabulary must hold 259 fixed tokens and every frequent character, and not more pieces "
        "than the text offers");
  }
  WriteFileAtomically(fs, out, model);
}

std::unique_ptr<Tokenizer> ParseLlama2cTokenizer(std::string_view content, const std::string& where) {
  size_t at = 0;
  const auto read = [&](auto* value) {
    if (content.size() - at < sizeof *value) {
      throw DataError(StrCat(where, ": ends within a token, at byte ", content.size()),
                      "the file is truncated");
    }
    std::memcpy(value, content.data() + at, sizeof *value);
    at += sizeof *value;
  };
  int32_t longest = 0;
  read(&longest);
  std::vector<Piece> pieces;
  while (at < content.size()) {
    Piece piece;
    int32_t length = 0;
    read(&piece.score);
    read(&length);
    if (length < 0 || length > longest || static_cast<size_t>(length) > content.size() - at) {
      throw DataError(
          StrCat(where, ": token ", pieces.size(), " at byte ", at, " is said to have ", length, " bytes"),
          "not a tokenizer.bin of llama2.c, or a damaged one");
    }
    const size_t id = pieces.size();
    piece.type = id == 0    ? Piece::Type::kUnknown
                 : id < 3   ? Piece::Type::kControl
                 : id < 259 ? Piece::Type::kByte
                            : Piece::Type::kNormal;
    if (id < 3) {
      // llama2.c stores these for printing, "\n<s>\n".
      piece.text = id == 0 ? "<unk>" : id == 1 ? "<s>" : "</s>";
    } else {
      for (char c : content.substr(at, length))
        piece.text += c == ' ' ? std::string("\u2581") : std::string(1, c);
    }
    at += length;
    pieces.push_back(std::move(piece));
  }
  return std::make_unique<SentencePieceTokenizer>(WriteSentencePieceModel(pieces), where);
}

}  // namespace strata
