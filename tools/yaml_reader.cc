#include "tools/yaml_reader.h"

#include <spdlog/fmt/fmt.h>
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <numeric>
#include <sstream>
#include <tuple>

#include "runtime/base/error.h"
#include "runtime/base/units.h"

namespace strata {
namespace {

// Text of the user's, fit for one line of a message.
std::string Printable(std::string_view text) {
  constexpr size_t kLongest = 60;
  std::string line(text.substr(0, kLongest));
  for (char& c : line) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  }
  return line + (text.size() > kLongest ? "..." : "");
}

bool IsQuoted(const YAML::Node& scalar) { return scalar.Tag() == "!"; }

std::string Describe(const YAML::Node& node) {
  switch (node.Type()) {
    case YAML::NodeType::Scalar:
      return fmt::format("{}'{}'", IsQuoted(node) ? "the text " : "", Printable(node.Scalar()));
    case YAML::NodeType::Sequence:
      return fmt::format("a list of {}", node.size());
    case YAML::NodeType::Map:
      return "a mapping";
    default:
      return "null";
  }
}

// The whole of `text` as a number; nothing when it is none or does not fit.
template <typename T>
std::optional<T> ParseNumber(std::string_view text) {
  if (text.starts_with('+')) text.remove_prefix(1);
  T value{};
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), value);
  if (parsed.ec != std::errc() || parsed.ptr != text.data() + text.size()) return std::nullopt;
  return value;
}

// 1500, or 1.5e3.
template <typename T>
std::optional<T> ParseInteger(std::string_view text) {
  if (const auto whole = ParseNumber<T>(text)) return whole;
  if (text.find_first_of("eE") == std::string_view::npos) return std::nullopt;
  const auto value = ParseNumber<double>(text);
  // Up to 2^53 every integer is a double.
  if (!value || std::abs(*value) > 0x1p53 || std::trunc(*value) != *value) return std::nullopt;
  if (!std::in_range<T>(static_cast<int64_t>(*value))) return std::nullopt;
  return static_cast<T>(*value);
}

size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = row[0]++;
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, diagonal + 1});
    }
  }
  return row.back();
}

// Where each document of a text begins.
class DocumentStarts : public YAML::EventHandler {
 public:
  explicit DocumentStarts(const std::string& text) {
    std::istringstream in(text);
    YAML::Parser parser(in);
    // Two at most: at a stray comma yaml-cpp finds empty ones without end.
    while (marks.size() < 2 && parser.HandleNextDocument(*this)) {
    }
  }
  std::vector<YAML::Mark> marks;

 private:
  void OnDocumentStart(const YAML::Mark& mark) override { marks.push_back(mark); }
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark&, YAML::anchor_t) override {}
  void OnAlias(const YAML::Mark&, YAML::anchor_t) override {}
  void OnScalar(const YAML::Mark&, const std::string&, YAML::anchor_t, const std::string&) override {}
  void OnSequenceStart(const YAML::Mark&, const std::string&, YAML::anchor_t,
                       YAML::EmitterStyle::value) override {}
  void OnSequenceEnd() override {}
  void OnMapStart(const YAML::Mark&, const std::string&, YAML::anchor_t, YAML::EmitterStyle::value) override {
  }
  void OnMapEnd() override {}
};

// Reads one file and its overrides; collects faults, and values by key until all are known.
class Reader {
 public:
  explicit Reader(const std::vector<YamlSection>& sections) : sections_(sections) {}

  void ReadFile(const std::string& text, const std::string& name) {
    source_ = {0, name, true};
    if (const auto document = ParseDocument(text)) ReadDocument(*document);
  }

  void ReadOverride(const std::string& text) {
    source_ = {source_.number + 1, fmt::format("command line: {}", Printable(text)), false};
    const size_t equals = text.find('=');
    if (equals == std::string::npos) {
      Refuse({}, "no '='; write section.key=value");
      return;
    }
    const std::string path = text.substr(0, equals);
    const auto value = ParseDocument(text.substr(equals + 1));
    if (const YamlSection* whole = FindSection(path)) {
      if (value) ReadSection(*whole, *value, {});
      return;
    }
    const size_t dot = path.rfind('.');
    const YamlSection* section = dot == std::string::npos ? nullptr : FindSection(path.substr(0, dot));
    if (!section) {
      Refuse({}, fmt::format("unknown key '{}'{}", Printable(path), SuggestPath(path)));
      return;
    }
    const std::string name = path.substr(dot + 1);
    const YamlKey* key = FindKey(*section, name);
    if (!key) {
      RefuseKey({}, *section, name);
    } else if (value) {
      given_[key].push_back({*value, PlaceOf({})});
    }
  }

