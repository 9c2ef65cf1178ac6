#include "data/loader.h"

#include <catch2/catch.hpp>

#include "runtime/base/error.h"

namespace strata {
namespace {

// Sample i is a row of i, to predict i + 1; one sample may be broken.
class Numbers : public Dataset {
 public:
  explicit Numbers(int64_t size, int64_t broken = -1) : size_(size), broken_(broken) {}
  int64_t num_samples() const override { return size_; }
  int64_t seq_len() const override { return 3; }
  uint64_t fingerprint() const override { return 1; }
  void Get(int64_t sample, int64_t, SampleRow row) const override {
    if (sample == broken_) throw DataError("sample is broken");
    std::fill(row.inputs.begin(), row.inputs.end(), static_cast<int32_t>(sample));
    std::fill(row.targets.begin(), row.targets.end(), static_cast<int32_t>(sample + 1));
  }

 private:
  int64_t size_, broken_;
};

std::unique_ptr<Sampler> Shuffled(int64_t size, int64_t batch, const SamplerState* state = nullptr) {
  auto sampler = std::make_unique<ShuffledSampler>(size, batch, 5);
  if (state != nullptr) sampler->Restore(*state);
  return sampler;
}

TEST_CASE("ranks together see each step's global batch, whatever their number") {
  const Numbers dataset(50);
  ShuffledSampler reference(50, 12, 5);
  std::vector<std::vector<int64_t>> expected;
  for (int step = 1; step <= 6; ++step) expected.push_back(reference.Next(step).samples);
  for (int64_t ranks : {1, 2, 3, 6}) {
    std::vector<std::vector<int64_t>> seen(6, std::vector<int64_t>(12, -1));
    for (int64_t rank = 0; rank < ranks; ++rank) {
      Loader loader(dataset, Shuffled(50, 12), {.micro_batch_size = 2, .dp_rank = rank, .dp_size = ranks});
      for (int step = 1; step <= 6; ++step) {
        for (int64_t micro = 0; micro < 6 / ranks; ++micro) {
          const Batch batch = loader.Next();
          CHECK(batch.step == step);
          CHECK(batch.micro_batch == micro);
          CHECK(batch.num_micro_batches == 6 / ranks);
          for (int64_t row = 0; row < 2; ++row) {
            CHECK(batch.inputs[row * 3] == batch.sample_ids[row]);
            seen[step - 1][batch.first_row + row] = batch.sample_ids[row];
          }
        }
      }
    }
    CHECK(seen == expected);
  }
}

TEST_CASE("stopped twice within an epoch, the samples are the unbroken run's") {
  const Numbers dataset(50);
  const LoaderOptions options{.micro_batch_size = 2, .prefetch = 7};
  const auto take = [](Loader& loader, int micro_batches, std::vector<int64_t>* ids) {
    for (int i = 0; i < micro_batches; ++i) {
      for (int64_t id : loader.Next().sample_ids) ids->push_back(id);
    }
  };
  std::vector<int64_t> unbroken, broken;
  Loader whole(dataset, Shuffled(50, 4), options);
  take(whole, 20, &unbroken);

  SamplerState state;
  {
    Loader first(dataset, Shuffled(50, 4), options);
    take(first, 6, &broken);  // three steps, while more are prepared
    state = first.state();
  }
  {
    Loader second(dataset, Shuffled(50, 4, &state), {.micro_batch_size = 2, .first_step = 4});
    take(second, 4, &broken);
    CHECK(second.state().at("cursor") == 20);
    state = second.state();
  }
  Loader third(dataset, Shuffled(50, 4, &state), {.micro_batch_size = 2, .first_step = 6, .prefetch = 1});
  CHECK(third.state() == state);
  take(third, 10, &broken);
  CHECK(broken == unbroken);
}

TEST_CASE("within a step the state is still that of the step's begin") {
  const Numbers dataset(50);
  Loader loader(dataset, Shuffled(50, 4), {.micro_batch_size = 2});
  CHECK(loader.state().at("cursor") == 0);
  loader.Next();
  CHECK(loader.state().at("cursor") == 0);
  loader.Next();
  CHECK(loader.state().at("cursor") == 4);
}

TEST_CASE("a sampler decides length and size of each step") {
  class Growing : public Sampler {
   public:
    GlobalBatch Next(int64_t step) override {
      return {std::vector<int64_t>(static_cast<size_t>(2 * step), step), std::min<int64_t>(step, 3)};
    }
    SamplerState state() const override { return {{"none", 0}}; }
    void Restore(const SamplerState&) override {}
  };
  const Numbers dataset(50);
  Loader loader(dataset, std::make_unique<Growing>(), {.micro_batch_size = 2});
  for (int64_t step = 1; step <= 4; ++step) {
    for (int64_t micro = 0; micro < step; ++micro) {
      const Batch batch = loader.Next();
      CHECK(batch.step == step);
      CHECK(batch.num_micro_batches == step);
      CHECK(batch.seq_len == std::min<int64_t>(step, 3));
    }
  }
}

TEST_CASE("a fault in the data comes out where the batch would have, after the good ones") {
  const Numbers broken(8, ShuffledSampler(8, 2, 5).Next(1).samples[1]);
  Loader at_once(broken, Shuffled(8, 2), {.micro_batch_size = 2});
  CHECK_THROWS_AS(at_once.Next(), DataError);
  CHECK_THROWS_AS(at_once.Next(), DataError);

  ShuffledSampler order(8, 2, 5);
  order.Next(1);
  order.Next(2);
  const Numbers later(8, order.Next(3).samples[0]);
  Loader loader(later, Shuffled(8, 2), {.micro_batch_size = 2});
  CHECK_NOTHROW(loader.Next());
  CHECK_NOTHROW(loader.Next());
  CHECK_THROWS_WITH(loader.Next(), Catch::Contains("broken"));
}

TEST_CASE("a global batch that does not divide is refused with the numbers") {
  const Numbers dataset(50);
  Loader loader(dataset, Shuffled(50, 10), {.micro_batch_size = 4, .dp_size = 2});
  CHECK_THROWS_WITH(loader.Next(),
                    Catch::Contains("10 samples") && Catch::Contains("of 4") && Catch::Contains("2 ranks"));
}

}  // namespace
}  // namespace strata
