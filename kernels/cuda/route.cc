// Routing: which experts take which tokens, decided on the device without a word to the host.
//
// What must move is n · E logits in, as many probabilities out and a few integers a choice: 10 MB for 16,384
// tokens and 64 experts, 3 µs. So it is bound by starting its four kernels (six where places go by merit),
// one after the other, of 2–4 µs each, and from some million tokens · experts on by 60–70 % of the bandwidth.
// The exception is noise: 60 instructions an element.
//
// Tokens come in pieces of 32. ChooseExperts counts each piece's choices by expert; ScanPieces turns counts
// into the places at which a piece begins; in a piece a lane is a token, and the lanes before it that chose
// alike are counted by a ballot. So numbers are the same whatever runs first, and no table of tokens by
// experts is made.
#include "kernels/cuda/device_math.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/queue.h"

namespace strata::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / simt::kWarp;
constexpr int kPiece = 32;                // tokens of a piece: one a lane
constexpr float kSmallestSum = 0x1p-23f;  // of a token's surviving probabilities
constexpr size_t kMostSumBytes = 48 * 1024;

// What the kernels need of RouteArgs.
struct Routing {
  int64_t n, experts, pieces;
  int k;
  bool noisy_first, noisy_second, renormalize;
  RandomStream random;
  int64_t token_offset;
  double capacity_factor;
  int64_t min_capacity;

  // Counts, then places, lie by expert, choice and piece: in the order of an expert's places.
  __device__ int64_t Place(int64_t expert, int choice, int64_t piece) const {
    return (expert * k + choice) * pieces + piece;
  }
};

// Scores as integers of the same order, distinct for distinct experts: the larger score is the larger key,
// and the lower expert on ties. NaN comes last.
__device__ __forceinline__ uint64_t Key(float score, int64_t expert) {
  score += 0.0f;  // −0 is 0
  const uint32_t bits = __float_as_uint(score);
  const uint32_t ordered = score != score ? 0 : bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
  return uint64_t{ordered} << 32 | ~static_cast<uint32_t>(expert);
}

__device__ __forceinline__ float Gumbel(const RandomStream& random, uint64_t element) {
  return -logf(-logf(random.Uniform(element)));
}

// A warp's softmax: the row's maximum and Σ e^(x − max), in every lane.
struct PowerSum {
  float max, sum;
};
__device__ __forceinline__ PowerSum SumPowers(const float* x, int64_t experts) {
  const int lane = threadIdx.x % simt::kWarp;
  float max = -INFINITY, sum = 0;
  for (int64_t e = lane; e < experts; e += simt::kWarp) max = fmaxf(max, x[e]);
  max = WarpMax(max);
  for (int64_t e = lane; e < experts; e += simt::kWarp) sum += expf(x[e] - max);
  return {max, WarpSum(sum)};
}

// The largest key of an expert but `first` and below `bound`, in every lane.
template <class Score>
__device__ __forceinline__ uint64_t Best(int64_t experts, int64_t first, uint64_t bound, Score score) {
  uint64_t best = 0;
  for (int64_t e = threadIdx.x % simt::kWarp; e < experts; e += simt::kWarp) {
    const uint64_t key = Key(score(e), e);
    if (e != first && key < bound && key > best) best = key;
  }
  for (int offset = 16; offset > 0; offset >>= 1) {
    const uint64_t other = __shfl_xor_sync(simt::kAllLanes, best, offset);
    best = other > best ? other : best;
  }
  return best;
}