  // Sets the variables and throws what was found.
  void Finish() {
    for (const YamlSection& section : sections_) {
      for (const YamlKey& key : section.keys) Store(section, key);
    }
    if (faults_.empty()) return;
    std::stable_sort(faults_.begin(), faults_.end(), [](const Fault& a, const Fault& b) {
      return std::tie(a.place.source, a.place.line, a.place.column) <
             std::tie(b.place.source, b.place.line, b.place.column);
    });
    std::string what;
    for (const Fault& fault : faults_) what += (what.empty() ? "" : "\n") + fault.text;
    throw ConfigError(what,
                      fmt::format("mend {}; docs/configuration.md lists every key",
                                  faults_.size() == 1 ? std::string("this place")
                                                      : fmt::format("these {} places", faults_.size())));
  }

 private:
  // Where text comes from: the file, or the n-th override.
  struct Source {
    int number = 0;
    std::string name;
    bool has_lines = false;
  };
  struct Place {
    int source, line, column;
    std::string text;
  };
  struct Fault {
    Place place;
    std::string text;
  };
  struct Given {
    YAML::Node node;
    Place place;
  };

  Place PlaceOf(YAML::Mark mark) const {
    if (!source_.has_lines) return {source_.number, 0, 0, source_.name};
    if (mark.is_null()) mark = {};
    return {source_.number, mark.line, mark.column,
            fmt::format("{}:{}:{}", source_.name, mark.line + 1, mark.column + 1)};
  }
  void Refuse(YAML::Mark mark, const std::string& message) { RefuseAt(PlaceOf(mark), message); }
  void RefuseAt(const Place& place, const std::string& message) {
    faults_.push_back({place, fmt::format("{}: {}", place.text, message)});
  }
  void RefuseKey(YAML::Mark mark, const YamlSection& section, const std::string& name) {
    Refuse(mark,
           fmt::format("unknown key '{}' in {}{}", Printable(name), section.name, SuggestKey(section, name)));
  }

  // Nothing after a fault.
  std::optional<YAML::Node> ParseDocument(const std::string& text) {
    try {
      const DocumentStarts documents(text);
      if (documents.marks.size() <= 1) return YAML::Load(text);
      Refuse(documents.marks[1], "this is no part of what stands before it");
    } catch (const YAML::Exception& error) {
      Refuse(error.mark, fmt::format("this is no YAML: {}", Printable(error.msg)));
    }
    return std::nullopt;
  }

  // Calls `each` for every pair of a mapping whose key is a name not seen before in it.
  void ForEachPair(const YAML::Node& map, const char* kind,
                   const std::function<void(const std::string&, YAML::Mark, const YAML::Node&)>& each) {
    std::map<std::string, YAML::Mark> seen;
    for (const auto& pair : map) {
      const YAML::Mark mark = pair.first.Mark();
      if (!pair.first.IsScalar()) {
        Refuse(mark, fmt::format("expected the name of a {}, found {}", kind, Describe(pair.first)));
        continue;
      }
      const std::string name = pair.first.Scalar();
      const auto [first, fresh] = seen.emplace(name, mark);
      if (!fresh) {
        Refuse(mark, fmt::format("duplicate {} '{}'{}", kind, Printable(name),
                                 source_.has_lines ? fmt::format(", first on line {}", first->second.line + 1)
                                                   : std::string()));
        continue;
      }
      each(name, mark, pair.second);
    }
  }

  void ReadDocument(const YAML::Node& document) {
    if (document.IsNull()) return;
    if (!document.IsMap()) {
      Refuse(document.Mark(), fmt::format("expected sections, found {}", Describe(document)));
      return;
    }
    ForEachPair(
        document, "section", [this](const std::string& name, YAML::Mark mark, const YAML::Node& value) {
          if (const YamlSection* section = FindInside("", name)) {
            ReadSection(*section, value, mark);
          } else {
            Refuse(mark, fmt::format("unknown section '{}'{}", Printable(name), SuggestSection(name)));
          }
        });
  }

