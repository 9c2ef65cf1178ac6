// Progress: what the terminal shows while training: a bar that rewrites itself on a terminal, plain lines
// when piped.
//
// Each line has step, loss, learning rate, gradient norm, tokens/s, the share of the device's measured peak,
// and the time left. Written by rank 0. Threading: one thread.
#pragma once

#include <cstdint>
#include <optional>

namespace strata {

struct StepReport;

class Progress {
 public:
  /// `peak_flops` gives the share of the peak; 0: not shown.
  Progress(int64_t max_steps, double peak_flops);
  ~Progress();
  /// After every step: moves the bar.
  void Step(const StepReport& report);
  /// After a logged step: a line that stays.
  void Log(const StepReport& report, std::optional<double> valid_loss);

 private:
  void ClearBar();

  int64_t max_steps_;
  double peak_flops_;
  bool terminal_, bar_shown_ = false;
  double smoothed_seconds_ = 0;  // of a step
};

}  // namespace strata