// The choices of token i, and their counts. Called by a whole warp.
__device__ __forceinline__ void Choose(const Routing& r, int64_t i, const float* x, int32_t* expert,
                                       int32_t* counts) {
  const auto noisy = [&](int64_t e) {
    return x[e] + Gumbel(r.random, static_cast<uint64_t>((r.token_offset + i) * r.experts + e));
  };
  const auto plain = [&](int64_t e) { return x[e]; };
  int64_t first = -1;
  uint64_t key = ~uint64_t{0};  // the last choice among plain scores
  for (int j = 0; j < r.k; ++j) {
    const bool noise = j == 0 ? r.noisy_first : r.noisy_second && j == 1;
    const uint64_t best =
        noise ? Best(r.experts, first, ~uint64_t{0}, noisy) : Best(r.experts, first, key, plain);
    const int64_t chosen = ~static_cast<uint32_t>(best);
    if (j == 0) first = chosen;
    if (j > 0) key = best;
    if (threadIdx.x % simt::kWarp != 0) continue;
    expert[i * r.k + j] = static_cast<int32_t>(chosen);
    atomicAdd(counts + r.Place(chosen, j, i / kPiece), 1);
  }
}

// A block takes a piece, a warp a token at a time: probabilities, choices and the piece's counts; parts[e,
// piece] becomes the piece's share of means[e].
__global__ void __launch_bounds__(kThreads)
    ChooseExperts(Routing r, const float* logits, const uint8_t* mask, float* probabilities, int32_t* expert,
                  int32_t* counts, float* parts) {
  SIMT_DYNAMIC_SHARED(float, shared);
  const int lane = threadIdx.x % simt::kWarp, warp = threadIdx.x / simt::kWarp,
            warps = blockDim.x / simt::kWarp;
  const int64_t piece = blockIdx.x, width = r.experts + 2;
  float* const sums = shared + warp * width;  // of this warp
  for (int64_t e = lane; e < width; e += simt::kWarp) sums[e] = 0;
  float squares = 0, tokens = 0;
  for (int64_t i = piece * kPiece + warp; i < (piece + 1) * kPiece && i < r.n; i += warps) {
    const float* const x = logits + i * r.experts;
    const bool real = mask == nullptr || mask[i] != 0;
    const PowerSum powers = SumPowers(x, r.experts);
    const float share = 1.0f / powers.sum;
    for (int64_t e = lane; e < r.experts; e += simt::kWarp) {
      const float p = expf(x[e] - powers.max) * share;
      probabilities[i * r.experts + e] = p;
      if (real) sums[e] += p;
    }
    if (real) {
      const float log_sum = powers.max + logf(powers.sum);
      squares += log_sum * log_sum;
      tokens += 1.0f;
      Choose(r, i, x, expert, counts);
    } else {
      for (int j = lane; j < r.k; j += simt::kWarp) expert[i * r.k + j] = -1;
    }
  }
  __syncwarp();  // the two last sums were cleared by other lanes
  if (lane == 0) {
    sums[r.experts] = squares;
    sums[r.experts + 1] = tokens;
  }
  __syncthreads();
  for (int64_t e = threadIdx.x; e < width; e += blockDim.x) {
    float sum = 0;
    for (int w = 0; w < warps; ++w) sum += shared[w * width + e];
    parts[e * r.pieces + piece] = sum;
  }
}

// Σ over the pieces of a row of `parts`, in every thread of the block.
template <typename V>
__device__ __forceinline__ V SumPieces(const float* parts, int64_t pieces) {
  V sum = 0;
  for (int64_t piece = threadIdx.x; piece < pieces; piece += kThreads) sum += static_cast<V>(parts[piece]);
  return BlockSum(sum);
}

__device__ __forceinline__ int64_t Capacity(const Routing& r, int64_t tokens) {
  const double share = static_cast<double>(tokens) / static_cast<double>(r.experts);
  const auto places = static_cast<int64_t>(ceil(share * r.capacity_factor * r.k));
  return min(tokens, max(r.min_capacity, places));
}

