#include "models/presets.h"

#include <catch2/catch.hpp>
#include <cmath>
#include <map>
#include <string>

namespace strata {
namespace {

int64_t Parameters(std::string_view name) {
  const ModelPreset* preset = FindModelPreset(name);
  REQUIRE(preset != nullptr);
  TransformerConfig sizes = preset->sizes;
  if (sizes.vocab_size == 0) sizes.vocab_size = 65;
  sizes.Resolve();
  return sizes.NumParameters();
}

// The elements of the published weights; llama-15m's by hand: 32000·288 + 6 (4·288² + 3·288·768 + 2·288) +
// 288.
TEST_CASE("Presets of published weights have exactly their number of parameters") {
  const std::map<std::string, int64_t> published = {
      {"gpt2-124m", 124'439'808},     {"gpt2-355m", 354'823'168},     {"gpt2-774m", 774'030'080},
      {"gpt2-1558m", 1'557'611'200},  {"llama-15m", 15'191'712},      {"llama2-7b", 6'738'415'616},
      {"llama2-13b", 13'015'864'320}, {"llama2-70b", 68'976'648'192}, {"llama3-8b", 8'030'261'248},
      {"bert-base", 109'514'298},     {"bert-large", 335'174'458},
  };
  for (const auto& [name, count] : published) {
    CAPTURE(name);
    CHECK(Parameters(name) == count);
  }
}

TEST_CASE("Presets named by a size have about that many parameters") {
  const std::map<std::string, double> nominal = {
      {"gpt3-125m", 125e6}, {"gpt3-350m", 350e6}, {"gpt3-760m", 760e6},  {"gpt3-1.3b", 1.3e9},
      {"gpt3-2.7b", 2.7e9}, {"gpt3-6.7b", 6.7e9}, {"gpt3-13b", 13e9},    {"gpt3-175b", 175e9},
      {"llama-42m", 42e6},  {"gpt-1t", 1.008e12}, {"mtnlg-530b", 530e9},
  };
  for (const auto& [name, count] : nominal) {
    CAPTURE(name);
    CHECK(static_cast<double>(Parameters(name)) == Approx(count).epsilon(0.02));
  }
}

// Their table gives billions with one decimal.
TEST_CASE("Presets of Narayanan et al. have the parameters of their table") {
  const std::map<std::string, double> published = {
      {"gpt-1.7b", 1.7}, {"gpt-3.6b", 3.6},   {"gpt-7.5b", 7.5},   {"gpt-18b", 18.4},  {"gpt-39b", 39.1},
      {"gpt-76b", 76.1}, {"gpt-146b", 145.6}, {"gpt-310b", 310.1}, {"gpt-1t", 1008.0},
  };
  for (const auto& [name, billions] : published) {
    CAPTURE(name);
    CHECK(std::abs(static_cast<double>(Parameters(name)) / 1e9 - billions) <= 0.05);
  }
}

TEST_CASE("Every preset resolves, and names are distinct") {
  for (const ModelPreset& preset : ModelPresets()) {
    CAPTURE(preset.name);
    CHECK(Parameters(preset.name) > 0);
    CHECK(FindModelPreset(preset.name) == &preset);
    CHECK_FALSE(preset.source.empty());
  }
  CHECK(FindModelPreset("gpt2-125m") == nullptr);
}

}  // namespace
}  // namespace strata
