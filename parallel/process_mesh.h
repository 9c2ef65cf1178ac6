// ProcessMesh: how the ranks of a job are laid along the axes tensor, expert and data, and the group of each
// rank on each axis.
//
// tp is innermost; the dp group of a rank strides by tp; experts reuse the dp ranks: an expert group is
// ep consecutive members of a dp group, and the expert-data group strides by ep inside it (Singh et al., "A
// Hybrid Tensor-Expert-Data Parallelism Approach", ICS 2023, section 3). World 16, tp 2, ep 4: tp [0,1] …; ep
// [0,2,4,6], [8,10,12,14] …; edp [0,8], [2,10] …
//
// Ownership: owns its communicators. Threading: handed down explicitly; used by its rank's thread.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "parallel/host_communicator.h"

namespace strata {

struct MeshShape {
  int world = 1, tensor = 1, expert = 1;
  int data() const { return world / tensor; }
  int expert_data() const { return data() / expert; }
  /// Throws ConfigError with the numbers and the nearest valid choice when the axes do not divide.
  void Validate() const;
  /// Members of `rank`'s group along each axis, ascending.
  std::vector<int> TensorGroup(int rank) const;
  std::vector<int> DataGroup(int rank) const;
  std::vector<int> ExpertGroup(int rank) const;
  std::vector<int> ExpertDataGroup(int rank) const;
};

class ProcessMesh {
 public:
  /// Makes the communicator of a group, given its ranks and axis.
  using Factory = std::function<std::unique_ptr<Communicator>(std::vector<int> ranks, std::string axis)>;

  /// Collective over the job.
  ProcessMesh(CommEngine& engine, MeshShape shape);
  /// The mesh as `rank` sees it, over any communicators.
  ProcessMesh(MeshShape shape, int rank, const Factory& factory);

  const MeshShape& shape() const { return shape_; }
  int rank() const { return rank_; }
  Communicator& world() const { return *world_; }
  Communicator& tp() const { return *tp_; }
  Communicator& dp() const { return *dp_; }
  Communicator& ep() const { return *ep_; }
  Communicator& edp() const { return *edp_; }

 private:
  MeshShape shape_;
  int rank_;
  std::unique_ptr<Communicator> world_, tp_, dp_, ep_, edp_;
};

}  // namespace strata
