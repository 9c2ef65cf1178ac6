// Arguments: a command's words, taken one kind at a time: `--flag`, `--option=value` or `--option value`, and
// what remains by position.
//
// Whatever nobody took is a UsageError naming it. Threading: one thread.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

namespace strata {

/// Thrown for `--help`: what to print before ending with status 0.
struct HelpRequested {
  std::string text;
};

class Arguments {
 public:
  /// `usage` is shown with every UsageError, and by --help (HelpRequested).
  Arguments(std::vector<std::string> words, std::string usage);

  /// Whether `--name` is there.
  bool Flag(const std::string& name);
  /// The value of `--name=value` or `--name value`; nullopt when absent.
  std::optional<std::string> Option(const std::string& name);
  /// The value of `--name=value`; "" for a bare `--name`; nullopt when absent.
  std::optional<std::string> OptionalValue(const std::string& name);
  /// A whole number from `low` to `high`, which is a count's default.
  std::optional<int64_t> Integer(const std::string& name, int64_t low = 0,
                                 int64_t high = std::numeric_limits<int32_t>::max());
  /// A finite number.
  std::optional<double> Number(const std::string& name);
  /// The next word by position; UsageError naming `what` when there is none.
  std::string Positional(const std::string& what);
  /// All that remain; none may begin with "--".
  std::vector<std::string> Rest();
  /// Nothing may be left.
  void Finish();
  [[noreturn]] void Fail(const std::string& what) const;

 private:
  std::vector<std::string> words_;
  std::string usage_;
};

}  // namespace strata
