#include "zero/itinerary.h"

#include <catch2/catch.hpp>
#include <map>
#include <string>

namespace strata {
namespace {

// Units named by a letter each, and what an itinerary comes by, as "+A -A".
struct Tour {
  explicit Tour(const std::string& list) {
    for (char c : list) {
      Unit& unit = units[c];
      unit.name = std::string(1, c);
    }
    std::vector<const Unit*> order;
    for (char c : list) order.push_back(&units[c]);
    itinerary = std::make_unique<Itinerary>(
        order, [this](size_t v) { log += "+" + itinerary->unit(v).name + std::to_string(v) + " "; },
        [this](size_t v) { log += "-" + itinerary->unit(v).name + std::to_string(v) + " "; });
  }
  void Use(const std::string& names, Phase phase) {
    for (char c : names) {
      itinerary->Enter(units.at(c), phase);
      itinerary->Leave(units.at(c));
    }
  }
  std::string Take() { return std::exchange(log, ""); }

  std::map<char, Unit> units;
  std::unique_ptr<Itinerary> itinerary;
  std::string log;
};

TEST_CASE("every rank comes by every unit in the order of the list, whatever it uses") {
  Tour all("ABC");
  all.itinerary->BeginTraining();
  all.Use("ABC", Phase::kForward);
  all.Use("CBA", Phase::kBackward);
  all.itinerary->Complete();
  const std::string expected = "+A0 -A0 +B1 -B1 +C2 -C2 +C3 -C3 +B4 -B4 +A5 -A5 ";
  CHECK(all.Take() == expected);
  for (const auto& [forward, backward] : {std::pair("AC", "CA"), std::pair("B", "B"), std::pair("AB", "BA"),
                                          std::pair("BC", ""), std::pair("", "")}) {
    all.itinerary->BeginTraining();
    all.Use(forward, Phase::kForward);
    all.Use(backward, Phase::kBackward);
    all.itinerary->Complete();
    INFO(forward << " " << backward);
    CHECK(all.Take() == expected);
  }
}

TEST_CASE("a unit that stands twice is come by twice, each way") {
  Tour tour("ABA");
  tour.itinerary->BeginTraining();
  tour.Use("ABA", Phase::kForward);
  tour.Use("ABA", Phase::kBackward);
  CHECK(tour.Take() == "+A0 -A0 +B1 -B1 +A2 -A2 +A3 -A3 +B4 -B4 +A5 -A5 ");
}

TEST_CASE("a pass without backward begins when a unit is entered that is past") {
  Tour tour("ABC");
  tour.Use("ABC", Phase::kForward);
  tour.Use("AC", Phase::kForward);
  CHECK(tour.Take() == "+A0 -A0 +B1 -B1 +C2 -C2 +A0 -A0 +B1 -B1 +C2 -C2 ");
  CHECK_FALSE(tour.itinerary->training());
  // One that was left unfinished is finished first.
  tour.Use("A", Phase::kForward);
  tour.Use("A", Phase::kForward);
  CHECK(tour.Take() == "+A0 -A0 +B1 -B1 +C2 -C2 +A0 -A0 ");
}

TEST_CASE("a pass that was given up is forgotten") {
  Tour tour("AB");
  tour.itinerary->BeginTraining();
  tour.Use("A", Phase::kForward);
  tour.itinerary->Abandon();
  tour.itinerary->BeginTraining();
  tour.Use("AB", Phase::kForward);
  CHECK(tour.Take() == "+A0 -A0 +A0 -A0 +B1 -B1 ");
}

}  // namespace
}  // namespace strata
