// The report page: what is read from metrics.jsonl, where it is drawn, and what a page of several runs
// compares.
#include <catch2/catch.hpp>
#include <cmath>
#include <regex>

#include "runtime/base/error.h"
#include "runtime/base/testing.h"
#include "tools/commands.h"
#include "tools/report/run_metrics.h"

namespace strata {
namespace {

using testing::TemporaryFolder;

FileSystem& Files() { return PosixFileSystem(); }

std::string WriteRun(const TemporaryFolder& folder, const std::string& name, const std::string& metrics) {
  const std::string run = JoinPath(folder.path(), name);
  Files().CreateDirectories(run);
  WriteFileAtomically(Files(), JoinPath(run, "metrics.jsonl"), metrics);
  return run;
}

// Three lines of a run of `flops` FLOPs a token; its last evaluation gives `loss`.
std::string ThreeLines(double flops, double loss, const std::string& more = "") {
  std::string text;
  const int64_t tokens[] = {100, 500, 1000};
  const double rates[] = {50, 100, 200};
  for (int i = 0; i < 3; ++i) {
    text +=
        StrCat(R"({"step":)", i + 1, R"(,"tokens":)", tokens[i], R"(,"loss":)", loss + 2 - i, R"(,"lr":0.1)",
               R"(,"grad_norm":1.0,"tokens_per_s":)", rates[i], R"(,"flops_per_s":)", flops * rates[i], more);
    if (i > 0) text += StrCat(R"(,"valid_loss":)", loss + 2 - i);
    text += "}\n";
  }
  return text;
}

// The points of each curve of the chart that follows `title` and `x_label`, in pixels.
std::vector<std::vector<std::pair<double, double>>> PointsOf(const std::string& page,
                                                             const std::string& x_label) {
  const size_t end = page.find("</figure>", page.find(">" + x_label + "<"));
  const size_t begin = page.rfind("<svg viewBox=\"0 0 640", end);
  const std::string chart = page.substr(begin, end - begin);
  std::vector<std::vector<std::pair<double, double>>> curves;
  const std::regex path("<path d=\"(M[^\"]*)\""), point("[ML]([-0-9.]+),([-0-9.]+)");
  for (std::sregex_iterator p(chart.begin(), chart.end(), path), none; p != none; ++p) {
    const std::string d = (*p)[1];
    curves.emplace_back();
    for (std::sregex_iterator q(d.begin(), d.end(), point); q != none; ++q)
      curves.back().emplace_back(std::stod((*q)[1]), std::stod((*q)[2]));
  }
  return curves;
}

std::string Report(std::vector<std::string> arguments, const TemporaryFolder& folder) {
  const std::string out = JoinPath(folder.path(), "page.html");
  arguments.insert(arguments.end(), {"--out", out});
  CommandLine line{nullptr, nullptr, std::move(arguments)};
  REQUIRE(ReportCommand(line) == 0);
  return ReadFile(Files(), out);
}

size_t Count(const std::string& text, const std::string& word) {
  size_t count = 0;
  for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) ++count;
  return count;
}

TEST_CASE("totals follow from tokens and rates") {
  TemporaryFolder folder;
  const RunMetrics run =
      ReadRunMetrics(Files(), WriteRun(folder, "a", ThreeLines(7, 3) + R"({"step":4,"to)"));
  REQUIRE(run.lines.size() == 3);  // the fourth is still being written
  const double seconds[] = {2, 2 + 4, 2 + 4 + 2.5};
  for (size_t i = 0; i < 3; ++i) {
    CHECK(run.lines[i]["flops"].get<double>() == Approx(7 * run.lines[i]["tokens"].get<double>()));
    CHECK(run.lines[i]["seconds"].get<double>() == Approx(seconds[i]));
  }
}

TEST_CASE("a folder without metrics, a damaged line and an empty file are refused") {
  TemporaryFolder folder;
  CHECK_THROWS_AS(ReadRunMetrics(Files(), folder.path()), DataError);
  CHECK_THROWS_AS(ReadRunMetrics(Files(), WriteRun(folder, "a", "")), DataError);
  CHECK_THROWS_WITH(ReadRunMetrics(Files(), WriteRun(folder, "b", ThreeLines(7, 3) + "{oops}\n{}\n")),
                    Catch::Contains("metrics.jsonl:4"));
}

TEST_CASE("names lose the folders that they share") {
  const auto names = [](const std::vector<std::string>& folders) {
    std::vector<RunMetrics> runs;
    for (const std::string& folder : folders) runs.push_back({folder, {}});
    ShortenNames(runs);
    std::vector<std::string> short_names;
    for (const RunMetrics& run : runs) short_names.push_back(run.name);
    return short_names;
  };
  using Names = std::vector<std::string>;
  CHECK(names({"runs/x/dense-1", "runs/x/dense-2"}) == Names{"dense-1", "dense-2"});
  CHECK(names({"runs/x", "runs/x/y"}) == Names{"x", "x/y"});
  CHECK(names({"a", "b"}) == Names{"a", "b"});
  CHECK(names({"runs/x", "runs/x"}) == Names{"x", "x"});
  CHECK(names({"runs/x"}) == Names{"runs/x"});
}

TEST_CASE("runs are compared against tokens, FLOPs and time") {
  TemporaryFolder folder;
  const std::string page = Report(
      {WriteRun(folder, "small", ThreeLines(10, 3)), WriteRun(folder, "large", ThreeLines(1000, 2))}, folder);
  CHECK(page.find("small</span>") != std::string::npos);
  // FLOPs run from 5,000 to 1,000,000 on a logarithmic axis between pixels 64 and 624.
  const auto curves = PointsOf(page, "FLOPs of training");
  REQUIRE(curves.size() == 2);
  const auto x = [](double flops) { return 64 + std::log(flops / 5000) / std::log(200.0) * (624 - 64); };
  CHECK(curves[0][0].first == Approx(64).margin(0.06));
  CHECK(curves[0][1].first == Approx(x(10000)).margin(0.06));
  CHECK(curves[1][0].first == Approx(x(500000)).margin(0.06));
  CHECK(curves[1][1].first == Approx(624).margin(0.06));
  // Losses: 4 and 3, 3 and 2; pixels grow downward.
  CHECK(curves[0][1].second == curves[1][0].second);
  CHECK(curves[0][0].second < curves[1][0].second);
  CHECK(page.find("seconds of training") != std::string::npos);
}

TEST_CASE("the page of one run has each curve once, and no mixtures where there are none") {
  TemporaryFolder folder;
  const std::string page = Report({WriteRun(folder, "a<b", ThreeLines(10, 3))}, folder);
  CHECK(Count(page, "<figcaption>Validation loss</figcaption>") == 1);
  CHECK(Count(page, "busiest expert</figcaption>") == 0);
  CHECK(page.find("a&lt;b") != std::string::npos);
  CHECK(page.find("a<b") == std::string::npos);
  CHECK(Count(page, "<script") + Count(page, "http") == 0);
}

TEST_CASE("each mixture layer's load is drawn") {
  TemporaryFolder folder;
  const std::string moe = R"(,"moe":{"0":{"load_min":0.1,"load_max":0.5,"load_entropy":1.2,"dropped":0.0},)"
                          R"("1":{"load_min":0.2,"load_max":0.3,"load_entropy":1.3,"dropped":0.25}})";
  const std::string page =
      Report({WriteRun(folder, "dense", ThreeLines(10, 3)), WriteRun(folder, "moe", ThreeLines(10, 3, moe))},
             folder);
  for (const char* title : {"busiest expert", "idlest expert", "experts' load", "Dropped"}) {
    const size_t at = page.find(StrCat(title, "</figcaption>"));
    REQUIRE(at != std::string::npos);
    const std::string chart = page.substr(at, page.find("</figure>", at) - at);
    CHECK(Count(chart, "moe, mixture 0</span>") == 1);
    CHECK(Count(chart, "moe, mixture 1</span>") == 1);
    CHECK(Count(chart, "dense") == 0);
    CHECK(Count(chart, "stroke-width=\"1.8\"") == 2);
  }
}

TEST_CASE("a run that diverged is reported too") {
  TemporaryFolder folder;
  const std::string lost = R"({"step":4,"tokens":1100,"loss":null,"tokens_per_s":50.0,"valid_loss":null})";
  const std::string page = Report({WriteRun(folder, "a", ThreeLines(10, 3) + lost + "\n")}, folder);
  CHECK(page.find("<td>nan</td><td>3.0000</td>") != std::string::npos);
}

TEST_CASE("curves beyond the colors are told apart by dashes") {
  std::vector<ChartSeries> series;
  for (int i = 0; i < 17; ++i) series.push_back({StrCat("s", i), {{1, i}, {2, i}}});
  const std::string chart = LineChart("t", "x", "y", series);
  CHECK(Count(chart, "stroke-dasharray=\"3\"") == 2 * 8);  // in the legend and in the chart
  CHECK(Count(chart, "stroke-dasharray=\"6\"") == 2 * 1);
}

TEST_CASE("a logarithmic axis has round values, and no place for zero") {
  const std::string chart = LineChart("t", "x", "y", {{"s", {{0, 5}, {3e9, 1}, {6e10, 2}}}}, Scale::kLog);
  CHECK(Count(chart, "<path d=\"M64.0,274.0 L624.0,36.0 \"") == 1);
  for (const char* value : {">5G<", ">10G<", ">20G<", ">50G<"}) CHECK(Count(chart, value) == 1);
  CHECK(Count(chart, ">2G<") + Count(chart, ">100G<") == 0);
  CHECK(Count(chart, "nan") + Count(chart, "inf") == 0);
}

}  // namespace
}  // namespace strata