// Block e < E: means[e], the expert's load, and its counts become places. The two other blocks: the other
// means.
__global__ void __launch_bounds__(kThreads)
    ScanPieces(Routing r, const float* parts, int32_t* counts, float* means, int32_t* load, int32_t* kept,
               int32_t* first_load) {
  constexpr int kOwn = 4;  // counts that a thread takes between barriers
  const int64_t e = blockIdx.x;
  const auto mean = SumPieces<float>(parts + e * r.pieces, r.pieces);
  if (threadIdx.x == 0) means[e] = mean;
  if (e >= r.experts) return;
  const auto tokens = SumPieces<int>(parts + (r.experts + 1) * r.pieces, r.pieces);

  int32_t* const own = counts + r.Place(e, 0, 0);
  const int64_t n = r.k * r.pieces;
  int total = 0, first = 0;
  for (int64_t begin = int64_t{threadIdx.x} * kOwn; begin - threadIdx.x * kOwn < n;
       begin += kThreads * kOwn) {
    int count[kOwn], sum = 0, all = 0;
    for (int q = 0; q < kOwn; ++q) {
      count[q] = begin + q < n ? own[begin + q] : 0;
      sum += count[q];
      if (begin + q < r.pieces) first += count[q];
    }
    int place = total + BlockSumBefore(sum, &all);
    for (int q = 0; q < kOwn; ++q) {
      if (begin + q < n) own[begin + q] = place;
      place += count[q];
    }
    total += all;
  }
  first = BlockSum(first);
  if (threadIdx.x != 0) return;
  load[e] = total;
  kept[e] = r.capacity_factor == 0 ? total : static_cast<int32_t>(min(int64_t{total}, Capacity(r, tokens)));
  if (first_load != nullptr) first_load[e] = first;
}

// begins[e] = Σ counts of the experts before e; begins[E] = Σ all. One block each for two sets of counts.
__global__ void __launch_bounds__(kThreads)
    ScanExperts(const int32_t* kept, const int32_t* load, int32_t* kept_begins, int32_t* load_begins,
                int64_t experts) {
  const int32_t* const counts = blockIdx.x == 0 ? kept : load;
  int32_t* const begins = blockIdx.x == 0 ? kept_begins : load_begins;
  int total = 0;
  for (int64_t base = 0; base < experts; base += kThreads) {
    const int64_t e = base + threadIdx.x;
    int all = 0;
    const int before = BlockSumBefore(e < experts ? counts[e] : 0, &all);
    if (e < experts) begins[e] = total + before;
    total += all;
  }
  if (threadIdx.x == 0) begins[experts] = total;
}

// Calls body(j, expert, place) for every choice of the lane's token i, which is one of the warp's piece:
// place is the number of the choice among those of its expert. Called by a whole warp.
template <class Body>
__device__ __forceinline__ void ForPlaces(const Routing& r, const int32_t* expert, const int32_t* places,
                                          int64_t i, Body body) {
  const unsigned below = (1u << threadIdx.x % simt::kWarp) - 1;
  for (int j = 0; j < r.k; ++j) {
    const int chosen = i < r.n ? expert[i * r.k + j] : -1;
    unsigned alike = 0;
    for (int l = 0; l < simt::kWarp; ++l) {
      alike |= (__shfl_sync(simt::kAllLanes, chosen, l) == chosen ? 1u : 0u) << l;
    }
    const int place = chosen < 0 ? -1 : places[r.Place(chosen, j, i / kPiece)] + __popc(alike & below);
    if (i < r.n) body(j, chosen, place);
  }
}

// The token whose lane this is: warp w of the grid has piece w.
__device__ __forceinline__ int64_t OwnToken() { return int64_t{blockIdx.x} * kThreads + threadIdx.x; }

// The weights of token i, whose rows are known, and the end of `token`.
__device__ __forceinline__ void Weigh(const Routing& r, int64_t i, const float* probabilities,
                                      const int32_t* expert, const int32_t* row, int32_t kept, float* weight,
                                      int32_t* token) {
  const auto share = [&](int64_t at) {
    return row[at] < 0 ? 0.0f : probabilities[i * r.experts + expert[at]];
  };
  float sum = 0;
  for (int64_t at = i * r.k; at < (i + 1) * r.k; ++at) sum += share(at);
  const bool divide = r.k >= 2 || r.renormalize;
  for (int64_t at = i * r.k; at < (i + 1) * r.k; ++at) {
    weight[at] = divide ? share(at) / fmaxf(sum, kSmallestSum) : share(at);
    if (at >= kept) token[at] = -1;
  }
}