  void ReadSection(const YamlSection& section, const YAML::Node& node, YAML::Mark mark) {
    if (node.IsNull()) return;
    if (!node.IsMap()) {
      Refuse(mark, fmt::format("{}: expected keys, found {}", section.name, Describe(node)));
      return;
    }
    ForEachPair(node, "key", [&](const std::string& name, YAML::Mark at, const YAML::Node& value) {
      if (const YamlSection* inside = FindInside(section.name + ".", name)) {
        ReadSection(*inside, value, at);
      } else if (const YamlKey* key = FindKey(section, name)) {
        // The mark of an absent value is that of whatever follows.
        given_[key].push_back({value, PlaceOf(value.IsNull() ? at : value.Mark())});
      } else {
        RefuseKey(at, section, name);
      }
    });
  }

  void Store(const YamlSection& section, const YamlKey& key) {
    const auto given = given_.find(&key);
    if (given == given_.end()) return;
    const std::string label = section.name + "." + key.name + ": ";
    bool stored = false;
    for (const auto& [node, place] : given->second) {
      try {
        stored = key.read(node);
        if (!stored) RefuseAt(place, fmt::format("{}expected {}, found {}", label, key.type, Describe(node)));
      } catch (const BadValue& error) {
        stored = false;
        RefuseAt(place, label + error.what());
      }
    }
    if (!stored || !key.stored) return;
    try {
      key.stored();
    } catch (const BadValue& error) {
      RefuseAt(given->second.back().place, label + error.what());
    }
  }

  const YamlSection* FindSection(std::string_view name) const {
    for (const YamlSection& section : sections_) {
      if (section.name == name) return &section;
    }
    return nullptr;
  }
  // The section `name` that stands in the one whose full name and a dot are `outer`.
  const YamlSection* FindInside(const std::string& outer, const std::string& name) const {
    return name.find('.') == std::string::npos ? FindSection(outer + name) : nullptr;
  }
  static const YamlKey* FindKey(const YamlSection& section, std::string_view name) {
    for (const YamlKey& key : section.keys) {
      if (key.name == name) return &key;
    }
    return nullptr;
  }

  // Sections that stand directly in the one whose full name and a dot are `outer`.
  std::vector<const YamlSection*> SectionsIn(const std::string& outer) const {
    std::vector<const YamlSection*> found;
    for (const YamlSection& section : sections_) {
      if (section.name.starts_with(outer) && section.name.find('.', outer.size()) == std::string::npos) {
        found.push_back(&section);
      }
    }
    return found;
  }

  // Names a user may have meant, and how to write them.
  using Spellings = std::map<std::string, std::string>;
  static void AddKeys(Spellings& spellings, const YamlSection& section, const std::string& written,
                      const std::string& spelled) {
    for (const YamlKey& key : section.keys) {
      spellings.emplace(spelled + key.name, written + key.name);
      for (const std::string& alias : key.aliases) spellings.emplace(spelled + alias, written + key.name);
    }
  }
  static std::string NearestIn(const Spellings& spellings, std::string_view name) {
    std::vector<std::string> names;
    for (const auto& [spelled, written] : spellings) names.push_back(spelled);
    const std::string nearest = Nearest(name, names);
    return nearest.empty() ? "" : spellings.at(nearest);
  }
  static std::string DidYouMean(const std::string& written) {
    return fmt::format(" (did you mean '{}'?)", written);
  }
  // The full name of a key that is called just so in some section whose name begins with `outer`.
  std::string Elsewhere(const std::string& name, const std::string& outer = "") const {
    Spellings spellings;
    for (const YamlSection& section : sections_) {
      if (section.name.starts_with(outer)) AddKeys(spellings, section, section.name + ".", "");
    }
    const auto found = spellings.find(name);
    return found == spellings.end() ? "" : found->second;
  }
  // Whether `path` is the full name of a section or key.
  bool Exists(const std::string& path) const {
    if (FindSection(path)) return true;
    const size_t dot = path.rfind('.');
    const YamlSection* section = dot == std::string::npos ? nullptr : FindSection(path.substr(0, dot));
    return section && FindKey(*section, path.substr(dot + 1));
  }
  static constexpr char kOneLevelEach[] = "; in a file each name stands on a level of its own";

