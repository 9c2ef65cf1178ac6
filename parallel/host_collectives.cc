#include "parallel/host_collectives.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "parallel/reduce.h"
#include "runtime/base/error.h"

namespace strata {
namespace {

// Two pieces from every peer fit into a second-level cache, so that what arrives is summed from there.
constexpr size_t kScratchBytes = size_t{1} << 20;
constexpr size_t kMinPieceBytes = size_t{16} << 10;

// Calls body(place) for each peer, the next one first, so that not all ranks begin with the same.
template <typename Body>
void ForEachPeer(const Group& group, Body body) {
  for (int i = 1; i < group.size(); ++i) body((group.place + i) % group.size());
}

void Copy(const TensorView& from, const TensorView& to) {
  if (from.data != to.data && from.num_bytes() > 0) std::memcpy(to.data, from.data, from.num_bytes());
}

void Send(Exchange& exchange, int place, const TensorView& x) { exchange.Send(place, x.data, x.num_bytes()); }

void Receive(Exchange& exchange, int place, const TensorView& x, Exchange::Batch& batch) {
  exchange.Receive(place, x.data, x.num_bytes(), batch);
}

// out = the op of all ranks' chunk of this rank. Chunks go in pieces: while one is summed, the next arrives.
void ReduceChunks(Exchange& exchange, Scratch& scratch, const TensorView& in, const TensorView& out,
                  ReduceOp op) {
  const Group& group = exchange.group();
  const int size = group.size(), num_peers = size - 1;
  const TensorView mine = Chunk(in, group.place, size);
  if (num_peers == 0) {
    const void* const only = mine.data;
    if (only == out.data && mine.dtype == out.dtype) return;  // in place already
    return ReduceInOrder(op, {&only, 1}, mine.dtype, mine.num_elements(), out.data, out.dtype);
  }
  const size_t element = SizeOf(in.dtype);
  const int64_t longest = Chunk(in, 0, size).num_elements();
  const int64_t most =
      static_cast<int64_t>(std::max(kScratchBytes / 2 / num_peers, kMinPieceBytes) / element);
  const int64_t piece = std::clamp<int64_t>(longest, 1, most);
  const int64_t num_pieces = std::max<int64_t>(1, (longest + piece - 1) / piece);
  std::byte* const memory = scratch.Get(2 * num_peers * piece * element);

  Exchange::Batch arriving[2];
  std::vector<const void*> terms[2] = {std::vector<const void*>(size), std::vector<const void*>(size)};
  const auto start = [&](int64_t k) {
    const int slot = static_cast<int>(k % 2);
    const TensorView my_piece = Piece(mine, k, piece);
    terms[slot][group.place] = my_piece.data;
    std::byte* to = memory + slot * num_peers * piece * element;
    ForEachPeer(group, [&](int peer) {
      exchange.Receive(peer, to, my_piece.num_bytes(), arriving[slot]);
      terms[slot][peer] = to;
      to += piece * element;
      Send(exchange, peer, Piece(Chunk(in, peer, size), k, piece));
    });
  };
  start(0);
  for (int64_t k = 0; k < num_pieces; ++k) {
    if (k + 1 < num_pieces) start(k + 1);
    exchange.Wait(arriving[k % 2]);
    const TensorView sum = Piece(out, k, piece);
    ReduceInOrder(op, terms[k % 2], in.dtype, sum.num_elements(), sum.data, sum.dtype);
  }
}

// x = the op of all ranks' x, each of which is sent whole.
void ReduceWhole(Exchange& exchange, Scratch& scratch, const TensorView& x, ReduceOp op) {
  const Group& group = exchange.group();
  std::byte* memory = scratch.Get((group.size() - 1) * x.num_bytes());
  std::vector<const void*> terms(group.size(), x.data);
  Exchange::Batch arriving;
  ForEachPeer(group, [&](int peer) {
    exchange.Receive(peer, memory, x.num_bytes(), arriving);
    terms[peer] = memory;
    memory += x.num_bytes();
    Send(exchange, peer, x);
  });
  exchange.Wait(arriving);
  exchange.FinishSends();
  ReduceInOrder(op, terms, x.dtype, x.num_elements(), x.data, x.dtype);
}

// Every rank's chunk of x, to all.
void GatherChunks(Exchange& exchange, const TensorView& x) {
  const Group& group = exchange.group();
  const TensorView mine = Chunk(x, group.place, group.size());
  Exchange::Batch arriving;
  ForEachPeer(group, [&](int peer) {
    Receive(exchange, peer, Chunk(x, peer, group.size()), arriving);
    Send(exchange, peer, mine);
  });
  exchange.Wait(arriving);
}

}  // namespace

TensorView Chunk(const TensorView& x, int place, int size) {
  const int64_t n = x.num_elements();
  const int64_t base = n / size, longer = n % size;
  return x.Slice(place * base + std::min<int64_t>(place, longer), base + (place < longer ? 1 : 0));
}

TensorView Piece(const TensorView& x, int64_t k, int64_t piece) {
  const int64_t begin = std::min(k * piece, x.num_elements());
  return x.Slice(begin, std::min(piece, x.num_elements() - begin));
}

void AllGather(Exchange& exchange, const TensorView& shard, const TensorView& out) {
  Copy(shard, Chunk(out, exchange.group().place, exchange.group().size()));
  GatherChunks(exchange, out);
}

void ReduceScatter(Exchange& exchange, Scratch& scratch, const TensorView& in, const TensorView& out) {
  ReduceChunks(exchange, scratch, in, out, ReduceOp::kSum);
}

void AllReduce(Exchange& exchange, Scratch& scratch, const TensorView& x, ReduceOp op) {
  if (x.num_bytes() <= kSmallAllReduce) return ReduceWhole(exchange, scratch, x, op);
  const Group& group = exchange.group();
  ReduceChunks(exchange, scratch, x, Chunk(x, group.place, group.size()), op);
  exchange.FinishSends();  // what is gathered next lands where these are sent from
  GatherChunks(exchange, x);
}

void AllToAll(Exchange& exchange, const TensorView& send, std::span<const int64_t> send_counts,
              const TensorView& recv, std::span<const int64_t> recv_counts) {
  const Group& group = exchange.group();
  std::vector<TensorView> to, from;
  for (int64_t begin = 0; const int64_t count : send_counts) {
    to.push_back(send.Slice(begin, count));
    begin += count;
  }
  for (int64_t begin = 0; const int64_t count : recv_counts) {
    from.push_back(recv.Slice(begin, count));
    begin += count;
  }
  Exchange::Batch arriving;
  ForEachPeer(group, [&](int peer) {
    Receive(exchange, peer, from[peer], arriving);
    Send(exchange, peer, to[peer]);
  });
  Copy(to[group.place], from[group.place]);
  exchange.Wait(arriving);
}

void Broadcast(Exchange& exchange, const TensorView& x, int root) {
  const Group& group = exchange.group();
  if (group.place == root) return ForEachPeer(group, [&](int peer) { Send(exchange, peer, x); });
  Exchange::Batch arriving;
  Receive(exchange, root, x, arriving);
  exchange.Wait(arriving);
}

void Barrier(Exchange& exchange) {
  Exchange::Batch arriving;
  ForEachPeer(exchange.group(), [&](int peer) {
    exchange.Receive(peer, nullptr, 0, arriving);
    exchange.Send(peer, nullptr, 0);
  });
  exchange.Wait(arriving);
}

}  // namespace strata