// First come, first served: a choice is kept if its place is one that the expert has.
__global__ void __launch_bounds__(kThreads)
    NumberChoices(Routing r, const float* probabilities, const int32_t* expert, const int32_t* places,
                  const int32_t* kept, const int32_t* begins, int32_t* row, float* weight, int32_t* token) {
  const int64_t i = OwnToken();
  ForPlaces(r, expert, places, i, [&](int j, int chosen, int place) {
    const bool placed = chosen >= 0 && place < kept[chosen];
    const int number = placed ? begins[chosen] + place : -1;
    row[i * r.k + j] = number;
    if (placed) token[number] = static_cast<int32_t>(i);
  });
  if (i < r.n) Weigh(r, i, probabilities, expert, row, begins[r.experts], weight, token);
}

// choices[begins[e] … begins[e + 1]) become the choices i · k + j of expert e, in the order of places.
__global__ void __launch_bounds__(kThreads)
    ListChoices(Routing r, const int32_t* expert, const int32_t* places, const int32_t* begins,
                int32_t* choices, int32_t* row) {
  const int64_t i = OwnToken();
  ForPlaces(r, expert, places, i, [&](int j, int chosen, int place) {
    const int64_t at = i * r.k + j;
    row[at] = -1;
    if (chosen >= 0) choices[begins[chosen] + place] = static_cast<int32_t>(at);
  });
}

// The key of the `places`-th largest of `n` distinct keys: eight digits, most significant first (radix
// selection). Called by all threads of the block; 0 if there is a place for all.
template <class KeyOf>
__device__ __forceinline__ uint64_t Threshold(int n, int places, KeyOf key_of) {
  SIMT_SHARED(int, counts, [kThreads]);  // by digit
  SIMT_SHARED(int, found, [2]);          // the digit, and the keys above it
  if (places >= n) return 0;
  uint64_t prefix = 0;
  const int thread = static_cast<int>(threadIdx.x), digit = kThreads - 1 - thread;
  for (int shift = 56; shift >= 0; shift -= 8) {
    counts[thread] = 0;
    __syncthreads();
    for (int at = thread; at < n; at += kThreads) {
      const uint64_t key = key_of(at);
      if (shift == 56 || key >> (shift + 8) == prefix) atomicAdd(&counts[key >> shift & 255], 1);
    }
    __syncthreads();
    int all = 0;
    const int count = counts[digit], above = BlockSumBefore(count, &all);
    if (above < places && places <= above + count) {
      found[0] = digit;
      found[1] = above;
    }
    __syncthreads();
    prefix = prefix << 8 | static_cast<uint64_t>(found[0]);
    places -= found[1];
    __syncthreads();  // everybody has read what the next digit overwrites
  }
  return prefix;
}

// Block e numbers the choices of expert e that have the largest merit: p, or random bits for k = 1.
__global__ void __launch_bounds__(kThreads)
    SelectChoices(Routing r, const float* probabilities, const int32_t* choices, const int32_t* load_begins,
                  const int32_t* kept, const int32_t* kept_begins, int32_t* row, int32_t* token) {
  const int64_t e = blockIdx.x;
  const int32_t* const own = choices + load_begins[e];
  const int n = load_begins[e + 1] - load_begins[e], number = kept_begins[e];
  RandomStream random = r.random;
  ++random.purpose;
  const auto key_of = [&](int at) {
    const int i = own[at] / r.k;
    const uint32_t merit = r.k == 1 ? random.Bits(static_cast<uint64_t>(r.token_offset + i))
                                    : __float_as_uint(probabilities[i * r.experts + e]);
    return uint64_t{merit} << 32 | ~static_cast<uint32_t>(i);  // the lower token on ties
  };
  const uint64_t threshold = Threshold(n, kept[e], key_of);
  int before = 0;
  for (int base = 0; base < n; base += kThreads) {
    const int at = base + static_cast<int>(threadIdx.x);
    const bool keep = at < n && key_of(at) >= threshold;
    int all = 0;
    const int place = number + before + BlockSumBefore(keep ? 1 : 0, &all);
    before += all;
    if (!keep) continue;
    row[own[at]] = place;
    token[place] = own[at] / r.k;
  }
}

