// Any bytes as a WordPiece vocab.txt.
#include "data/tokenizer_fuzzing.h"
#include "data/wordpiece_tokenizer.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace strata;
  testing::AllowError(
      [&] { testing::TryTokenizer(WordPieceTokenizer(testing::AsText(data, size), "vocab.txt")); });
  return 0;
}
