// One layer in every layout of expert, tensor and data parallelism, against one rank with the same
// micro-batches.
#include <catch2/catch.hpp>

#include "moe/layer_run.h"

namespace strata::testing {
namespace {

OracleProblem Wide(int64_t top_k) {
  OracleProblem p;
  p.config.num_experts = {8};
  p.config.top_k = top_k;
  p.config.min_capacity = 1;
  p.config.capacity_factor = 0.75;
  p.config.aux_loss_coefficient = 0.05;
  p.config.z_loss_coefficient = 0.02;
  p.shape = {6, 8, true, Activation::kGeluTanh, false, Initializer::Normal(1), Initializer::Normal(1)};
  p.grad_scale = 0.125;
  return p;
}

void CheckLikeOneRank(const OracleProblem& p, const LayerBatches& batches, const LayerLayout& layout) {
  INFO(layout.ranks << " ranks, tensor " << layout.tensor << ", expert " << layout.expert << ", top "
                    << p.config.top_k);
  const LayerResult one = RunLayer(p, batches), cut = RunLayer(p, batches, layout);
  CHECK(Difference(cut, one) < 2e-6);
  CHECK(cut.replicas_agree);
  for (size_t b = 0; b < batches.tokens.size(); ++b) {
    CHECK(cut.counts[b].load == one.counts[b].load);
    CHECK(cut.counts[b].kept == one.counts[b].kept);
    CHECK(cut.balance_loss[b] == one.balance_loss[b]);
  }
}

LayerLayout Layout(int ranks, int tensor, int expert) {
  LayerLayout layout;
  layout.ranks = ranks;
  layout.tensor = tensor;
  layout.expert = expert;
  return layout;
}

TEST_CASE("expert parallelism changes nothing, also where ranks have few tokens or none") {
  for (int64_t top_k : {1, 2, 3}) {
    for (int expert : {1, 2, 4}) {
      OracleProblem p = Wide(top_k);
      p.shape.gated = expert == 4;
      CheckLikeOneRank(p, {{9, 6, 11, 5}}, Layout(4, 1, expert));
      CheckLikeOneRank(p, {{7, 3, 0, 0, 4, 0, 0, 2}, true}, Layout(4, 1, expert));
    }
    CheckLikeOneRank(Wide(top_k), {{7, 3, 0, 0}}, Layout(2, 1, 2));
    CheckLikeOneRank(Wide(top_k), {{0, 0}}, Layout(2, 1, 2));
  }
}

TEST_CASE("tensor, expert and data parallelism together change nothing") {
  for (int64_t top_k : {1, 2}) {
    for (bool expert_tensor_parallel : {false, true}) {
      for (bool gated : {false, true}) {
        OracleProblem p = Wide(top_k);
        p.config.expert_tensor_parallel = expert_tensor_parallel;
        p.config.residual = gated;
        p.shape.gated = gated;
        // Capacity 3 of 23 tokens, 1 of 5 …: odd numbers of rows for two ranks to share.
        const LayerBatches batches{{23, 5, 0, 14}};
        CheckLikeOneRank(p, batches, Layout(2, 2, 1));
        CheckLikeOneRank(p, batches, Layout(4, 2, 2));
        CheckLikeOneRank(p, batches, Layout(8, 2, 2));
        CheckLikeOneRank(p, batches, Layout(8, 4, 2));
      }
    }
  }
}

TEST_CASE("noise is the same in every layout") {
  OracleProblem p = Wide(1);
  p.config.noisy_gate = MoeConfig::NoisyGate::kRsample;
  p.config.random_token_selection = true;
  CheckLikeOneRank(p, {{23, 9}}, Layout(4, 2, 2));
  p = Wide(2);
  p.config.noisy_gate = MoeConfig::NoisyGate::kJitter;
  CheckLikeOneRank(p, {{23, 9}}, Layout(4, 2, 2));
}

int64_t Bytes(const LayerResult& result) { return result.traffic.at("ep.all_to_all").bytes; }

TEST_CASE("dropping duplicates changes no bit, and the all-to-alls move 1/tp of the bytes") {
  for (int tensor : {2, 4}) {
    for (int64_t top_k : {1, 2}) {
      for (bool expert_tensor_parallel : {false, true}) {
        OracleProblem p = Wide(top_k);
        p.config.expert_tensor_parallel = expert_tensor_parallel;
        const LayerBatches batches{{23, 5, 1, 0}};
        const LayerLayout layout = Layout(2 * tensor, tensor, 2);
        p.config.drop_duplicates = false;
        const LayerResult whole = RunLayer(p, batches, layout);
        p.config.drop_duplicates = true;
        const LayerResult shares = RunLayer(p, batches, layout);
        INFO("tensor " << tensor << ", top " << top_k);
        CHECK(BitEqual(shares, whole));
        CHECK(shares.replicas_agree);
        CHECK(Bytes(shares) > 0);
        CHECK(tensor * Bytes(shares) == Bytes(whole));
      }
    }
  }
}

TEST_CASE("a row that changes ranks crosses the expert group four times: there and back, twice") {
  // With one expert chosen by everybody, on rank 0: rank 1's 10 rows travel.
  OracleProblem p = Wide(1);
  p.config.dispatch = MoeConfig::Dispatch::kDropless;
  const LayerBatches batches{{6, 10}};
  const LayerResult result = RunLayer(p, batches, Layout(2, 1, 2));
  int64_t moved = 0;
  for (size_t rank = 0; rank < 2; ++rank) {
    for (size_t e = 0; e < 8; ++e) moved += e / 4 == rank ? 0 : result.counts[rank].kept[e];
  }
  CHECK(Bytes(result) == 4 * moved * 6 * static_cast<int64_t>(sizeof(float)));
  CHECK(result.traffic.at("ep.all_to_all").count == 2 * 4);
}

TEST_CASE("stashed exchanges change no bit, and are not repeated") {
  OracleProblem p = Wide(2);
  p.config.residual = true;
  for (bool expert_tensor_parallel : {false, true}) {
    p.config.expert_tensor_parallel = expert_tensor_parallel;
    const LayerBatches batches{{23, 5}};
    LayerLayout layout = Layout(4, 2, 2);
    const LayerResult plain = RunLayer(p, batches, layout);
    layout.recompute = RecomputePolicy::kFull;
    const LayerResult stashed = RunLayer(p, batches, layout);
    layout.stash_collectives = false;
    const LayerResult repeated = RunLayer(p, batches, layout);
    CHECK(BitEqual(stashed, plain));
    CHECK(BitEqual(repeated, plain));
    for (const auto& [name, total] : plain.traffic) {
      INFO(name);
      CHECK(stashed.traffic.at(name).bytes == total.bytes);
      CHECK(stashed.traffic.at(name).count == total.count);
    }
    CHECK(2 * Bytes(repeated) == 3 * Bytes(plain));
  }
}

TEST_CASE("the auxiliary losses alone give the router the same gradient in every layout") {
  for (auto aux_loss : {MoeConfig::AuxLoss::kLayers, MoeConfig::AuxLoss::kPooled}) {
    for (double balance : {0.05, 0.0}) {
      OracleProblem p = Wide(2);
      p.config.sample_second_choice = false;
      p.config.aux_loss = aux_loss;
      p.config.aux_loss_coefficient = balance;
      p.config.z_loss_coefficient = balance == 0 ? 0.02 : 0;
      const LayerBatches batches{{9, 6, 11, 5}, true, /*dy_scale=*/0};
      const LayerResult one = RunLayer(p, batches);
      const std::vector<float>& gradient = one.gradient.at("gate.weight");
      CHECK(Difference(gradient, std::vector<float>(gradient.size())) > 1e-3);
      CHECK(Difference(gradient, OracleRun(p, batches).gradient.at("gate.weight"), 1e-3) < 1e-5);
      for (const LayerLayout& layout : {Layout(2, 1, 1), Layout(4, 1, 2), Layout(4, 1, 4), Layout(4, 2, 2)}) {
        const LayerResult cut = RunLayer(p, batches, layout);
        CHECK(Difference(cut.gradient.at("gate.weight"), gradient, 1e-3) < 1e-5);
        CHECK(cut.replicas_agree);
      }
    }
  }
}

TEST_CASE("experts that no rank's tokens take get a gradient of zero") {
  const LayerResult got = RunLayer(Wide(1), {{1, 1}}, Layout(2, 1, 2));
  const std::vector<float>& gradient = got.gradient.at("experts.out.weight");
  const auto each = static_cast<std::ptrdiff_t>(gradient.size() / 8);
  for (std::ptrdiff_t e = 0; e < 8; ++e) {
    const int64_t load = got.counts[0].load[e] + got.counts[1].load[e];
    const bool zero = std::all_of(gradient.begin() + e * each, gradient.begin() + (e + 1) * each,
                                  [](float g) { return g == 0.0f; });
    CHECK(zero == (load == 0));
  }
}

TEST_CASE("experts have the names, shapes and places of the whole") {
  ThreadJob::Run(8, [](Transport& transport) {
    CommEngine comm(transport, {});
    ProcessMesh mesh(comm, MeshShape{8, 2, 4});
    OracleProblem p = Wide(1);
    p.config.expert_tensor_parallel = true;
    p.shape.gated = true;
    MoeLayer layer(p.config, p.shape, 0, &mesh), alone(p.config, p.shape, 0);
    layer.AssignNames();
    alone.AssignNames();
    const std::vector<Parameter*> parts = layer.Parameters(), wholes = alone.Parameters();
    static std::mutex checks;
    std::lock_guard lock(checks);
    REQUIRE(parts.size() == wholes.size());
    for (size_t i = 0; i < parts.size(); ++i) {
      INFO(parts[i]->name);
      CHECK(parts[i]->name == wholes[i]->name);
      CHECK(parts[i]->global_shape == wholes[i]->shape);
      const bool is_expert = parts[i]->name.starts_with("experts.");
      CHECK(parts[i]->placement.over_expert == is_expert);
      CHECK(parts[i]->placement.over_tensor == (is_expert && parts[i]->name != "experts.out.bias"));
      CHECK(wholes[i]->placement.cuts.empty());
    }
    const Parameter& in = *parts[1];
    REQUIRE(in.name == "experts.in.weight");
    CHECK(in.shape == Shape{2, 8, 6});
    std::vector<int64_t> rows;  // of the whole's 8 · 16
    ForEachGlobalStretch(in, 0, in.shape.num_elements(), [&](int64_t, int64_t global, int64_t n) {
      for (int64_t at = global; at < global + n; at += 6) rows.push_back(at / 6);
    });
    const int64_t ep = mesh.ep().rank(), tp = mesh.tp().rank();
    std::vector<int64_t> expected;
    for (int64_t e = 2 * ep; e < 2 * ep + 2; ++e) {
      for (int64_t stack : {0, 8}) {
        for (int64_t j = 0; j < 4; ++j) expected.push_back(16 * e + stack + 4 * tp + j);
      }
    }
    CHECK(rows == expected);
  });
}

}  // namespace
}  // namespace strata::testing