__global__ void __launch_bounds__(kThreads)
    WeighChoices(Routing r, const float* probabilities, const int32_t* expert, const int32_t* row,
                 const int32_t* begins, float* weight, int32_t* token) {
  const int64_t i = OwnToken();
  if (i < r.n) Weigh(r, i, probabilities, expert, row, begins[r.experts], weight, token);
}

// What RouteBackwardTokens needs of RouteBackwardArgs.
struct Gradients {
  int64_t n, experts;
  int k;
  bool renormalize;
  float z_scale;
};

// A warp takes a token. With g = ∂loss/∂p: dlogits = p ∘ (g − Σ p g) + 2 z_scale · logsumexp · p. Weights w =
// p/s, s = Σ p over the survivors, give g = (dw − Σ w dw)/s, and dw/s where s is held from below.
__global__ void __launch_bounds__(kThreads)
    RouteBackwardTokens(Gradients r, const float* logits, const uint8_t* mask, const float* probabilities,
                        const int32_t* expert, const int32_t* row, const float* weight, const float* dweight,
                        const float* balance, float* dlogits) {
  const int lane = threadIdx.x % simt::kWarp;
  for (int64_t i = int64_t{blockIdx.x} * kWarps + threadIdx.x / simt::kWarp; i < r.n;
       i += int64_t{gridDim.x} * kWarps) {
    const float* const p = probabilities + i * r.experts;
    float* const to = dlogits + i * r.experts;
    const bool real = mask == nullptr || mask[i] != 0;
    const int64_t begin = i * r.k, end = dweight != nullptr ? begin + r.k : begin;
    float sum = 0, dot = 0;  // of survivors: Σ p, Σ w dw
    for (int64_t at = begin; at < end; ++at) {
      if (row[at] < 0) continue;
      sum += p[expert[at]];
      dot += weight[at] * dweight[at];
    }
    const bool divide = r.k >= 2 || r.renormalize, held = sum < kSmallestSum;
    const auto gradient = [&](int64_t at) {
      return divide ? (dweight[at] - (held ? 0.0f : dot)) / (held ? kSmallestSum : sum) : dweight[at];
    };
    float mean = 0;
    for (int64_t e = lane; e < r.experts && balance != nullptr; e += simt::kWarp) mean += p[e] * balance[e];
    mean = WarpSum(mean);
    for (int64_t at = begin; at < end; ++at) {
      if (row[at] >= 0) mean += p[expert[at]] * gradient(at);
    }
    float level = -mean;
    if (r.z_scale != 0.0f) {
      const PowerSum powers = SumPowers(logits + i * r.experts, r.experts);
      level += 2.0f * r.z_scale * (powers.max + logf(powers.sum));
    }
    for (int64_t e = lane; e < r.experts; e += simt::kWarp) {
      to[e] = real ? p[e] * (level + (balance != nullptr ? balance[e] : 0.0f)) : 0.0f;
    }
    for (int64_t at = begin; at < end; ++at) {  // by the lane that wrote the element
      if (row[at] >= 0 && expert[at] % simt::kWarp == lane) to[expert[at]] += p[expert[at]] * gradient(at);
    }
  }
}

}  // namespace

