// Any bytes as a configuration; further parts of the input are overrides of the command line.
#include "tests/fuzz.h"
#include "tools/config.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace strata;
  const std::vector<std::string> parts = testing::Parts(testing::AsText(data, size));
  testing::AllowError([&] {
    RunConfig config = RunConfig::Parse(parts[0], "fuzz.yaml", {parts.begin() + 1, parts.end()});
    const std::string yaml = config.ToYaml();
    STRATA_CHECK(RunConfig::Parse(yaml, "written.yaml", {}).ToYaml() == yaml) << yaml;
    config.Resolve(4, 300);
  });
  return 0;
}
