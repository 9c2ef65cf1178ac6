#include "tools/yaml_reader.h"

#include <yaml-cpp/yaml.h>
#include <catch2/catch.hpp>
#include <sstream>

#include "runtime/base/error.h"

namespace strata {
namespace {

enum class Colour { kRed, kBlue };

// A kitchen's settings: one key of every kind.
struct Kitchen {
  int64_t pots = 3;
  double heat = 0.5;
  bool lid = false;
  std::string label = "soup";
  Colour colour = Colour::kRed;
  std::vector<std::string> guests;
  std::vector<double> salt = {0.1, 0.2};
  std::optional<int64_t> pantry;
  int64_t spoons = 0;
  std::string order;

  std::vector<YamlSection> Sections() {
    std::vector<YamlSection> sections = {
        {"stove",
         "What is hot.",
         {
             Bind("pots", pots, Integer<int64_t>(1, 9), "Pots on it.", {"pans"}),
             Bind("heat", heat, Number({.low = 0, .high = 1, .high_open = true}), "How hot."),
             Bind("lid", lid, Flag(), "Covered."),
             Bind("colour", colour,
                  OneOf<Colour>(
                      {{"red", Colour::kRed}, {"blue", Colour::kBlue}, {"green", Colour::kRed, "sold out"}}),
                  "Of the enamel."),
         }},
        {"table",
         "Where it is eaten.",
         {
             Bind("label", label, Text(), "On the card."),
             Bind("guests", guests, ListOf(Text()), "Who comes."),
             Bind("salt", salt, ListOf(Number({.low = 0}), 2), "Two shakers."),
             Bind("pantry", pantry, OrNull(Bytes()), "Room."),
             Bind("spoons", spoons, OrWord<int64_t>("auto", 0, Integer<int64_t>(1)), "A guest each."),
         }},
    };
    // Stored first to last, as described.
    for (YamlSection& section : sections) {
      for (YamlKey& key : section.keys) key.stored = [this, name = key.name] { order += name + " "; };
    }
    return sections;
  }
  void Read(const std::string& text, const std::vector<std::string>& overrides = {}) {
    ReadYaml(Sections(), text, "k.yaml", overrides);
  }
};

// The lines of the error that reading gives; none when it succeeds.
std::vector<std::string> Faults(const std::string& text, const std::vector<std::string>& overrides = {}) {
  Kitchen kitchen;
  try {
    kitchen.Read(text, overrides);
  } catch (const ConfigError& error) {
    std::vector<std::string> lines(1);
    for (const char c : std::string(error.what())) {
      if (c == '\n') {
        lines.emplace_back();
      } else {
        lines.back() += c;
      }
    }
    CHECK_FALSE(error.hint().empty());
    return lines;
  }
  return {};
}

using Lines = std::vector<std::string>;

TEST_CASE("Values of every kind are read from block and flow style") {
  Kitchen k;
  k.Read(R"(
stove: {pots: 5, heat: 25e-2, lid: true, colour: blue}
table:
  label: "a: b # c"
  guests: [Ann, "2", 3]
  salt:
    - 1
    - .5
  pantry: 1.5GiB
  spoons: 1e3
)");
  CHECK(k.pots == 5);
  CHECK(k.heat == 0.25);
  CHECK(k.lid);
  CHECK(k.colour == Colour::kBlue);
  CHECK(k.label == "a: b # c");
  CHECK(k.guests == Lines{"Ann", "2", "3"});
  CHECK(k.salt == std::vector<double>{1, 0.5});
  CHECK(k.pantry == int64_t{3} << 29);
  CHECK(k.spoons == 1000);
}

TEST_CASE("Words, null and absent values") {
  Kitchen k;
  k.pantry = 7;
  k.Read("table: {pantry: ~, spoons: auto}\nstove:\n");
  CHECK_FALSE(k.pantry.has_value());
  CHECK(k.spoons == 0);
  CHECK(k.pots == 3);
  for (const char* text : {"", "---\n", "# nothing\n", "null", "table:\n  pantry:\n"}) {
    CAPTURE(text);
    CHECK(Faults(text).empty());
  }
  CHECK(Faults("table:\n  label:\n") == Lines{"k.yaml:2:3: table.label: expected text, found null"});
}

TEST_CASE("All faults are reported at once, by place") {
  CHECK(Faults(R"(stove:
  pots: many
  haet: 1
  lid: yes
  pots: 4
tabel:
  label: x
table:
  salt: [1]
  guests: Ann
)",
               {"stove.heat=1", "table.spoons=0"}) ==
        Lines{
            "k.yaml:2:9: stove.pots: expected an integer from 1 to 9, found 'many'",
            "k.yaml:3:3: unknown key 'haet' in stove (did you mean 'heat'?)",
            "k.yaml:4:8: stove.lid: expected true or false, found 'yes'",
            "k.yaml:5:3: duplicate key 'pots', first on line 2",
            "k.yaml:6:1: unknown section 'tabel' (did you mean 'table'?)",
            "k.yaml:9:9: table.salt: expected a list of 2, each a number ≥ 0, found a list of 1",
            "k.yaml:10:11: table.guests: expected a list of text, found 'Ann'",
            "command line: stove.heat=1: stove.heat: expected a number in [0, 1), found '1'",
            "command line: table.spoons=0: table.spoons: expected auto or an integer ≥ 1, found '0'",
        });
}

TEST_CASE("Wrong types and values out of range") {
  const auto fault = [](const std::string& key_value) {
    const Lines lines = Faults("stove: {" + key_value + "}");
    REQUIRE(lines.size() == 1);
    return lines[0].substr(std::string("k.yaml:1:").size());
  };
  CHECK(fault("pots: 0") == "15: stove.pots: expected an integer from 1 to 9, found '0'");
  CHECK(fault("pots: 10") == "15: stove.pots: expected an integer from 1 to 9, found '10'");
  CHECK(fault("pots: 2.0") == "15: stove.pots: expected an integer from 1 to 9, found '2.0'");
  CHECK(fault("pots: 99999999999999999999") ==
        "15: stove.pots: expected an integer from 1 to 9, found '99999999999999999999'");
  CHECK(fault("pots: \"2\"") == "15: stove.pots: expected an integer from 1 to 9, found the text '2'");
  CHECK(fault("pots: [2]") == "15: stove.pots: expected an integer from 1 to 9, found a list of 1");
  CHECK(fault("pots: {a: 2}") == "15: stove.pots: expected an integer from 1 to 9, found a mapping");
  CHECK(fault("heat: .nan") == "15: stove.heat: expected a number in [0, 1), found '.nan'");
  CHECK(fault("heat: inf") == "15: stove.heat: expected a number in [0, 1), found 'inf'");
  CHECK(fault("heat: 0.5x") == "15: stove.heat: expected a number in [0, 1), found '0.5x'");
  CHECK(fault("lid: 1") == "14: stove.lid: expected true or false, found '1'");
  CHECK(fault("colour: pink") == "17: stove.colour: expected red or blue, found 'pink'");
  CHECK(fault("colour: green") == "17: stove.colour: green: sold out");
  CHECK(fault("pots: \"a\\nb\"") == "15: stove.pots: expected an integer from 1 to 9, found the text 'a?b'");
}

TEST_CASE("Integers are read exactly, whatever their notation") {
  int64_t wide = 0;
  uint64_t widest = 0;
  const std::vector<YamlSection> sections = {
      {"n", "", {Bind("i", wide, Integer<int64_t>(-10), ""), Bind("u", widest, Integer<uint64_t>(0), "")}}};
  ReadYaml(sections, "n: {i: 9223372036854775807, u: 18446744073709551615}", "", {});
  CHECK(wide == INT64_MAX);
  CHECK(widest == UINT64_MAX);
  ReadYaml(sections, "n: {i: -1e1, u: 2.5e3}", "", {});
  CHECK(wide == -10);
  CHECK(widest == 2500);
  for (const char* bad :
       {"n: {i: 1e-1}", "n: {i: 1e30}", "n: {i: -11}", "n: {u: -1}", "n: {u: -1e1}", "n: {i: 0x10}"}) {
    CAPTURE(bad);
    CHECK_THROWS_AS(ReadYaml(sections, bad, "", {}), ConfigError);
  }
}

TEST_CASE("A key that lives elsewhere, or is called otherwise, is recognised") {
  CHECK(Faults("stove: {pans: 1}") ==
        Lines{"k.yaml:1:9: unknown key 'pans' in stove (did you mean 'pots'?)"});
  CHECK(Faults("table: {heat: 1}") ==
        Lines{"k.yaml:1:9: unknown key 'heat' in table (did you mean 'stove.heat'?)"});
  CHECK(Faults("heat: 1") == Lines{"k.yaml:1:1: unknown section 'heat' (did you mean 'stove.heat'?)"});
  CHECK(Faults("stove: {xyzzy: 1}") ==
        Lines{"k.yaml:1:9: unknown key 'xyzzy' in stove; its keys are pots, heat, lid, colour"});
  CHECK(Faults("xyzzy: 1") == Lines{"k.yaml:1:1: unknown section 'xyzzy'; the sections are stove, table"});
}

TEST_CASE("Overrides replace what the file says; the last one counts") {
  Kitchen k;
  k.Read("stove: {pots: 1}\ntable: {guests: [Ann]}",
         {"stove.pots=2", "stove.pots=4", "table.guests=[Bob, \"C, D\"]", "table.label=a=b",
          "table={spoons: 2}"});
  CHECK(k.pots == 4);
  CHECK(k.guests == Lines{"Bob", "C, D"});
  CHECK(k.label == "a=b");
  CHECK(k.spoons == 2);
}

TEST_CASE("Faults of overrides name the command line") {
  CHECK(Faults("", {"stove.pan=1"}) ==
        Lines{"command line: stove.pan=1: unknown key 'pan' in stove (did you mean 'pots'?)"});
  CHECK(Faults("", {"table.heat=1"}) ==
        Lines{"command line: table.heat=1: unknown key 'heat' in table (did you mean 'stove.heat'?)"});
  CHECK(Faults("", {"stov.lid=true"}) ==
        Lines{"command line: stov.lid=true: unknown key 'stov.lid' (did you mean 'stove.lid'?)"});
  CHECK(Faults("", {"lid=true"}) ==
        Lines{"command line: lid=true: unknown key 'lid' (did you mean 'stove.lid'?)"});
  CHECK(Faults("", {"lid"}) == Lines{"command line: lid: no '='; write section.key=value"});
  CHECK(Faults("", {"stove=3"}) == Lines{"command line: stove=3: stove: expected keys, found '3'"});
  CHECK(
      Faults("", {"table.guests=[a"}).at(0).starts_with("command line: table.guests=[a: this is no YAML: "));
  CHECK(Faults("", {"stove={lid: true, lid: false}"}) ==
        Lines{"command line: stove={lid: true, lid: false}: duplicate key 'lid'"});
}

TEST_CASE("What is not a mapping of mappings is refused with its place") {
  CHECK(Faults("[1, 2]") == Lines{"k.yaml:1:1: expected sections, found a list of 2"});
  CHECK(Faults("stove") == Lines{"k.yaml:1:1: expected sections, found 'stove'"});
  CHECK(Faults("stove: [1]") == Lines{"k.yaml:1:1: stove: expected keys, found a list of 1"});
  CHECK(Faults("? [a]\n: 1\n") == Lines{"k.yaml:1:3: expected the name of a section, found a list of 1"});
  CHECK(Faults("stove: {pots: 1}\nstove: {pots: 2}\n") ==
        Lines{"k.yaml:2:1: duplicate section 'stove', first on line 1"});
  const std::string more = "this is no part of what stands before it";
  CHECK(Faults("stove: {pots: 1}\n---\nstove: {pots: 2}\n") == Lines{"k.yaml:2:1: " + more});
  CHECK(Faults("{stove: {pots: 1}},\n") == Lines{"k.yaml:1:19: " + more});
  CHECK(Faults("stove: {pots: 1}\n...\n").empty());
  CHECK(Faults("", {"table.salt=[1, 2]]"}).at(0).starts_with("command line: table.salt=[1, 2]]: "));
  CHECK(Faults("", {"stove.pots=,"}) == Lines{"command line: stove.pots=,: " + more});
  CHECK(Faults("stove:\n\tpots: 1\n").at(0).starts_with("k.yaml:2:"));
  CHECK(Faults("stove: &a {lid: *a}\n").size() == 1);
  CHECK(Faults(std::string(100000, '[')).size() == 1);
}

TEST_CASE("Variables are set in the order of the description, each key once") {
  Kitchen k;
  k.Read("table: {label: x}\nstove: {lid: true, pots: 2}", {"stove.pots=3"});
  CHECK(k.order == "pots lid label ");
}

TEST_CASE("What is written reads back to the same values") {
  Kitchen k;
  k.pots = 9;
  k.heat = 0.1 + 0.2;  // no short decimal
  k.lid = true;
  k.colour = Colour::kBlue;
  k.guests = {
      "",    "null", "yes", "a, b", "12", "\"quoted\" \\ back", "tab\tand\nline", "çé 漢", "plain/path-1.txt",
      "- x", "~",    "a: b"};
  k.salt = {1e-300, 12345678.9};
  k.pantry = 3 << 20;
  k.label = "# no comment";
  Kitchen copy;
  copy.Read(WriteYaml(k.Sections()));
  CHECK(copy.pots == k.pots);
  CHECK(copy.heat == k.heat);
  CHECK(copy.lid == k.lid);
  CHECK(copy.colour == k.colour);
  CHECK(copy.guests == k.guests);
  CHECK(copy.salt == k.salt);
  CHECK(copy.pantry == k.pantry);
  CHECK(copy.spoons == k.spoons);
  CHECK(copy.label == k.label);
}

TEST_CASE("The reference has a row for every key") {
  Kitchen k;
  const std::string reference = YamlReference(k.Sections());
  CHECK(reference.find("| `pots` | an integer from 1 to 9 | `3` | Pots on it. (elsewhere: `pans`) |") !=
        std::string::npos);
  CHECK(reference.find("| `colour` | red or blue | `red` | Of the enamel. |") != std::string::npos);
  CHECK(reference.find("\n## table\n\nWhere it is eaten.\n") != std::string::npos);
}

// A house, whose garden has a pond with fish: sections three deep, and one after them.
struct House {
  int64_t rooms = 2, trees = 1, fish = 0, water = 4096;
  std::string colour = "white", gate = "wood";

