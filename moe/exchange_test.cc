// Rows on their way to the experts and back: every row arrives once, where it belongs, and comes back.
#include "moe/exchange.h"

#include <catch2/catch.hpp>
#include <mutex>

#include "parallel/host_communicator.h"
#include "runtime/autograd/resident_parameters.h"

namespace strata {
namespace {

constexpr int64_t kCols = 2;

// Rows of each expert from each source rank: some experts popular, some without rows, a rank without any.
int32_t RowsOf(int64_t source, int64_t expert, uint32_t seed) {
  if (source == 1 && seed % 2 == 1) return 0;
  const uint32_t draw = RandomStream{seed, 0, 0}.Bits(static_cast<uint64_t>(source * 64 + expert));
  return static_cast<int32_t>(draw % 3 == 0 ? 0 : draw / 3 % 7);
}

// What row `i` of an expert's rows from a source holds.
float Content(int64_t source, int64_t expert, int64_t i, int64_t col) {
  return static_cast<float>(source * 10000 + expert * 100 + i * 10 + col);
}

void CheckExchange(int ranks, int tensor, int expert, int64_t num_experts, bool drop_duplicates,
                   uint32_t seed) {
  ThreadJob::Run(ranks, [&](Transport& transport) {
    auto device = NewCpuDevice(1);
    Executor executor(*device, CpuKernels());
    CommEngine comm(transport, {});
    ProcessMesh mesh(comm, MeshShape{ranks, tensor, expert});
    ResidentParameters none(executor, {}, DType::kF32);
    Tape tape(executor, none, {});
    const int64_t me = mesh.ep().rank();

    // The tokens lie in the reverse order of the rows.
    Routed routed;
    std::vector<float> rows;
    for (int64_t e = 0; e < num_experts; ++e) {
      routed.rows.push_back(RowsOf(me, e, seed));
      for (int64_t i = 0; i < routed.rows.back(); ++i) {
        for (int64_t col = 0; col < kCols; ++col) rows.push_back(Content(me, e, i, col));
      }
    }
    const auto n = static_cast<int64_t>(rows.size()) / kCols;
    routed.kept = tape.Upload({routed.rows.data(), DType::kI32, {num_experts}});
    std::vector<float> tokens(rows.size());
    std::vector<int32_t> token(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) {
      token[static_cast<size_t>(i)] = static_cast<int32_t>(n - 1 - i);
      std::copy_n(rows.begin() + i * kCols, kCols, tokens.begin() + (n - 1 - i) * kCols);
    }
    const Tensor index = tape.Upload({token.data(), DType::kI32, {n}});

    const ExpertExchange exchange(tape, ExpertRanks(&mesh, drop_duplicates), routed);
    const Tensor arrived =
        exchange.Send(tape, tape.Upload({tokens.data(), DType::kF32, {n, kCols}}), index.view());
    const Tensor same = exchange.Send(tape, tape.Upload({rows.data(), DType::kF32, {n, kCols}}));
    const Tensor back = exchange.Return(tape, arrived);

    std::vector<float> expected;
    std::vector<int32_t> offsets{0};
    const int64_t here = num_experts / expert;
    for (int64_t e = me * here; e < (me + 1) * here; ++e) {
      for (int64_t source = 0; source < expert; ++source) {
        for (int64_t i = 0; i < RowsOf(source, e, seed); ++i) {
          for (int64_t col = 0; col < kCols; ++col) expected.push_back(Content(source, e, i, col));
        }
      }
      offsets.push_back(static_cast<int32_t>(expected.size() / kCols));
    }
    auto values = [](const Tensor& t) {
      return std::vector<float>(t.view().f32(), t.view().f32() + t.view().num_elements());
    };
    static std::mutex checks;  // Catch's macros take one thread at a time
    std::lock_guard lock(checks);
    INFO("tensor " << tensor << ", expert " << expert << ", seed " << seed);
    CHECK(exchange.token_rows() == n);
    CHECK(exchange.expert_rows() == offsets.back());
    const TensorView got = exchange.offsets();
    CHECK(std::vector<int32_t>(got.as<int32_t>(), got.as<int32_t>() + got.num_elements()) == offsets);
    CHECK(values(arrived) == expected);
    CHECK(values(same) == expected);
    CHECK(values(back) == rows);
  });
}

TEST_CASE("every row arrives once, by expert and source, and comes back") {
  for (uint32_t seed = 0; seed < 6; ++seed) {
    for (bool drop_duplicates : {false, true}) {
      CheckExchange(1, 1, 1, 4, drop_duplicates, seed);
      CheckExchange(2, 2, 1, 4, drop_duplicates, seed);
      CheckExchange(2, 1, 2, 2, drop_duplicates, seed);
      CheckExchange(4, 1, 4, 8, drop_duplicates, seed);
      CheckExchange(4, 2, 2, 6, drop_duplicates, seed);
      CheckExchange(8, 4, 2, 4, drop_duplicates, seed);
      CheckExchange(6, 3, 2, 4, drop_duplicates, seed);
      CheckExchange(8, 2, 2, 2, drop_duplicates, seed);  // two expert groups
    }
  }
}

}  // namespace
}  // namespace strata