  std::string SuggestKey(const YamlSection& section, const std::string& name) const {
    Spellings own;
    AddKeys(own, section, "", "");
    // Another program's name of a key of this section; else this name in a section inside, or in another one;
    // else a near one.
    if (const auto alias = own.find(name); alias != own.end()) return DidYouMean(alias->second);
    const std::string inside = section.name + ".";
    if (Exists(inside + name)) return kOneLevelEach;
    for (const std::string& outer : {inside, std::string()}) {
      if (const std::string found = Elsewhere(name, outer); !found.empty()) return DidYouMean(found);
    }
    std::string known;
    for (const YamlKey& key : section.keys) known += (known.empty() ? "" : ", ") + key.name;
    for (const YamlSection* each : SectionsIn(inside)) {
      const std::string last = each->name.substr(inside.size());
      own.emplace(last, last);
      known += (known.empty() ? "" : ", ") + last;
    }
    if (const std::string nearest = NearestIn(own, name); !nearest.empty()) return DidYouMean(nearest);
    return fmt::format("; its keys are {}", known);
  }
  std::string SuggestSection(const std::string& name) const {
    if (Exists(name)) return kOneLevelEach;
    if (const std::string elsewhere = Elsewhere(name); !elsewhere.empty()) return DidYouMean(elsewhere);
    Spellings names;
    std::string known;
    for (const YamlSection* section : SectionsIn("")) {
      names.emplace(section->name, section->name);
      for (const std::string& alias : section->aliases) names.emplace(alias, section->name);
      known += (known.empty() ? "" : ", ") + section->name;
    }
    if (const std::string nearest = NearestIn(names, name); !nearest.empty()) return DidYouMean(nearest);
    return fmt::format("; the sections are {}", known);
  }
  std::string SuggestPath(const std::string& path) const {
    const std::string elsewhere = Elsewhere(path.substr(path.rfind('.') + 1));
    if (!elsewhere.empty()) return DidYouMean(elsewhere);
    Spellings paths;
    for (const YamlSection& section : sections_) {
      AddKeys(paths, section, section.name + ".", section.name + ".");
    }
    const std::string nearest = NearestIn(paths, path);
    return nearest.empty() ? SuggestSection(path.substr(0, path.find('.'))) : DidYouMean(nearest);
  }

  const std::vector<YamlSection>& sections_;
  Source source_;
  std::map<const YamlKey*, std::vector<Given>> given_;
  std::vector<Fault> faults_;
};

// 65536; 1e9 for a number of that many zeros.
template <std::integral T>
std::string FormatBound(T bound) {
  std::string text = fmt::format("{}", bound);
  const size_t zeros = text.size() - 1 - text.find_last_not_of('0');
  return zeros < 6 ? text : fmt::format("{}e{}", text.substr(0, text.size() - zeros), zeros);
}

// A double as the shortest text that reads back to it.
std::string FormatNumber(double value) { return fmt::format("{}", value); }

std::string IntervalText(const Interval& range) {
  const bool low = std::isfinite(range.low), high = std::isfinite(range.high);
  if (low && high) {
    return fmt::format("a number in {}{}, {}{}", range.low_open ? '(' : '[', range.low, range.high,
                       range.high_open ? ')' : ']');
  }
  if (low) return fmt::format("a number {} {}", range.low_open ? ">" : "≥", range.low);
  if (high) return fmt::format("a number {} {}", range.high_open ? "<" : "≤", range.high);
  return "a number";
}

// Text that other readers of YAML take for text, too, needs no quotes.
bool NeedsQuotes(std::string_view text) {
  static constexpr std::string_view kWords[] = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"};
  const auto letter = [](char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); };
  std::string lower(text);
  for (char& c : lower) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  if (text.empty() || std::find(std::begin(kWords), std::end(kWords), lower) != std::end(kWords)) return true;
  return !(letter(text[0]) || text[0] == '/') || !std::all_of(text.begin(), text.end(), [&](char c) {
    return letter(c) || (c >= '0' && c <= '9') || c == '/' || c == '.' || c == '_' || c == '-';
  });
}

}  // namespace

namespace internal {

std::optional<std::string> ScalarText(const YAML::Node& node, bool plain) {
  if (!node.IsScalar() || (plain && IsQuoted(node))) return std::nullopt;
  return node.Scalar();
}

bool IsWord(const YAML::Node& node, std::string_view word) {
  return node.IsNull() ? word == "null" : ScalarText(node, true) == word;
}

bool ReadList(const YAML::Node& node, std::optional<size_t> count,
              const std::function<bool(const YAML::Node&)>& item) {
  if (!node.IsSequence() || (count && node.size() != *count)) return false;
  return std::all_of(node.begin(), node.end(), [&](const auto& each) { return item(each); });
}

}  // namespace internal