  std::vector<YamlSection> Sections() {
    return {
        {"house", "", {Bind("rooms", rooms, Integer<int64_t>(1, 9), "", {"chambers"})}, {"dwelling"}},
        {"house.garden", "Green.", {Bind("trees", trees, Integer<int64_t>(0, 99), "", {"oaks"})}},
        {"house.garden.pond",
         "",
         {Bind("fish", fish, Integer<int64_t>(0, 99), "Carps.", {"koi"}),
          Bind("water", water, Bytes(0, 4096), "")}},
        {"house.gate", "", {Bind("gate", gate, Text(), "")}},
        {"paint", "", {Bind("colour", colour, Text(), "")}},
    };
  }
  Lines Faults(const std::string& text, const std::vector<std::string>& overrides = {}) {
    try {
      ReadYaml(Sections(), text, "h.yaml", overrides);
    } catch (const ConfigError& error) {
      Lines lines;
      std::istringstream what(error.what());
      for (std::string line; std::getline(what, line);) lines.push_back(line);
      return lines;
    }
    return {};
  }
};

TEST_CASE("Sections stand inside sections, in files and in overrides") {
  House h;
  CHECK(h.Faults(R"(
house:
  garden:
    pond: {fish: 3, water: 8KiB}
    trees: 7
  rooms: 4
  gate:
paint: {colour: red}
)",
                 {"house.garden.trees=8", "house.gate={gate: iron}", "house={garden: {pond: {fish: 5}}}"})
            .empty());
  CHECK(h.rooms == 4);
  CHECK(h.trees == 8);
  CHECK(h.fish == 5);
  CHECK(h.water == 8192);
  CHECK(h.gate == "iron");
  CHECK(h.colour == "red");

