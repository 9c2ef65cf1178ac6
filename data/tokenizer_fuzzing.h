// What fuzz targets of tokenizers try on one that opened. Threading: one thread.
#pragma once

#include "data/tokenizer.h"
#include "tests/fuzz.h"

namespace strata::testing {

/// Encodes text of many kinds; ids lie in the vocabulary; saving and loading gives the same tokenizer.
inline void TryTokenizer(const Tokenizer& tokenizer) {
  constexpr std::string_view kText =
      "Hello, world's  end!\n\t123 \xC3\xA9t\xC3\xA9 \xE6\xBC\xA2\xE5\xAD\x97 \xF0\x9F\x98\x80 <s> [SEP] "
      "<|endoftext|> \xFF\xC0 tail   ";
  for (const bool allow_special : {false, true}) {
    AllowError([&] {
      const std::vector<int32_t> ids = tokenizer.Encode(kText, {allow_special});
      for (int32_t id : ids) STRATA_CHECK(id >= 0 && id < tokenizer.vocab_size()) << id;
      tokenizer.Decode(ids);
    });
  }
  for (size_t limit = 0; limit < kText.size(); limit += 7)
    STRATA_CHECK(tokenizer.SafeCut(kText, limit) <= limit);
  const std::string saved = tokenizer.Save();
  STRATA_CHECK(LoadTokenizer(saved, "saved")->Save() == saved);
}

}  // namespace strata::testing
