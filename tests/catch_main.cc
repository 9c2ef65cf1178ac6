// The main of every Catch2 test.
//
// A test case that cannot run here says WARN("skipped: why and what to do") and returns; it counts as passed.
// Its reason is printed as a line of its own, "SKIPPED <case>: <reason>", and when no case of a program ran,
// a last line says so: "SKIPPED all". tools/test.sh counts by these lines.
#define CATCH_CONFIG_RUNNER
#define CATCH_CONFIG_EXTERNAL_INTERFACES
#include <catch2/catch.hpp>

#include <cstdlib>
#include <iostream>
#include <string>

namespace {

class SkipListener : public Catch::TestEventListenerBase {
 public:
  using TestEventListenerBase::TestEventListenerBase;

  void testCaseStarting(const Catch::TestCaseInfo& info) override {
    TestEventListenerBase::testCaseStarting(info);
    skipped_ = false;
  }

  bool assertionEnded(const Catch::AssertionStats& stats) override {
    const Catch::AssertionResult& result = stats.assertionResult;
    if (result.getResultType() == Catch::ResultWas::Warning) {
      const std::string message = result.getMessage();
      const std::string prefix = "skipped: ";
      if (message.rfind(prefix, 0) == 0) {
        skipped_ = true;
        std::cout << "SKIPPED " << currentTestCaseInfo->name << ": " << message.substr(prefix.size()) << "\n";
      }
    }
    return true;
  }

  void testCaseEnded(const Catch::TestCaseStats& stats) override {
    TestEventListenerBase::testCaseEnded(stats);
    if (!skipped_ || stats.totals.assertions.total() > 0) ++num_run_;
  }

  void testRunEnded(const Catch::TestRunStats& stats) override {
    if (num_run_ == 0 && stats.totals.testCases.total() > 0) std::cout << "SKIPPED all" << std::endl;
    TestEventListenerBase::testRunEnded(stats);
  }

 private:
  bool skipped_ = false;
  int num_run_ = 0;
};

CATCH_REGISTER_LISTENER(SkipListener)

}  // namespace

int main(int argc, char** argv) {
  Catch::Session session;
  if (const int error = session.applyCommandLine(argc, argv)) return error;
  // Set by `bazel test --test_filter=...`.
  if (const char* filter = std::getenv("TESTBRIDGE_TEST_ONLY")) {
    session.configData().testsOrTags.emplace_back(filter);
  }
  return session.run();
}