  const std::string written = WriteYaml(h.Sections());
  CHECK(written ==
        "house:\n  rooms: 4\n  garden:\n    trees: 8\n    pond:\n      fish: 5\n      water: 8KiB\n"
        "  gate:\n    gate: iron\npaint:\n  colour: red\n");
  House copy;
  CHECK(copy.Faults(written).empty());
  CHECK(WriteYaml(copy.Sections()) == written);
  CHECK(YamlReference(h.Sections()).find("\n## house.garden\n\nGreen.\n") != std::string::npos);
}

TEST_CASE("Inside sections reading is as strict as outside") {
  House h;
  CHECK(h.Faults(R"(house:
  garden:
    trees: many
    tree: 1
    pond: {fish: 1, fish: 2, water: 4097}
    pond: {}
  gate: open
  gardn: {}
)",
                 {"house.garden.pond.fsh=1", "house.garden.pond.water=1", "house.garden.pond=3"}) ==
        Lines{
            "h.yaml:3:12: house.garden.trees: expected an integer from 0 to 99, found 'many'",
            "h.yaml:4:5: unknown key 'tree' in house.garden (did you mean 'trees'?)",
            "h.yaml:5:21: duplicate key 'fish', first on line 5",
            "h.yaml:5:37: house.garden.pond.water: expected 0, or bytes such as 8GiB, a multiple of 4KiB, "
            "found '4097'",
            "h.yaml:6:5: duplicate key 'pond', first on line 5",
            "h.yaml:7:3: house.gate: expected keys, found 'open'",
            "h.yaml:8:3: unknown key 'gardn' in house (did you mean 'garden'?)",
            "command line: house.garden.pond.fsh=1: unknown key 'fsh' in house.garden.pond (did you mean "
            "'fish'?)",
            "command line: house.garden.pond.water=1: house.garden.pond.water: expected 0, or bytes such as "
            "8GiB, a multiple of 4KiB, found '1'",
            "command line: house.garden.pond=3: house.garden.pond: expected keys, found '3'",
        });
}

