#include "parallel/process_mesh.h"

#include <catch2/catch.hpp>
#include <set>

#include "runtime/base/error.h"

namespace strata {
namespace {

using Group = std::vector<int>;
using Catch::Matchers::Contains;

TEST_CASE("world 16, tensor 2, expert 4, laid out by hand") {
  const MeshShape mesh{16, 2, 4};
  mesh.Validate();
  CHECK(mesh.data() == 8);
  CHECK(mesh.expert_data() == 2);
  CHECK(mesh.TensorGroup(0) == Group{0, 1});
  CHECK(mesh.TensorGroup(13) == Group{12, 13});
  CHECK(mesh.DataGroup(6) == Group{0, 2, 4, 6, 8, 10, 12, 14});
  CHECK(mesh.DataGroup(9) == Group{1, 3, 5, 7, 9, 11, 13, 15});
  CHECK(mesh.ExpertGroup(4) == Group{0, 2, 4, 6});
  CHECK(mesh.ExpertGroup(8) == Group{8, 10, 12, 14});
  CHECK(mesh.ExpertGroup(1) == Group{1, 3, 5, 7});
  CHECK(mesh.ExpertGroup(15) == Group{9, 11, 13, 15});
  CHECK(mesh.ExpertDataGroup(8) == Group{0, 8});
  CHECK(mesh.ExpertDataGroup(2) == Group{2, 10});
  CHECK(mesh.ExpertDataGroup(15) == Group{7, 15});
}

TEST_CASE("world 12, tensor 3, expert 2, laid out by hand") {
  const MeshShape mesh{12, 3, 2};
  mesh.Validate();
  CHECK(mesh.TensorGroup(7) == Group{6, 7, 8});
  CHECK(mesh.DataGroup(4) == Group{1, 4, 7, 10});
  CHECK(mesh.ExpertGroup(10) == Group{7, 10});
  CHECK(mesh.ExpertDataGroup(10) == Group{4, 10});
  CHECK(mesh.ExpertDataGroup(2) == Group{2, 8});
}

TEST_CASE("one axis alone") {
  CHECK(MeshShape{4, 1, 1}.DataGroup(2) == Group{0, 1, 2, 3});
  CHECK(MeshShape{4, 1, 1}.ExpertGroup(2) == Group{2});
  CHECK(MeshShape{4, 1, 1}.ExpertDataGroup(2) == Group{0, 1, 2, 3});
  CHECK(MeshShape{4, 4, 1}.TensorGroup(2) == Group{0, 1, 2, 3});
  CHECK(MeshShape{4, 4, 1}.DataGroup(2) == Group{2});
  CHECK(MeshShape{4, 1, 4}.ExpertGroup(3) == Group{0, 1, 2, 3});
  CHECK(MeshShape{4, 1, 4}.ExpertDataGroup(3) == Group{3});
}

TEST_CASE("every axis cuts the job into disjoint groups that hold their rank") {
  for (const int world : {1, 2, 6, 8, 16, 64}) {
    for (int tensor = 1; tensor <= world; ++tensor) {
      if (world % tensor != 0) continue;
      for (int expert = 1; expert <= world / tensor; ++expert) {
        const MeshShape mesh{world, tensor, expert};
        if (mesh.data() % expert != 0) continue;
        for (const auto group_of : {&MeshShape::TensorGroup, &MeshShape::DataGroup, &MeshShape::ExpertGroup,
                                    &MeshShape::ExpertDataGroup}) {
          std::set<Group> groups;
          for (int rank = 0; rank < world; ++rank) {
            const Group group = (mesh.*group_of)(rank);
            REQUIRE(std::count(group.begin(), group.end(), rank) == 1);
            groups.insert(group);
          }
          std::multiset<int> members;
          for (const Group& group : groups) members.insert(group.begin(), group.end());
          REQUIRE(members.size() == static_cast<size_t>(world));
        }
      }
    }
  }
}

TEST_CASE("axes that do not divide are refused with the nearest that do") {
  const auto error = [](MeshShape mesh) {
    try {
      mesh.Validate();
    } catch (const ConfigError& e) {
      return std::string(e.what()) + " | " + e.hint();
    }
    return std::string();
  };
  CHECK(error({8, 3, 1}) ==
        "parallel.tensor: 3 does not divide the 8 ranks of the job | nearest valid: parallel.tensor: 2 or 4");
  CHECK_THAT(error({4, 16, 1}), Contains("nearest valid: parallel.tensor: 4"));
  CHECK_THAT(error({4, 0, 1}), Contains("nearest valid: parallel.tensor: 1"));
  CHECK(
      error({16, 2, 3}) ==
      "parallel.expert: 3 does not divide the 8 data-parallel ranks (16 ranks / parallel.tensor 2) | nearest "
      "valid: parallel.expert: 2 or 4");
  CHECK(error({16, 2, 8}).empty());
}

TEST_CASE("the mesh's communicators run along the axes") {
  ThreadJob::Run(16, [](Transport& transport) {
    CommEngine engine(transport, {});
    const ProcessMesh mesh(engine, {16, 2, 4});
    const auto sum_of_ranks = [&](Communicator& comm) {
      double sum = transport.rank();
      comm.AllReduce({&sum, DType::kF64, {}});
      return sum;
    };
    const int tp = transport.rank() % 2, place = transport.rank() / 2;
    const bool ok = sum_of_ranks(mesh.world()) == 120 && sum_of_ranks(mesh.tp()) == 4 * place + 1 &&
                    sum_of_ranks(mesh.dp()) == 56 + 8 * tp &&
                    sum_of_ranks(mesh.ep()) == (place < 4 ? 12 : 44) + 4 * tp &&
                    sum_of_ranks(mesh.edp()) == 2 * (place % 4 * 2 + tp) + 8;
    if (!ok || mesh.edp().axis() != "edp") throw std::runtime_error("wrong group");
  });
}

}  // namespace
}  // namespace strata
