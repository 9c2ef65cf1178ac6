// A plan for a GPU against the run, on the emulated one.
#include <catch2/catch.hpp>

#include "kernels/cuda/cuda_device.h"
#include "runtime/base/testing.h"
#include "tools/plan_run.h"

namespace strata::testing {
namespace {

// Kernels' scratch is in no plan, and lies among the device's buffers.
TEST_CASE("A run on a GPU holds what its plan says, to the byte, but for kernels' scratch") {
  const TemporaryFolder folder;
  const std::string all_host =
      "zero.offload.optimizer=host zero.offload.parameters=host zero.offload.gradients=host ";
  const std::string all_nvme =
      "zero.offload.optimizer=nvme zero.offload.parameters=nvme zero.offload.gradients=nvme "
      "zero.offload.nvme.sub_group_bytes=64KiB zero.overlap=false ";
  for (Layout layout : {Layout{0, 1, "", "bf16", 1},
                        {0, 2, all_host, "bf16", 1},
                        {1, 1, "zero.offload.optimizer=host", "fp32"},
                        {2, 2, all_nvme},
                        {3, 2, all_host},
                        {3, 1, all_nvme + "recompute.policy=full recompute.offload=host"},
                        {0, 1, "parallel.tensor=2"}}) {
    layout.more =
        "device.type=cuda model.hidden_size=32 data.seq_len=8 train.micro_batch_size=1 " + layout.more;
    CAPTURE(layout.stage, layout.micro_batches, layout.more, layout.precision, layout.ranks);
    const Plan plan = PlanOf(layout);
    const Measured run = Run(
        layout, folder.path(), [](int rank) { return NewCudaDevice(rank, 1); }, CudaKernels());
    for (int tag = 0; tag < kNumMemoryTags; ++tag) {
      if (static_cast<MemoryTag>(tag) == MemoryTag::kBuffers) continue;
      CAPTURE(Name(static_cast<MemoryTag>(tag)));
      const auto i = static_cast<size_t>(tag);
      CHECK(plan.memory.current[i] == run.memory.current[i]);
      CHECK(plan.memory.peak[i] == run.memory.peak[i]);
      CHECK(plan.host.peak[i] == run.host.peak[i]);
    }
    CHECK(plan.memory.total_peak <= run.memory.total_peak);
    CHECK(plan.nvme_bytes == run.step.nvme_bytes);
    CHECK(plan.disk_read == run.step.disk_read);
    CHECK(plan.disk_written == run.step.disk_written);
  }
}

}  // namespace
}  // namespace strata::testing
