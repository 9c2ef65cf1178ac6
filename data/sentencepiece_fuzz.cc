// Any bytes as a SentencePiece model, and as llama2.c's tokenizer.bin.
#include "data/sentencepiece_tokenizer.h"
#include "data/tokenizer_fuzzing.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace strata;
  const std::string_view bytes = testing::AsText(data, size);
  testing::AllowError([&] { testing::TryTokenizer(SentencePieceTokenizer(std::string(bytes), "m.model")); });
  testing::AllowError([&] { testing::TryTokenizer(*ParseLlama2cTokenizer(bytes, "tokenizer.bin")); });
  return 0;
}
