#include "tools/progress.h"

#include <spdlog/fmt/fmt.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <string>

#include "parallel/transport.h"
#include "runtime/base/log.h"
#include "runtime/base/units.h"
#include "tools/trainer.h"

namespace strata {

Progress::Progress(int64_t max_steps, double peak_flops)
    : max_steps_(max_steps),
      peak_flops_(peak_flops),
      // mpirun gives rank 0 a terminal of its own, whether or not there is one behind it.
      terminal_(isatty(STDOUT_FILENO) == 1 && !StartedByMpi()) {}

Progress::~Progress() { ClearBar(); }

void Progress::ClearBar() {
  if (!bar_shown_) return;
  std::fputs("\r\x1b[K", stdout);
  std::fflush(stdout);
  bar_shown_ = false;
}

void Progress::Step(const StepReport& report) {
  smoothed_seconds_ =
      smoothed_seconds_ == 0 ? report.seconds : 0.9 * smoothed_seconds_ + 0.1 * report.seconds;
  if (!terminal_) return;
  constexpr int kWidth = 24;
  const double share =
      static_cast<double>(report.step) / static_cast<double>(std::max<int64_t>(max_steps_, 1));
  const int filled = static_cast<int>(share * kWidth);
  std::string bar;
  for (int i = 0; i < kWidth; ++i) bar += i < filled ? "█" : "░";
  const double left = static_cast<double>(max_steps_ - report.step) * smoothed_seconds_;
  const std::string line =
      fmt::format("\r{} {}/{}  loss {:.4f}  {:.0f} tokens/s  {} left\x1b[K", bar, report.step, max_steps_,
                  report.loss, static_cast<double>(report.tokens) / report.seconds, FormatSeconds(left));
  std::fputs(line.c_str(), stdout);
  std::fflush(stdout);
  bar_shown_ = true;
}

void Progress::Log(const StepReport& report, std::optional<double> valid_loss) {
  ClearBar();
  const double rate = static_cast<double>(report.tokens) / report.seconds;
  std::string line =
      fmt::format("step {:>6}/{}  loss {:.4f}  lr {:.2e}  grad norm {:.3f}  {:.0f} tokens/s", report.step,
                  max_steps_, report.loss, report.lr, report.outcome.grad_norm, rate);
  if (peak_flops_ > 0 && report.flops > 0) {
    line += fmt::format("  {:.0f}% of peak", 100.0 * report.flops / report.seconds / peak_flops_);
  }
  line += fmt::format("  {} left",
                      FormatSeconds(static_cast<double>(max_steps_ - report.step) * smoothed_seconds_));
  if (valid_loss) line += fmt::format("  valid loss {:.4f}", *valid_loss);
  LogInfo("{}", line);
}

}  // namespace strata
