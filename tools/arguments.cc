#include "tools/arguments.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "runtime/base/error.h"

namespace strata {

Arguments::Arguments(std::vector<std::string> words, std::string usage)
    : words_(std::move(words)), usage_(std::move(usage)) {
  if (Flag("help") || std::find(words_.begin(), words_.end(), "-h") != words_.end())
    throw HelpRequested{usage_};
}

void Arguments::Fail(const std::string& what) const { throw UsageError(what, usage_); }

bool Arguments::Flag(const std::string& name) {
  const auto it = std::find(words_.begin(), words_.end(), "--" + name);
  if (it == words_.end()) return false;
  words_.erase(it);
  return true;
}

std::optional<std::string> Arguments::OptionalValue(const std::string& name) {
  if (Flag(name)) return "";
  const std::string prefix = "--" + name + "=";
  const auto it =
      std::find_if(words_.begin(), words_.end(), [&](const std::string& w) { return w.starts_with(prefix); });
  if (it == words_.end()) return std::nullopt;
  std::string value = it->substr(prefix.size());
  words_.erase(it);
  return value;
}

std::optional<std::string> Arguments::Option(const std::string& name) {
  const auto it = std::find(words_.begin(), words_.end(), "--" + name);
  if (it == words_.end()) return OptionalValue(name);
  if (it + 1 == words_.end() || (it + 1)->starts_with("--")) Fail("--" + name + " needs a value");
  std::string value = *(it + 1);
  words_.erase(it, it + 2);
  return value;
}

std::optional<int64_t> Arguments::Integer(const std::string& name, int64_t low, int64_t high) {
  const auto text = Option(name);
  if (!text) return std::nullopt;
  int64_t value = 0;
  const char* end = text->data() + text->size();
  const auto parsed = std::from_chars(text->data(), end, value);
  if (parsed.ec != std::errc() || parsed.ptr != end || value < low || value > high) {
    Fail(StrCat("--", name, " wants a whole number from ", low, " to ", high, ", not '", *text, "'"));
  }
  return value;
}

std::optional<double> Arguments::Number(const std::string& name) {
  const auto text = Option(name);
  if (!text) return std::nullopt;
  double value = 0;
  const char* end = text->data() + text->size();
  const auto parsed = std::from_chars(text->data(), end, value);
  if (parsed.ec != std::errc() || parsed.ptr != end || !std::isfinite(value)) {
    Fail(StrCat("--", name, " wants a number, not '", *text, "'"));
  }
  return value;
}

std::string Arguments::Positional(const std::string& what) {
  const auto it =
      std::find_if(words_.begin(), words_.end(), [](const std::string& w) { return !w.starts_with("--"); });
  if (it == words_.end()) Fail("missing " + what);
  std::string value = *it;
  words_.erase(it);
  return value;
}

std::vector<std::string> Arguments::Rest() {
  for (const std::string& word : words_) {
    if (word.starts_with("--")) Fail("unknown option " + word);
  }
  return std::exchange(words_, {});
}

void Arguments::Finish() {
  if (!words_.empty())
    Fail((words_.front().starts_with("--") ? "unknown option " : "unexpected ") + words_.front());
}

}  // namespace strata