template <std::integral T>
Codec<T> Integer(T min, T max) {
  const std::string type = max == std::numeric_limits<T>::max()
                               ? fmt::format("an integer ≥ {}", FormatBound(min))
                               : fmt::format("an integer from {} to {}", FormatBound(min), FormatBound(max));
  return {type,
          [=](const YAML::Node& node) -> std::optional<T> {
            const auto text = internal::ScalarText(node, true);
            const auto value = text ? ParseInteger<T>(*text) : std::nullopt;
            return value && *value >= min && *value <= max ? value : std::nullopt;
          },
          [](const T& value) { return fmt::format("{}", value); }};
}
template Codec<int> Integer(int, int);
template Codec<int64_t> Integer(int64_t, int64_t);
template Codec<uint64_t> Integer(uint64_t, uint64_t);

Codec<double> Number(Interval range) {
  return {IntervalText(range),
          [=](const YAML::Node& node) -> std::optional<double> {
            const auto text = internal::ScalarText(node, true);
            const auto value = text ? ParseNumber<double>(*text) : std::nullopt;
            if (!value || !std::isfinite(*value)) return std::nullopt;
            const bool above = range.low_open ? *value > range.low : *value >= range.low;
            const bool below = range.high_open ? *value < range.high : *value <= range.high;
            return above && below ? value : std::nullopt;
          },
          FormatNumber};
}

Codec<bool> Flag() { return OneOf<bool>({{"true", true}, {"false", false}}); }

Codec<int64_t> Bytes(int64_t at_least, int64_t multiple_of) {
  const auto format = [](const int64_t& bytes) {
    constexpr std::pair<const char*, int64_t> kUnits[] = {
        {"GiB", int64_t{1} << 30}, {"MiB", int64_t{1} << 20}, {"KiB", int64_t{1} << 10}};
    for (const auto& [unit, size] : kUnits) {
      if (bytes != 0 && bytes % size == 0) return fmt::format("{}{}", bytes / size, unit);
    }
    return fmt::format("{}", bytes);
  };
  std::string type = at_least == 0 ? "0, or bytes such as 8GiB" : "bytes such as 8GiB";
  if (multiple_of > 1) type += ", a multiple of " + format(multiple_of);
  return {std::move(type),
          [=](const YAML::Node& node) -> std::optional<int64_t> {
            const auto text = internal::ScalarText(node, true);
            const auto bytes = text ? ParseBytes(*text) : std::nullopt;
            return bytes && *bytes >= at_least && *bytes % multiple_of == 0 ? bytes : std::nullopt;
          },
          format};
}

Codec<std::string> Text() {
  return {"text", [](const YAML::Node& node) { return internal::ScalarText(node, false); },
          [](const std::string& text) {
            if (!NeedsQuotes(text)) return text;
            YAML::Emitter quoted;
            quoted << YAML::DoubleQuoted << text;
            return std::string(quoted.c_str());
          }};
}

std::string Nearest(std::string_view name, const std::vector<std::string>& candidates) {
  std::string nearest;
  size_t least = std::max<size_t>(1, name.size() / 2) + 1;
  for (const std::string& candidate : candidates) {
    const size_t distance = EditDistance(name, candidate);
    if (distance >= least) continue;
    least = distance;
    nearest = candidate;
  }
  return nearest;
}

void ReadYaml(const std::vector<YamlSection>& sections, const std::string& text, const std::string& name,
              const std::vector<std::string>& overrides) {
  Reader reader(sections);
  reader.ReadFile(text, name);
  for (const std::string& each : overrides) reader.ReadOverride(each);
  reader.Finish();
}

std::string WriteYaml(const std::vector<YamlSection>& sections) {
  std::string text;
  for (const YamlSection& section : sections) {
    const auto depth = static_cast<size_t>(std::count(section.name.begin(), section.name.end(), '.'));
    const std::string indent(2 * depth, ' ');
    text += fmt::format("{}{}:\n", indent, section.name.substr(section.name.rfind('.') + 1));
    for (const YamlKey& key : section.keys) {
      text += fmt::format("{}  {}: {}\n", indent, key.name, key.write());
    }
  }
  return text;
}

std::string YamlReference(const std::vector<YamlSection>& sections) {
  std::string text;
  for (const YamlSection& section : sections) {
    text += fmt::format("\n## {}\n\n{}\n\n| key | values | default | meaning |\n|-|-|-|-|\n", section.name,
                        section.doc);
    for (const YamlKey& key : section.keys) {
      std::string aliases;
      for (const std::string& alias : key.aliases)
        aliases += fmt::format("{}`{}`", aliases.empty() ? "" : ", ", alias);
      text += fmt::format("| `{}` | {} | `{}` | {}{} |\n", key.name, key.type, key.write(), key.doc,
                          aliases.empty() ? "" : fmt::format(" (elsewhere: {})", aliases));
    }
  }
  return text;
}

}  // namespace strata