void route(const KernelContext& context, const RouteArgs& args) {
  Queue queue(context, "route", {args.logits, args.mask, args.expert});
  const int64_t n = args.logits.rows(), experts = args.logits.cols(), pieces = CeilDiv(n, kPiece);
  const Routing r{n,
                  experts,
                  pieces,
                  args.top_k,
                  args.noisy_first,
                  args.noisy_second && args.top_k == 2,
                  args.renormalize,
                  args.random,
                  args.token_offset,
                  args.capacity_factor,
                  args.min_capacity};
  const auto* logits = Pointer<float>(args.logits);
  const auto* mask = Pointer<uint8_t>(args.mask);
  auto *probabilities = Pointer<float>(args.probabilities), *weight = Pointer<float>(args.weight);
  auto *expert = Pointer<int32_t>(args.expert), *row = Pointer<int32_t>(args.row);
  auto *token = Pointer<int32_t>(args.token), *kept = Pointer<int32_t>(args.kept),
       *load = Pointer<int32_t>(args.load);

  const int64_t num_counts = experts * r.k * pieces;
  auto* counts = queue.Scratch<int32_t>(num_counts + 1);
  auto* parts = queue.Scratch<float>((experts + 2) * pieces + 1);
  auto* kept_begins = queue.Scratch<int32_t>(experts + 1);
  auto* load_begins = queue.Scratch<int32_t>(experts + 1);
  if (n > 0) {
    // Each warp has sums of its own in shared memory: fewer warps where there are very many experts.
    int warps = kWarps;
    const auto bytes = [&] { return static_cast<size_t>(warps * (experts + 2)) * sizeof(float); };
    while (warps > 1 && bytes() > kMostSumBytes) warps /= 2;
    STRATA_CHECK(bytes() <= kMostSumBytes)
        << "route: " << experts << " experts are more than fit in shared memory";
    queue.Clear(counts, static_cast<size_t>(num_counts) * sizeof(int32_t));
    queue.Run(ChooseExperts, static_cast<unsigned>(pieces), warps * simt::kWarp, bytes(), r, logits, mask,
              probabilities, expert, counts, parts);
  }
  queue.Run(ScanPieces, static_cast<unsigned>(experts + 2), kThreads, 0, r, parts, counts,
            Pointer<float>(args.means), load, kept, Pointer<int32_t>(args.first_load));
  if (n == 0) return;
  queue.Run(ScanExperts, 2, kThreads, 0, kept, load, kept_begins, load_begins, experts);

  const auto blocks = static_cast<unsigned>(CeilDiv(n, kThreads));
  const bool by_merit = args.capacity_factor != 0 && (r.k >= 3 || (r.k == 1 && args.random_selection));
  if (!by_merit) {
    queue.Run(NumberChoices, blocks, kThreads, 0, r, probabilities, expert, counts, kept, kept_begins, row,
              weight, token);
    return;
  }
  auto* choices = queue.Scratch<int32_t>(n * r.k);
  queue.Run(ListChoices, blocks, kThreads, 0, r, expert, counts, load_begins, choices, row);
  queue.Run(SelectChoices, static_cast<unsigned>(experts), kThreads, 0, r, probabilities, choices,
            load_begins, kept, kept_begins, row, token);
  queue.Run(WeighChoices, blocks, kThreads, 0, r, probabilities, expert, row, kept_begins, weight, token);
}

void route_backward(const KernelContext& context, const RouteBackwardArgs& args) {
  const Queue queue(context, "route_backward", {args.logits, args.mask, args.expert});
  const int64_t n = args.logits.rows(), experts = args.logits.cols();
  if (n == 0) return;
  const Gradients r{n, experts, args.top_k, args.renormalize, args.z_scale};
  queue.Run(RouteBackwardTokens, GridStride(queue, n, kWarps), kThreads, 0, r, Pointer<float>(args.logits),
            Pointer<uint8_t>(args.mask), Pointer<float>(args.probabilities), Pointer<int32_t>(args.expert),
            Pointer<int32_t>(args.row), Pointer<float>(args.weight), Pointer<float>(args.dweight),
            Pointer<float>(args.balance), Pointer<float>(args.dlogits));
}

}  // namespace strata::cuda
