// Any bytes as a checkpoint's manifest.
#include "tools/manifest.h"

#include "tests/fuzz.h"

namespace strata {
namespace {

void ReadManifest(const std::string& text) {
  testing::AllowError([&] {
    const Manifest manifest = Manifest::FromJson(text, "manifest.json");
    for (const SavedSlice& slice : manifest.slices) {
      const Shape& whole = manifest.tensors.at(slice.parameter);
      STRATA_CHECK(slice.count >= 0 && slice.part.FitsInto(whole));
      const int64_t local = slice.count > 0 ? slice.part.Find(whole, slice.begin).local : 0;
      STRATA_CHECK(local >= 0 && slice.count <= slice.part.NumElements(whole) - local);
    }
    manifest.ToJson();
  });
}

}  // namespace
}  // namespace strata

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace strata;
  const std::string text(testing::AsText(data, size));
  ReadManifest(text);
  // With a checksum that matches, so that what it guards is reached.
  auto json = nlohmann::ordered_json::parse(
      text, [](int depth, auto, auto&) { return depth < 16; }, false);
  if (json.is_object()) {
    json.erase("checksum");
    json["checksum"] = Checksum(json.dump());
    ReadManifest(json.dump());
  }
  return 0;
}
