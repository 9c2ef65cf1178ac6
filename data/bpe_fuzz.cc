// Any bytes as a tokenizer.json, or as a vocab.json with a merges.txt.
#include "data/bpe_tokenizer.h"
#include "data/tokenizer_fuzzing.h"
#include "runtime/base/memory_file_system.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace strata;
  const std::vector<std::string> parts = testing::Parts(testing::AsText(data, size));
  MemoryFileSystem fs(parts.size() == 1 ? std::map<std::string, std::string>{{"f/tokenizer.json", parts[0]}}
                                        : std::map<std::string, std::string>{{"f/vocab.json", parts[0]},
                                                                             {"f/merges.txt", parts[1]}});
  testing::AllowError([&] { testing::TryTokenizer(*OpenTokenizer(fs, "gpt2:f")); });
  return 0;
}
