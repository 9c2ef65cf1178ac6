#include "parallel/process_mesh.h"

#include <algorithm>
#include <string>

#include "runtime/base/error.h"

namespace strata {
namespace {

// `count` ranks from `first`, `stride` apart.
std::vector<int> Strided(int first, int stride, int count) {
  std::vector<int> ranks(count);
  for (int i = 0; i < count; ++i) ranks[i] = first + i * stride;
  return ranks;
}

// Throws unless `parts` divides `whole`; names the divisors next to it.
void CheckDivides(const char* key, int parts, int whole, const std::string& whole_text) {
  if (parts >= 1 && whole % parts == 0) return;
  int below = std::clamp(parts, 1, whole), above = below;
  while (whole % below != 0) --below;
  while (whole % above != 0) ++above;
  std::string nearest = std::to_string(below);
  if (above != below) nearest += " or " + std::to_string(above);
  throw ConfigError(StrCat(key, ": ", parts, " does not divide ", whole_text),
                    StrCat("nearest valid: ", key, ": ", nearest));
}

}  // namespace

void MeshShape::Validate() const {
  STRATA_CHECK(world >= 1) << world;
  CheckDivides("parallel.tensor", tensor, world, StrCat("the ", world, " ranks of the job"));
  CheckDivides(
      "parallel.expert", expert, data(),
      StrCat("the ", data(), " data-parallel ranks (", world, " ranks / parallel.tensor ", tensor, ")"));
}

std::vector<int> MeshShape::TensorGroup(int rank) const { return Strided(rank - rank % tensor, 1, tensor); }

std::vector<int> MeshShape::DataGroup(int rank) const { return Strided(rank % tensor, tensor, data()); }

std::vector<int> MeshShape::ExpertGroup(int rank) const {
  const int place = rank / tensor;  // in the data group
  return Strided(rank - place % expert * tensor, tensor, expert);
}

std::vector<int> MeshShape::ExpertDataGroup(int rank) const {
  const int place = rank / tensor;
  return Strided(rank % tensor + place % expert * tensor, expert * tensor, expert_data());
}

ProcessMesh::ProcessMesh(CommEngine& engine, MeshShape shape)
    : ProcessMesh(shape, engine.transport().rank(), [&](std::vector<int> ranks, std::string axis) {
        STRATA_CHECK(shape.world == engine.transport().size()) << shape.world;
        return engine.NewCommunicator(std::move(ranks), std::move(axis));
      }) {}

ProcessMesh::ProcessMesh(MeshShape shape, int rank, const Factory& factory) : shape_(shape), rank_(rank) {
  shape.Validate();
  world_ = factory(Strided(0, 1, shape.world), "world");
  tp_ = factory(shape.TensorGroup(rank_), "tp");
  dp_ = factory(shape.DataGroup(rank_), "dp");
  ep_ = factory(shape.ExpertGroup(rank_), "ep");
  edp_ = factory(shape.ExpertDataGroup(rank_), "edp");
}

}  // namespace strata
