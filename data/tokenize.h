// From text files to token files: on several threads, in bounded memory, and only once.
//
// A document's text is cut into pieces where the tokenizer says that a cut changes nothing
// (Tokenizer::SafeCut), pieces are encoded on all threads and written in order: the result is the same for
// any number of threads. A document in which there is no such place (some SentencePiece models, foreign
// pre-tokenizers) is read and encoded as a whole.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "data/token_file.h"
#include "runtime/base/thread_pool.h"

namespace strata {

struct TokenizeOptions {
  /// What stands between documents in a text, itself no part of either; "" makes each file one document.
  std::string separator = {};
  /// The tokenizer's end-of-document token after each document, where it has one.
  bool append_eos = true;
  bool allow_special = false;  // as in EncodeOptions
  /// Called now and then with the bytes read so far and those of all texts; may be empty.
  std::function<void(uint64_t done, uint64_t total)> progress = {};
};

/// Encodes `texts`, in this order, into `writer`; the caller finishes it. Throws IoError, and DataError
/// naming text and byte where the tokenizer cannot encode.
void TokenizeFiles(FileSystem& fs, const Tokenizer& tokenizer, std::span<const std::string> texts,
                   const TokenizeOptions& options, ThreadPool& pool, TokenFileWriter& writer);

/// The path of a token file with the tokens of `text` in `cache_dir`, written unless a sound one is there.
/// Its name holds hashes of the text's content, the tokenizer and the options, so that a changed text or
/// tokenizer gets a file of its own. Callers at the same time are safe: each writes a file and gives it the
/// name.
std::string TokenizeToCache(FileSystem& fs, const Tokenizer& tokenizer, const std::string& text,
                            const TokenizeOptions& options, const std::string& cache_dir, ThreadPool& pool);

}  // namespace strata
