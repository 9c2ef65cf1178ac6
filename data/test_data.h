// Files that tests of data/ read. Threading: one test at a time.
#pragma once

#include <catch2/catch.hpp>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "data/symbol_tokenizer.h"
#include "data/token_file.h"
#include "runtime/base/file_system.h"
#include "runtime/base/testing.h"

namespace strata::testing {

/// The path of a third-party file in the folder STRATA_TEST_DATA; where it is absent, nothing, and a warning
/// that says what to fetch.
inline std::optional<std::string> TestData(const std::string& name, const std::string& fetch) {
  const char* folder = std::getenv("STRATA_TEST_DATA");
  const std::string path = JoinPath(folder != nullptr ? folder : "../shared/data", name);
  if (PosixFileSystem().Exists(path)) return path;
  WARN("skipped: " << path << " is absent; " << fetch);
  return std::nullopt;
}

/// A file with this content, without waiting for the disk.
inline void PutFile(const std::string& path, const std::string& content) {
  PosixFileSystem().Create(path)->WriteAt(0, content.data(), content.size());
}

/// A token file whose ids count from `first` on, below 4096, in documents of the given lengths.
inline std::shared_ptr<const TokenFile> CountingFile(const std::vector<int>& documents, int32_t first = 0) {
  const TemporaryFolder folder;
  const std::string path = folder.path() + "/t.bin";
  std::vector<char32_t> symbols(4096);
  std::iota(symbols.begin(), symbols.end(), U' ');
  const CharTokenizer tokenizer(symbols);
  TokenFileWriter writer(PosixFileSystem(), path, tokenizer);
  for (int length : documents) {
    for (int i = 0; i < length; ++i) writer.Append(std::vector<int32_t>{first++});
    writer.EndDocument();
  }
  writer.Finish();
  return TokenFile::Open(PosixFileSystem(), path);
}

/// Text of many kinds of characters, and with `invalid` some bytes that are not UTF-8.
inline std::string RandomText(std::mt19937& random, size_t parts, bool invalid) {
  static const std::vector<std::string> kParts = {" ",
                                                  "  ",
                                                  "\n",
                                                  "\r\n",
                                                  "\t",
                                                  "\v",
                                                  "\f",
                                                  "\u00a0",
                                                  "\u180e",
                                                  "\u2003",
                                                  "\u3000",
                                                  "\u0085",
                                                  "a",
                                                  "The",
                                                  "xyz",
                                                  "I'm",
                                                  "'ll",
                                                  "'s",
                                                  "'",
                                                  "don't",
                                                  "\u00e9",
                                                  "na\u00efve",
                                                  "\u0416\u0434",
                                                  "\u6f22\u5b57",
                                                  "\u0915\u093f",
                                                  "\u0301",
                                                  "0",
                                                  "42",
                                                  "\u00bd",
                                                  "\u0664",
                                                  "\u2167",
                                                  ".",
                                                  "...",
                                                  "!?",
                                                  "--",
                                                  "_",
                                                  "\u2014",
                                                  "\u201c",
                                                  "\U0001F600",
                                                  "\U000323AF",
                                                  "\U00010D41",
                                                  "\u200d",
                                                  "\u0001",
                                                  "\u007f",
                                                  "<|endoftext|>",
                                                  "[SEP]"};
  static const std::vector<std::string> kInvalid = {"\x80", "\xC3(",        "\xED\xA0\x80",
                                                    "\xFF", "\xF0\x9F\x98", "\xC0\xAF"};
  std::string text;
  for (size_t i = 0; i < parts; ++i) {
    if (invalid && random() % 12 == 0) {
      text += kInvalid[random() % kInvalid.size()];
    } else {
      text += kParts[random() % kParts.size()];
    }
  }
  return text;
}

/// `bytes` with a random fault: some bits flipped, an end cut off, a stretch repeated or taken out.
inline std::string Corrupt(std::mt19937& random, std::string bytes) {
  const auto place = [&] { return random() % (bytes.size() + 1); };
  switch (random() % 4) {
    case 0:
      bytes.resize(place());
      break;
    case 1: {
      const size_t begin = place();
      bytes.erase(begin, random() % 16);
      break;
    }
    case 2: {
      const size_t begin = place();
      bytes.insert(place(), bytes.substr(begin, random() % 64));
      break;
    }
    default:
      for (size_t i = 0, n = 1 + random() % 8; i < n && !bytes.empty(); ++i) {
        bytes[random() % bytes.size()] ^= static_cast<char>(1 << random() % 8);
      }
  }
  return bytes;
}

}  // namespace strata::testing
