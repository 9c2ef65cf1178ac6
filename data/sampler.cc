#include "data/sampler.h"

#include <bit>

#include "runtime/base/error.h"
#include "runtime/base/rng.h"

namespace strata {

namespace {
// Four suffice for a pseudorandom permutation of a large domain (Luby and Rackoff 1988). With halves of one
// or two bits all orders are equally likely only after many more: 12 still fail the test of uniformity over
// five samples.
constexpr int kRounds = 16;
}  // namespace

EpochPermutation::EpochPermutation(uint64_t size, uint64_t seed, uint32_t epoch)
    : size_(size), seed_(seed), epoch_(epoch) {
  STRATA_CHECK(size >= 1 && size <= uint64_t{1} << 62) << size;
  const int bits = static_cast<int>(std::bit_width(size - 1));
  low_bits_ = bits - bits / 2;
  high_bits_ = bits / 2;
}

uint64_t EpochPermutation::operator()(uint64_t index) const {
  STRATA_CHECK(index < size_) << index << " of " << size_;
  uint64_t value = index;
  do {
    value = Scramble(value);
  } while (value >= size_);
  return value;
}

// Halves change places each round, and with them their widths; the number of rounds is even, which puts them
// back.
uint64_t EpochPermutation::Scramble(uint64_t value) const {
  const RandomStream random{seed_, Purpose("epoch permutation"), epoch_};
  int high_bits = high_bits_, low_bits = low_bits_;
  uint64_t high = value >> low_bits, low = value & ((uint64_t{1} << low_bits) - 1);
  for (uint64_t round = 0; round < kRounds; ++round) {
    const uint32_t noise = random.Block(round << 32 | low)[0];
    const uint64_t mixed = high ^ (noise & ((uint64_t{1} << high_bits) - 1));
    high = low;
    low = mixed;
    std::swap(high_bits, low_bits);
  }
  return high << low_bits | low;
}

ShuffledSampler::ShuffledSampler(int64_t num_samples, int64_t global_batch_size, uint64_t seed)
    : num_samples_(num_samples), global_batch_size_(global_batch_size), seed_(seed) {
  STRATA_CHECK(num_samples >= 1 && global_batch_size >= 1) << num_samples << ", " << global_batch_size;
}

GlobalBatch ShuffledSampler::Next(int64_t) {
  GlobalBatch batch;
  batch.samples.reserve(static_cast<size_t>(global_batch_size_));
  for (int64_t left = global_batch_size_; left > 0;) {
    const EpochPermutation order(static_cast<uint64_t>(num_samples_), seed_, static_cast<uint32_t>(epoch_));
    for (; left > 0 && cursor_ < num_samples_; --left) {
      batch.samples.push_back(static_cast<int64_t>(order(static_cast<uint64_t>(cursor_++))));
    }
    if (cursor_ == num_samples_) {
      ++epoch_;
      cursor_ = 0;
    }
  }
  return batch;
}

SamplerState ShuffledSampler::state() const {
  return {{"samples", num_samples_}, {"epoch", epoch_}, {"cursor", cursor_}};
}

void ShuffledSampler::Restore(const SamplerState& state) {
  const auto get = [&](const char* key) {
    const auto it = state.find(key);
    if (it == state.end() || it->second < 0) {
      throw CheckpointError(StrCat("the sampler's state has no valid \"", key, "\""),
                            state.contains("pools")
                                ? "the checkpoint was trained with a curriculum: resume with data.curriculum"
                            : state.contains("corpora")
                                ? "the checkpoint was trained with a mixture: resume with data.mix"
                                : "the checkpoint is damaged, or was saved with another sampler");
    }
    return it->second;
  };
  const int64_t samples = get("samples"), epoch = get("epoch"), cursor = get("cursor");
  if (samples != num_samples_ || cursor >= num_samples_) {
    throw CheckpointError(StrCat("the checkpoint stands at sample ", cursor, " of ", samples,
                                 ", the data now has ", num_samples_),
                          "resume with the data and sequence length that it was trained with");
  }
  epoch_ = epoch;
  cursor_ = cursor;
}

}  // namespace strata
