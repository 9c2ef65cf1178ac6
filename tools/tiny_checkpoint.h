// Checkpoints of tiny runs (tests/tiny_run.h), for tests that save in one layout and load in another.
#pragma once

#include <unistd.h>

#include <cstdlib>
#include <string>

#include "tests/tiny_run.h"
#include "tools/checkpoint.h"
#include "tools/whole_state.h"

namespace strata::testing {

/// Saves wait for the disk: temporary folders lie in memory, where there is such a place.
inline const bool kTemporaryFoldersInMemory =
    access("/dev/shm", W_OK) == 0 && setenv("TMPDIR", "/dev/shm", 1) == 0;

/// All state rests on one tier.
inline void RestOn(Tier tier, const std::string& nvme, TinyLayout& tiny) {
  OffloadOptions& offload = tiny.zero.offload;
  offload.optimizer = offload.parameters = offload.gradients = tier;
  offload.path = nvme;
  offload.sub_group_bytes = 4096;
}

/// The state after step 2.
inline void SaveTiny(const TinyRank& rank, const std::string& folder, const RunConfig& config,
                     bool async = true) {
  CheckpointInfo info;
  info.step = 2;
  info.config_yaml = config.ToYaml();
  info.trainer = {{"optimizer_step", rank.engine.optimizer_step()}};
  CheckpointSaver saver(PosixFileSystem(), folder, 0, async, rank.device, rank.mesh.world());
  saver.Save(info, rank.engine.SlicesToSave(), rank.model.Parameters());
  saver.Finish();
}

inline void LoadTiny(const TinyRank& rank, const std::string& folder) {
  CheckpointReader reader(PosixFileSystem(), folder);
  reader.Read(rank.engine.SlicesToLoad(), rank.model.Parameters(), false);
  rank.engine.FinishLoad();
  rank.engine.set_optimizer_step(reader.info().trainer.at("optimizer_step"));
}

}  // namespace strata::testing