TEST_CASE("Keys are recognised across levels") {
  House h;
  const auto fault = [&](const std::string& text, const std::vector<std::string>& overrides = {}) {
    const Lines lines = h.Faults(text, overrides);
    REQUIRE(lines.size() == 1);
    return lines[0].substr(lines[0].find("unknown"));
  };
  CHECK(fault("house: {koi: 1}") == "unknown key 'koi' in house (did you mean 'house.garden.pond.fish'?)");
  CHECK(fault("house: {garden: {chambers: 1}}") ==
        "unknown key 'chambers' in house.garden (did you mean 'house.rooms'?)");
  CHECK(fault("house: {garden: {xyzzy: 1}}") ==
        "unknown key 'xyzzy' in house.garden; its keys are trees, pond");
  CHECK(fault("house: {garden.pond: {fish: 1}}") ==
        "unknown key 'garden.pond' in house; in a file each name stands on a level of its own");
  CHECK(fault("house.garden: {trees: 1}") ==
        "unknown section 'house.garden'; in a file each name stands on a level of its own");
  CHECK(fault("house.rooms: 1") ==
        "unknown section 'house.rooms'; in a file each name stands on a level of its own");
  CHECK(fault("garden: {trees: 1}") == "unknown section 'garden'; the sections are house, paint");
  CHECK(fault("dweling: {}") == "unknown section 'dweling' (did you mean 'house'?)");
  CHECK(fault("", {"garden.koi=1"}) == "unknown key 'garden.koi' (did you mean 'house.garden.pond.fish'?)");
  CHECK(fault("", {"house.gardn.tres=1"}) ==
        "unknown key 'house.gardn.tres' (did you mean 'house.garden.trees'?)");
}

TEST_CASE("Nearest counts insertions, deletions and replacements") {
  CHECK(Nearest("kitten", {"sitting", "mitten"}) == "mitten");
  CHECK(Nearest("kittens", {"sitting", "kitten"}) == "kitten");
  CHECK(Nearest("lr", {"lrs", "eps"}) == "lrs");
  CHECK(Nearest("abc", {"xyz"}).empty());
  CHECK(Nearest("", {"a"}) == "a");
}

}  // namespace
}  // namespace strata
