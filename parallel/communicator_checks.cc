#include "parallel/communicator_checks.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <type_traits>

#include "runtime/base/error.h"

namespace strata {
namespace {

template <typename T>
TensorView View(std::vector<T>& x) {
  return {x.data(), kDTypeOf<T>, {static_cast<int64_t>(x.size())}};
}

// Element i of what `rank` contributes: of magnitudes so different that another order of summing shows.
template <typename T>
T Value(int rank, int64_t i) {
  constexpr float kScales[] = {1.0f / 256, 1.0f / 16, 1.0f, 16.0f};
  const uint32_t hash = (static_cast<uint32_t>(i) * 8 + static_cast<uint32_t>(rank)) * 2654435761u;
  const int n = static_cast<int>(hash >> 21) - 1023;
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(n);
  } else {
    return T(static_cast<float>(n) * kScales[hash >> 12 & 3]);
  }
}

template <typename T>
std::vector<T> Values(int rank, int64_t count, int64_t begin = 0) {
  std::vector<T> x(count);
  for (int64_t i = 0; i < count; ++i) x[i] = Value<T>(rank, begin + i);
  return x;
}

// Element i of the sum over `size` ranks, in rank order, in fp32 for short floats.
template <typename T>
auto PlainSum(int size, int64_t i) {
  using Acc = std::conditional_t<sizeof(T) == 2, float, T>;
  Acc sum = static_cast<Acc>(Value<T>(0, i));
  for (int rank = 1; rank < size; ++rank) sum += static_cast<Acc>(Value<T>(rank, i));
  return sum;
}

template <typename T>
void ExpectSame(const std::vector<T>& got, const std::vector<T>& expected, const std::string& what) {
  Expect(got.size() == expected.size() &&
             (got.empty() || std::memcmp(got.data(), expected.data(), got.size() * sizeof(T)) == 0),
         what);
}

template <typename T>
void CheckGather(Communicator& comm, int64_t n) {
  const std::string what = StrCat("all_gather of ", n, " ", Name(kDTypeOf<T>));
  std::vector<T> expected;
  for (int r = 0; r < comm.size(); ++r) {
    const std::vector<T> shard = Values<T>(r, n);
    expected.insert(expected.end(), shard.begin(), shard.end());
  }
  std::vector<T> shard = Values<T>(comm.rank(), n), out(n * comm.size());
  comm.AllGather(View(shard), View(out));
  ExpectSame(out, expected, what);

  std::vector<T> in_place(n * comm.size());
  std::copy(shard.begin(), shard.end(), in_place.begin() + n * comm.rank());
  comm.AllGather(View(in_place).Slice(n * comm.rank(), n), View(in_place));
  ExpectSame(in_place, expected, what + " in place");
}

template <typename T, typename Out>
void CheckScatter(Communicator& comm, int64_t n) {
  const std::string what =
      StrCat("reduce_scatter of ", n, " ", Name(kDTypeOf<T>), " to ", Name(kDTypeOf<Out>));
  std::vector<T> in = Values<T>(comm.rank(), n * comm.size());
  std::vector<Out> out(n), expected(n);
  for (int64_t i = 0; i < n; ++i) expected[i] = Out(PlainSum<T>(comm.size(), comm.rank() * n + i));
  comm.ReduceScatter(View(in), View(out));
  ExpectSame(out, expected, what);
  ExpectSame(in, Values<T>(comm.rank(), n * comm.size()), what + ": input");
  if constexpr (std::is_same_v<T, Out>) {
    comm.ReduceScatter(View(in), View(in).Slice(comm.rank() * n, n));
    ExpectSame(std::vector<T>(in.begin() + comm.rank() * n, in.begin() + (comm.rank() + 1) * n), expected,
               what + " in place");
  }
}

template <typename T>
void CheckReduce(Communicator& comm, int64_t n) {
  std::vector<T> x = Values<T>(comm.rank(), n), expected(n);
  for (int64_t i = 0; i < n; ++i) expected[i] = T(PlainSum<T>(comm.size(), i));
  comm.AllReduce(View(x));
  ExpectSame(x, expected, StrCat("all_reduce of ", n, " ", Name(kDTypeOf<T>)));
}

void CheckExtremes(Communicator& comm, int64_t n) {
  std::vector<float> highest = Values<float>(comm.rank(), n), lowest = highest;
  std::vector<float> most = Values<float>(0, n), least = most;
  for (int r = 1; r < comm.size(); ++r) {
    for (int64_t i = 0; i < n; ++i) {
      most[i] = std::max(most[i], Value<float>(r, i));
      least[i] = std::min(least[i], Value<float>(r, i));
    }
  }
  comm.AllReduce(View(highest), ReduceOp::kMax);
  comm.AllReduce(View(lowest), ReduceOp::kMin);
  ExpectSame(highest, most, "maximum");
  ExpectSame(lowest, least, "minimum");

  std::vector<double> nan(1, comm.rank() == 0 ? std::numeric_limits<double>::quiet_NaN() : 1.0);
  comm.AllReduce(View(nan), ReduceOp::kMax);
  Expect(std::isnan(nan[0]), "the maximum over a NaN is one");
}

// Rank s sends (s + 2 r) mod 5 times `scale` elements to rank r, nothing among them.
void CheckAllToAll(Communicator& comm, int64_t scale) {
  const auto count = [&](int from, int to) { return (from + 2 * to) % 5 * scale; };
  std::vector<int64_t> send_counts, recv_counts;
  std::vector<int32_t> send, expected;
  for (int r = 0; r < comm.size(); ++r) {
    send_counts.push_back(count(comm.rank(), r));
    recv_counts.push_back(count(r, comm.rank()));
    const auto sent = Values<int32_t>(comm.rank(), count(comm.rank(), r), r);
    send.insert(send.end(), sent.begin(), sent.end());
    const auto received = Values<int32_t>(r, count(r, comm.rank()), comm.rank());
    expected.insert(expected.end(), received.begin(), received.end());
  }
  std::vector<int32_t> recv(expected.size());
  comm.AllToAll(View(send), send_counts, View(recv), recv_counts);
  ExpectSame(recv, expected, "all_to_all");
}

}  // namespace

