// bench tokenize: GPT-2's byte-level BPE on one thread, beside the rate at which bytes become ids at all.
#include "data/tokenizer.h"
#include "runtime/base/device.h"
#include "tools/bench/bench.h"

namespace strata {

void BenchTokenize(BenchSetup& setup) {
  const std::string folder = setup.arguments.Positional("FOLDER"), path = setup.arguments.Positional("TEXT");
  setup.arguments.Finish();
  FileSystem& fs = PosixFileSystem();
  const auto tokenizer = OpenTokenizer(fs, "gpt2:" + folder);
  const std::string text = ReadFile(fs, path);
  BenchReport report("tokenize", 1, NewCpuDevice(1)->description(),
                     "copying the text byte by byte into its ids' buffer");
  size_t ids = 0;
  double copy = 0;
  std::vector<int32_t> bytes(text.size());
  const double best = BestSeconds(
      5, [&] { ids = tokenizer->Encode(text).size(); },
      [&] {
        copy = std::max(copy, static_cast<double>(text.size()) / BestSeconds(1, [&] {
                                for (size_t i = 0; i < text.size(); ++i)
                                  bytes[i] = static_cast<uint8_t>(text[i]);
                              }));
      });
  report.Add(
      {"GPT-2 BPE, " + path, static_cast<double>(text.size()) / best / 1e6, "MB/s", copy / 1e6,
       StrCat(ids, " tokens, ", static_cast<double>(text.size()) / static_cast<double>(ids), " bytes each")});
  report.WriteJson(setup.json);
}

}  // namespace strata
