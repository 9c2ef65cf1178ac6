// Strict YAML: sections of keys, each bound to a variable.
//
// One description, a list of YamlSections, serves for reading, for writing, and for the reference that people
// read. Reading reports every fault at once: unknown and duplicate keys with the nearest known one, wrong
// types and values out of range, each with its place. Variables are set in the order of the description,
// wherever their keys stand, so that a key may set defaults of those described after it (YamlKey::stored).
//
// Ownership: a description refers to variables that outlive it. Threading: that of those variables.
#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace YAML {
class Node;
}

namespace strata {

/// A value that is refused for more than its type or range; the message goes without the place.
struct BadValue : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// How values of T are written. `read` gives nothing for what is no T of the wanted range: the reader then
/// says "expected `type`, found …"; it throws BadValue to say more.
template <typename T>
struct Codec {
  std::string type;  // "an integer ≥ 1"
  std::function<std::optional<T>(const YAML::Node&)> read;
  std::function<std::string(const T&)> write;
};

/// int, int64_t or uint64_t, from `min` to `max`. 1e9 is read, too.
template <std::integral T>
Codec<T> Integer(T min, T max = std::numeric_limits<T>::max());

struct Interval {
  double low = -std::numeric_limits<double>::infinity();
  double high = std::numeric_limits<double>::infinity();
  bool low_open = false, high_open = false;
};
/// A finite number.
Codec<double> Number(Interval interval);
Codec<bool> Flag();
/// 8GiB, 512MiB, 1048576.
Codec<int64_t> Bytes(int64_t at_least = 1, int64_t multiple_of = 1);
/// Any scalar but null.
Codec<std::string> Text();

template <typename T>
struct Choice {
  std::string_view name;
  T value;
  std::string_view absent = "";  // why this build refuses it; such a choice is not offered
};
/// One of a few words. A value that has no word is written as the first one.
template <typename T>
Codec<T> OneOf(std::vector<Choice<T>> choices);

/// `[a, b]`: as many as `count` of them, or any number.
template <typename T>
Codec<std::vector<T>> ListOf(Codec<T> item, std::optional<size_t> count = std::nullopt);

/// A value of `codec`, or `word`, which stands for `value`. "null" is also read as ~ and as nothing.
template <typename T>
Codec<T> OrWord(std::string word, T value, Codec<T> codec);
/// A value of `codec`, or null.
template <typename T>
Codec<std::optional<T>> OrNull(const Codec<T>& codec);

struct YamlKey {
  std::string name;
  std::string type;
  std::string doc;
  std::vector<std::string> aliases;  // what other programs call it: only suggestions are made of them
  std::function<bool(const YAML::Node&)> read;
  std::function<std::string()> write;
  /// Called once the key was given and read, before any key described after it is set. May throw BadValue.
  std::function<void()> stored = {};
};

/// "a.b" is the section b inside the section a; it is described after a, and before what is outside of a.
struct YamlSection {
  std::string name;
  std::string doc;
  std::vector<YamlKey> keys;
  std::vector<std::string> aliases = {};  // as YamlKey's
};

/// A key whose value `set` takes and `get` gives.
template <typename T>
YamlKey BindTo(std::string name, Codec<T> codec, std::function<void(T)> set, std::function<T()> get,
               std::string doc, std::vector<std::string> aliases = {});
/// A key whose value is `variable`.
template <typename T>
YamlKey Bind(std::string name, T& variable, Codec<T> codec, std::string doc,
             std::vector<std::string> aliases = {}) {
  return BindTo<T>(
      std::move(name), std::move(codec), [&variable](T value) { variable = std::move(value); },
      [&variable] { return variable; }, std::move(doc), std::move(aliases));
}

/// Reads `text`, the content of the file `name`, then `overrides` ("section.key=value", the value in YAML, or
/// "section={key: value}"; the last of equal keys counts). Throws ConfigError, a line for each fault;
/// variables may then be set in part.
void ReadYaml(const std::vector<YamlSection>& sections, const std::string& text, const std::string& name,
              const std::vector<std::string>& overrides);
/// Every key, as ReadYaml reads it back to the same values.
std::string WriteYaml(const std::vector<YamlSection>& sections);
/// Markdown: a table for each section, with the present values as defaults.
std::string YamlReference(const std::vector<YamlSection>& sections);

/// The candidate that `name` was probably meant to be, or empty: the fewest insertions, deletions and
/// replacements of characters, and no more than half of the name.
std::string Nearest(std::string_view name, const std::vector<std::string>& candidates);

namespace internal {

// The text of a scalar that is not null; `plain`: and not in quotes.
std::optional<std::string> ScalarText(const YAML::Node& node, bool plain);
bool IsWord(const YAML::Node& node, std::string_view word);
// Hands every item of a list to `item`; false when it is no list, not of `count` items, or `item` says so.
bool ReadList(const YAML::Node& node, std::optional<size_t> count,
              const std::function<bool(const YAML::Node&)>& item);

}  // namespace internal

template <typename T>
Codec<T> OneOf(std::vector<Choice<T>> choices) {
  std::vector<std::string_view> offered;
  for (const Choice<T>& choice : choices) {
    if (choice.absent.empty()) offered.push_back(choice.name);
  }
  std::string type;
  for (size_t i = 0; i < offered.size(); ++i) {
    type += std::string(i == 0 ? "" : i + 1 == offered.size() ? " or " : ", ") + std::string(offered[i]);
  }
  return {type,
          [choices](const YAML::Node& node) -> std::optional<T> {
            for (const Choice<T>& choice : choices) {
              if (!internal::IsWord(node, choice.name)) continue;
              if (choice.absent.empty()) return choice.value;
              throw BadValue(std::string(choice.name) + ": " + std::string(choice.absent));
            }
            return std::nullopt;
          },
          [choices](const T& value) {
            for (const Choice<T>& choice : choices) {
              if (choice.value == value) return std::string(choice.name);
            }
            return std::string(choices.front().name);
          }};
}

template <typename T>
Codec<std::vector<T>> ListOf(Codec<T> item, std::optional<size_t> count) {
  std::string type = "a list of " + (count ? std::to_string(*count) + ", each " : "") + item.type;
  return {std::move(type),
          [item, count](const YAML::Node& node) -> std::optional<std::vector<T>> {
            std::vector<T> values;
            const bool read = internal::ReadList(node, count, [&](const YAML::Node& each) {
              std::optional<T> value = item.read(each);
              if (value) values.push_back(std::move(*value));
              return value.has_value();
            });
            return read ? std::optional(std::move(values)) : std::nullopt;
          },
          [item](const std::vector<T>& values) {
            std::string text = "[";
            for (const T& value : values) text += (text.size() > 1 ? ", " : "") + item.write(value);
            return text + "]";
          }};
}

template <typename T>
Codec<T> OrWord(std::string word, T value, Codec<T> codec) {
  return {word + " or " + codec.type,
          [=](const YAML::Node& node) {
            return internal::IsWord(node, word) ? std::optional<T>(value) : codec.read(node);
          },
          [=](const T& written) { return written == value ? word : codec.write(written); }};
}

template <typename T>
Codec<std::optional<T>> OrNull(const Codec<T>& codec) {
  return OrWord<std::optional<T>>("null", std::nullopt,
                                  {codec.type,
                                   [codec](const YAML::Node& node) -> std::optional<std::optional<T>> {
                                     std::optional<T> value = codec.read(node);
                                     if (!value) return std::nullopt;
                                     return std::optional<std::optional<T>>(std::in_place, std::move(value));
                                   },
                                   [codec](const std::optional<T>& value) { return codec.write(*value); }});
}

template <typename T>
YamlKey BindTo(std::string name, Codec<T> codec, std::function<void(T)> set, std::function<T()> get,
               std::string doc, std::vector<std::string> aliases) {
  return {std::move(name),
          codec.type,
          std::move(doc),
          std::move(aliases),
          [codec, set = std::move(set)](const YAML::Node& node) {
            std::optional<T> value = codec.read(node);
            if (value) set(std::move(*value));
            return value.has_value();
          },
          [codec, get = std::move(get)] { return codec.write(get()); }};
}

}  // namespace strata