void Expect(bool ok, const std::string& what) {
  if (!ok) throw std::runtime_error("unexpected: " + what);
}

void CheckCollectives(Communicator& comm) {
  for (const int64_t n : {0, 1, 5, 1000}) {
    CheckGather<float>(comm, n);
    CheckGather<uint8_t>(comm, n);
    CheckScatter<float, float>(comm, n);
    CheckScatter<BFloat16, BFloat16>(comm, n);
    CheckScatter<BFloat16, float>(comm, n);
    CheckScatter<Half, float>(comm, n);
    CheckReduce<float>(comm, n);
    CheckReduce<double>(comm, n);
    CheckReduce<BFloat16>(comm, n);
    CheckReduce<Half>(comm, n);
    CheckReduce<int32_t>(comm, n);
    CheckReduce<int64_t>(comm, n);
    CheckAllToAll(comm, n);
  }
  // Long enough to be cut into pieces inside, and not divisible by the ranks.
  CheckScatter<float, float>(comm, 300'001 / comm.size());
  CheckReduce<float>(comm, 300'001);
  CheckReduce<BFloat16>(comm, 10'007);
  CheckExtremes(comm, 100);
  for (int root = 0; root < comm.size(); ++root) {
    std::vector<float> x = Values<float>(comm.rank(), 3000);
    comm.Broadcast(View(x), root);
    ExpectSame(x, Values<float>(root, 3000), StrCat("broadcast from ", root));
  }
  comm.Barrier();
}

void CheckBuckets(Communicator& comm) {
  const auto check = [&]<typename T>(std::type_identity<T>) {
    const int64_t n = 20'011;
    std::vector<T> whole = Values<T>(comm.rank(), n);
    comm.AllReduce(View(whole));
    for (const int64_t bucket : {97, 4096, 16'000}) {
      std::vector<T> x = Values<T>(comm.rank(), n);
      std::vector<Work> works;
      for (int64_t begin = 0; begin < n; begin += bucket) {
        works.push_back(
            comm.StartAllReduce(View(x).Slice(begin, std::min(bucket, n - begin)), ReduceOp::kSum));
      }
      for (Work& work : works) work.Wait();
      ExpectSame(x, whole, StrCat("buckets of ", bucket));
    }
  };
  check(std::type_identity<float>());
  check(std::type_identity<BFloat16>());
}

void CheckTraffic(Communicator& comm, TrafficLog& log) {
  const int64_t n = 10'000, size = comm.size();
  std::vector<BFloat16> shard(n), all(n * size);
  std::vector<float> sum(n);
  std::vector<float> small(1024), large(n * size);
  std::vector<int64_t> counts(size);
  std::iota(counts.begin(), counts.end(), 1);  // r + 1 elements to rank r
  std::vector<int64_t> from(size, comm.rank() + 1);
  std::vector<double> send(size * (size + 1) / 2), recv(size * (comm.rank() + 1));
  log.Reset();
  comm.AllGather(View(shard), View(all));
  comm.ReduceScatter(View(all), View(sum));
  comm.AllReduce(View(small));
  comm.AllReduce(View(large));
  comm.AllToAll(View(send), counts, View(recv), from);
  comm.Broadcast(View(shard), 0);
  comm.Barrier();
  const auto totals = log.Totals();
  const auto expect = [&](const std::string& op, int64_t bytes, int64_t count) {
    const auto found = totals.find(comm.axis() + "." + op);
    Expect(found != totals.end(), op + " in the log");
    Expect(found->second.bytes == bytes && found->second.count == count,
           StrCat("traffic of ", op, ": ", found->second.bytes, " bytes, ", found->second.count, " times"));
  };
  expect("all_gather", (size - 1) * n * 2, 1);
  expect("reduce_scatter", (size - 1) * n * 2, 1);
  // Small: whole to each. Large: 2 (N − 1) / N of the bytes.
  expect("all_reduce", (size - 1) * 1024 * 4 + 2 * (size - 1) * n * 4, 2);
  expect("all_to_all", (size * (size + 1) / 2 - (comm.rank() + 1)) * 8, 1);
  expect("broadcast", comm.rank() == 0 ? (size - 1) * n * 2 : 0, 1);
  expect("barrier", 0, 1);
  Expect(totals.size() == 6, "nothing else in the log");
}

}  // namespace strata
