// Any lines as the words of a command, taken in every way that commands take them.
#include "tests/fuzz.h"
#include "tools/arguments.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace strata;
  const std::vector<std::string> words = testing::Parts(testing::AsText(data, size), "\n");
  testing::AllowError([&] {
    try {
      Arguments arguments(words, "usage");
      arguments.Flag("flag");
      arguments.OptionalValue("resume");
      arguments.Option("out");
      arguments.Integer("ranks");
      arguments.Number("rate");
      arguments.Positional("FILE");
      // Nothing is lost and nothing is invented.
      const std::vector<std::string> rest = arguments.Rest();
      STRATA_CHECK(rest.size() < words.size());
      arguments.Finish();
    } catch (const HelpRequested& help) {
      STRATA_CHECK(help.text == "usage");
    }
  });
  return 0;
}
