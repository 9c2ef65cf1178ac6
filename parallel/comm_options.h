// CommOptions: what all communicators of a rank share.
#pragma once

#include "parallel/traffic_log.h"
#include "runtime/base/device.h"
#include "runtime/base/trace.h"

namespace strata {

struct CommOptions {
  double timeout_s = 600;  // after which an absent rank is an error
  TrafficLog* traffic = nullptr;
  Tracer* tracer = nullptr;
  /// Whose memory tensors may lie in, beside the host's; outlives the communicators. May be null.
  Device* device = nullptr;
};

}  // namespace strata
