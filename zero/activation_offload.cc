#include "zero/activation_offload.h"

#include <spdlog/fmt/fmt.h>
#include <unistd.h>

#include <chrono>
#include <utility>

namespace strata {
namespace {

// What is smaller than a block of the disk stays.
constexpr size_t kLeastBytes = AsyncFile::kAlignment;

// "strata-5f3a09c1d2e4b867-rank-00003.activations": jobs may share a folder.
std::string FileName(int rank) {
  const int64_t now = std::chrono::system_clock::now().time_since_epoch().count();
  return fmt::format("strata-{:016x}-rank-{:05d}.activations",
                     static_cast<uint64_t>(now ^ (int64_t{getpid()} << 40)) * 0x9e3779b97f4a7c15u, rank);
}

size_t NumBytes(const Shape& shape, DType dtype) {
  return static_cast<size_t>(shape.num_elements()) * SizeOf(dtype);
}

TensorView AsBytes(const TensorView& view) {
  return {view.data, DType::kU8, {static_cast<int64_t>(view.num_bytes())}};
}

}  // namespace

ActivationOffload::ActivationOffload(Device& device, FileSystem& file_system, Tier tier,
                                     const OffloadOptions& nvme, int rank)
    : store_(device, file_system, nvme.path, FileName(rank),
             {.block_bytes = static_cast<size_t>(nvme.block_bytes),
              .queue_depth = static_cast<int>(nvme.queue_depth)}),
      tier_(tier) {
  STRATA_CHECK(tier != Tier::kDevice) << "activations that are offloaded to where they are";
}

std::unique_ptr<ActivationOffload> ActivationOffload::Make(Device& device, FileSystem& file_system, Tier tier,
                                                           const OffloadOptions& nvme, int rank) {
  if (tier == Tier::kDevice) return nullptr;
  return std::make_unique<ActivationOffload>(device, file_system, tier, nvme, rank);
}

ActivationOffload::~ActivationOffload() { Clear(); }

bool ActivationOffload::Moves(const Place& place) {
  return NumBytes(place.shape, place.dtype) >= kLeastBytes;
}

// Makes sure that the tensor is away.
void ActivationOffload::Settle(Place& place) {
  place.under_way.Wait();
  if (Moves(place)) place.tensor = Tensor();
}

int64_t ActivationOffload::Put(Tensor tensor) {
  if (depth_ >= kUnderWay) Settle(places_[static_cast<size_t>(depth_ - kUnderWay)]);
  if (depth_ == std::ssize(places_)) places_.emplace_back();
  Place& place = places_[static_cast<size_t>(depth_)];
  place.shape = tensor.shape();
  place.dtype = tensor.dtype();
  if (Moves(place)) {
    const TensorView bytes = AsBytes(tensor.view());
    if (place.array.elements() < bytes.num_elements()) {
      TierArray array(store_, tier_, bytes.num_elements(), DType::kU8, MemoryTag::kActivations, false);
      store_.Commit();
      place.array = array;
    }
    place.under_way = place.array.StartWrite(0, bytes, MemorySpace::kDevice);
  }
  place.tensor = std::move(tensor);
  return depth_++;
}

Tensor ActivationOffload::Take(int64_t ticket) {
  STRATA_CHECK(ticket >= 0 && ticket < depth_) << "ticket " << ticket << " of " << depth_;
  Forget(ticket + 1);
  Place& place = places_[static_cast<size_t>(ticket)];
  StartBack(place);
  place.under_way.Wait();
  if (ticket > 0) StartBack(places_[static_cast<size_t>(ticket - 1)]);
  depth_ = ticket;
  return std::move(place.tensor);
}

// Unless it is there, or on its way.
void ActivationOffload::StartBack(Place& place) {
  if (place.tensor.defined()) return;
  place.tensor =
      Tensor::Empty(store_.device().allocator(), place.shape, place.dtype, MemoryTag::kActivations);
  place.under_way = place.array.StartRead(0, AsBytes(place.tensor.view()), MemorySpace::kDevice);
}

void ActivationOffload::Clear() { Forget(0); }

void ActivationOffload::Forget(int64_t depth) {
  for (; depth_ > depth; --depth_) {
    Place& place = places_[static_cast<size_t>(depth_ - 1)];
    place.under_way = Transfer();  // its end is awaited: it uses the tensor's memory
    place.tensor = Tensor();
  }
}

}  // namespace strata
