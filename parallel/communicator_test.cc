// Collectives over threads of one process.
#include <catch2/catch.hpp>
#include <thread>

#include "parallel/communicator_checks.h"
#include "runtime/base/error.h"
#include "runtime/base/log.h"

namespace strata {
namespace {

using Catch::Matchers::Contains;

std::vector<int> AllRanks(const Transport& transport) {
  std::vector<int> ranks(transport.size());
  for (int r = 0; r < transport.size(); ++r) ranks[r] = r;
  return ranks;
}

TensorView View(std::vector<float>& x) { return {x.data(), DType::kF32, {static_cast<int64_t>(x.size())}}; }

// Runs body(communicator of all) on `size` thread ranks; returns what the job ended with, "" when well.
std::string RunGroup(int size, double timeout_s, const std::function<void(Communicator&)>& body) {
  try {
    ThreadJob::Run(size, [&](Transport& transport) {
      CommEngine engine(transport, {.timeout_s = timeout_s});
      body(*engine.NewCommunicator(AllRanks(transport), "dp"));
    });
  } catch (const std::exception& e) {
    return e.what();
  }
  return "";
}

// Long enough for every thread to get its turn on a busy machine, and for a test that waits it out.
constexpr double kPatience = 600, kShort = 0.2;

TEST_CASE("collectives equal plain loops over the ranks' data, to the bit") {
  const int size = GENERATE(1, 2, 3, 4, 7, 16);
  CAPTURE(size);
  CHECK(RunGroup(size, kPatience, [](Communicator& comm) { CheckCollectives(comm); }) == "");
}

TEST_CASE("sixty-four ranks") {
  CHECK(RunGroup(64, kPatience, [](Communicator& comm) {
          std::vector<float> x(5000, static_cast<float>(comm.rank())), shard(40, 1.0f), all(64 * 40);
          comm.AllReduce(View(x));
          comm.AllGather(View(shard), View(all));
          comm.ReduceScatter(View(all), View(shard));
          Expect(x == std::vector<float>(5000, 2016.0f), "0 + … + 63");
          Expect(shard == std::vector<float>(40, 64.0f), "64 ones");
        }) == "");
}

TEST_CASE("the cut into buckets does not show") {
  const int size = GENERATE(2, 3, 4);
  CHECK(RunGroup(size, kPatience, [](Communicator& comm) { CheckBuckets(comm); }) == "");
}

TEST_CASE("traffic is what the formulas say") {
  const int size = GENERATE(1, 2, 4, 7);
  CAPTURE(size);
  ThreadJob::Run(size, [&](Transport& transport) {
    TrafficLog log;
    CommEngine engine(transport, {.traffic = &log});
    CheckTraffic(*engine.NewCommunicator(AllRanks(transport), "edp"), log);
  });
}

TEST_CASE("groups do not disturb each other") {
  // Rows and columns of a 2 x 3 grid, operations of both under way at once.
  ThreadJob::Run(6, [&](Transport& transport) {
    CommEngine engine(transport, {});
    const int row = transport.rank() / 3, column = transport.rank() % 3;
    const auto rows = engine.NewCommunicator({3 * row, 3 * row + 1, 3 * row + 2}, "tp");
    const auto columns = engine.NewCommunicator({column, column + 3}, "dp");
    std::vector<float> x(9000, static_cast<float>(transport.rank())), y = x;
    Work first = rows->StartAllReduce(View(x), ReduceOp::kSum);
    Work second = columns->StartAllReduce(View(y), ReduceOp::kMax);
    second.Wait();
    Expect(first.Done(), "operations end in order");
    first.Wait();
    Expect(x == std::vector<float>(9000, row == 0 ? 3.0f : 12.0f), "sum of the row");
    Expect(y == std::vector<float>(9000, static_cast<float>(column + 3)), "maximum of the column");
    Expect(columns->rank() == row && columns->size() == 2 && columns->ranks()[1] == column + 3, "group");
  });
}

TEST_CASE("a skipped collective is named, with call site and ranks") {
  const std::string error = RunGroup(3, kPatience, [](Communicator& comm) {
    std::vector<float> shard(8), all(24);
    for (int i = 0; i < 14; ++i) comm.Barrier();
    if (comm.rank() != 2) comm.AllGather(View(shard), View(all));
    comm.ReduceScatter(View(all), View(shard));
  });
  // To rank 2 its reduce_scatter is the group's operation 14, counted from 0. Either side may see it first.
  CHECK_THAT(error, Contains("on axis dp, called at") && Contains("communicator_test.cc:"));
  CHECK_THAT(error, (Contains("all_gather #14 on") && Contains("rank 2 is in reduce_scatter #14")) ||
                        (Contains("reduce_scatter #14 on") && Contains("on rank 2: rank ") &&
                         Contains(" is in all_gather #14")));
}

TEST_CASE("far apart, the nearest sequence number is named") {
  const std::string error = RunGroup(2, kPatience, [&](Communicator& comm) {
    // Broadcasts ask nothing of their receivers, so rank 0 is 1500 operations ahead when it asks.
    std::vector<float> x(4);
    for (int i = 0; i < 1500; ++i) comm.Broadcast(View(x), 0);
    if (comm.rank() == 0) comm.Barrier();
    comm.AllReduce(View(x));
  });
  CHECK_THAT(error, (Contains("barrier #1500") && Contains("rank 1 is in all_reduce #1500")) ||
                        (Contains("all_reduce #1500") && Contains("rank 0 is in barrier #1500")));
}

TEST_CASE("disagreement about size, type, reduction and counts") {
  const auto disagree = [](const std::function<void(Communicator&, std::vector<float>&)>& body) {
    return RunGroup(2, kPatience, [&](Communicator& comm) {
      std::vector<float> x(64);
      body(comm, x);
    });
  };
  CHECK_THAT(disagree([](auto& comm, auto& x) { comm.AllReduce(View(x).Slice(0, 5 + comm.rank())); }),
             Contains("is in all_reduce #0 with 2") && Contains("bytes for this rank, which expects 2"));
  // Halves of five and of six elements are both three long.
  CHECK_THAT(disagree([](auto& comm, auto& x) {
               TensorView halves = View(x).Slice(0, 2);
               if (comm.rank() == 1) halves = {x.data(), DType::kI32, {2}};
               comm.AllReduce(halves);
             }),
             Contains("with another element type, length, root or reduction"));
  CHECK_THAT(disagree([](auto& comm, auto& x) {
               comm.AllReduce(View(x), comm.rank() == 0 ? ReduceOp::kMax : ReduceOp::kMin);
             }),
             Contains("with another element type, length, root or reduction"));
  CHECK_THAT(disagree([](auto& comm, auto& x) {
               const std::vector<int64_t> one(2, 1), two(2, 2);
               // Rank 1 is sent one element and expects two.
               comm.AllToAll(View(x).Slice(0, 2), one, View(x).Slice(8, 4), comm.rank() == 0 ? one : two);
             }),
             Contains("rank 0 is in all_to_all #0 with 4 bytes for this rank, which expects 8"));
}

TEST_CASE("an absent rank is named within the time limit") {
  const std::string error = RunGroup(4, kShort, [](Communicator& comm) {
    comm.Barrier();
    std::vector<float> x(9000);
    if (comm.rank() != 2) comm.AllReduce(View(x));
  });
  CHECK_THAT(error, Contains("all_reduce #1 on axis dp, called at") && Contains("communicator_test.cc:") &&
                        Contains("nothing from rank 2 within 0.2 s"));
}

TEST_CASE("two absent ranks; who sends and is not heard misses them too") {
  CHECK_THAT(RunGroup(4, kShort,
                      [](Communicator& comm) {
                        std::vector<float> x(10);
                        if (comm.rank() % 2 == 0) comm.Broadcast(View(x), 0);
                      }),
             Contains("broadcast #0") && Contains("nothing from ranks 1, 3 within"));
}

TEST_CASE("an exception in one rank ends the others, which name it") {
  std::mutex mutex;
  std::vector<std::string> others;
  const std::string error = RunGroup(4, kPatience, [&](Communicator& comm) {
    if (comm.rank() == 1) throw DataError("tokens.bin: byte 12: bad header");
    try {
      comm.Barrier();
    } catch (const CommError& e) {
      std::lock_guard lock(mutex);
      others.push_back(e.what());
      throw;
    }
  });
  CHECK(error == "tokens.bin: byte 12: bad header");
  REQUIRE(others.size() == 3);
  for (const std::string& other : others) {
    CHECK_THAT(other, Contains("barrier #0 on axis dp") &&
                          Contains("rank 1 failed: tokens.bin: byte 12: bad header"));
  }
}

TEST_CASE("after an error nothing runs, and the first cause is told again") {
  const std::string error = RunGroup(2, kShort, [](Communicator& comm) {
    if (comm.rank() == 1) return;
    std::vector<float> x(4);
    Work first = comm.StartAllReduce(View(x), ReduceOp::kSum);
    Work second = comm.StartBroadcast(View(x), 0);
    bool failed = false;
    try {
      first.Wait();
    } catch (const CommError&) {
      failed = true;
    }
    Expect(failed, "the first fails");
    second.Wait();
  });
  CHECK_THAT(error, Contains("broadcast #1") && Contains("not run, after the failure of all_reduce #0"));
}

TEST_CASE("buffers are let go of before an exception frees them") {
  // Rank 1 unwinds with an operation under way that nobody else joins; under AddressSanitizer and
  // ThreadSanitizer this shows that the communication threads do not touch the vector afterwards.
  const std::string error = RunGroup(3, kPatience, [](Communicator& comm) {
    if (comm.rank() == 2) return;
    std::vector<float> x(50'000, 1.0f);
    const Work work = comm.StartAllReduce(View(x), ReduceOp::kSum);
    if (comm.rank() == 1) throw DataError("rank 1 is out");
  });
  CHECK(error == "rank 1 is out");
}

TEST_CASE("dropping a Work waits for it") {
  CHECK(RunGroup(2, kPatience, [](Communicator& comm) {
          std::vector<float> x(3000, 1.0f);
          static_cast<void>(comm.StartAllReduce(View(x), ReduceOp::kSum));
          Expect(x == std::vector<float>(3000, 2.0f), "the sum");
        }) == "");
}

TEST_CASE("messages of a pair keep their order, whichever is asked for first") {
  ThreadJob job(2);
  Transport &a = job.transport(0), &b = job.transport(1);
  const int channel = a.OpenChannel(), other = a.OpenChannel();
  b.OpenChannel();
  const int32_t sent[3] = {10, 11, 12};
  int32_t got[3] = {};
  std::vector<Transport::Request> sends;
  for (int i = 0; i < 2; ++i) sends.push_back(a.Send(channel, 1, &sent[i], 4, 7));
  sends.push_back(a.Send(other, 1, &sent[2], 4, 9));
  std::vector<Transport::Request> receives;
  for (int i = 0; i < 2; ++i) receives.push_back(b.Receive(channel, 0, &got[i], 4, 7));
  receives.push_back(b.Receive(other, 0, &got[2], 4, 7));

  CHECK(b.Test(receives[1]).done);
  CHECK_FALSE(a.Test(sends[0]).done);
  CHECK(a.Test(sends[1]).done);
  CHECK(b.Test(receives[0]).done);
  CHECK((got[0] == 10 && got[1] == 11));
  const Transport::Status status = b.Test(receives[2]);
  CHECK((status.mismatch && status.label == 9 && status.bytes == 4));
  CHECK(got[2] == 0);
}

TEST_CASE("a withdrawn message never comes") {
  ThreadJob job(2);
  float x = 1, y = 0;
  job.transport(0).Send(0, 1, &x, 4, 7);
  const auto request = job.transport(1).Receive(0, 0, &y, 4, 7);
  job.transport(0).Cancel();
  CHECK_FALSE(job.transport(1).Test(request).done);
  job.transport(0).Abort("rank 0 failed: out of luck", 1);
  CHECK_THROWS_WITH(job.transport(1).Test(request), "rank 0 failed: out of luck");
}

TEST_CASE("threads carry their rank's label") {
  ThreadJob::Run(3, [](Transport& transport) {
    Expect(ThreadRank() == transport.rank() && ThreadWorldSize() == 3, "label");
    Expect(transport.local_size() == 3, "all are here");
  });
  CHECK(ThreadWorldSize() == 1);
}

TEST_CASE("spans of operations reach the tracer") {
  ThreadJob::Run(2, [](Transport& transport) {
    Tracer tracer;
    CommEngine engine(transport, {});
    const auto comm = engine.NewCommunicator({0, 1}, "tp");
    comm->Barrier();
    engine.set_tracer(&tracer);
    std::vector<float> x(6000);
    comm->AllReduce(View(x));
    engine.set_tracer(nullptr);
    const std::string events = tracer.ToJsonEvents(0);
    Expect(events.find("tp.all_reduce") != std::string::npos, events);
    Expect(events.find("\"bytes\":24000") != std::string::npos, events);
    Expect(events.find("barrier") == std::string::npos, events);
  });
}

}  // namespace
}  // namespace strata
