// NCCL between the GPUs of a group, as a Communicator.
//
// A collective of tensors in the GPU's memory is started at once, on a stream of the group's own: it begins
// when the compute stream has come to where it was started, and Wait makes the compute stream wait for it,
// not the caller. Operations of one group run one after another, those of different groups beside each other.
// Tensors in host memory go by the host communicator, in the same order.
//
// The communication thread watches. For each operation it tells the group's other ranks which one was started
// here, and hears from them, by empty messages between the hosts: so a rank that is absent or in another
// operation is named as it is without NCCL. Then it awaits the end, polls NCCL for asynchronous errors, and
// writes the entry of the traffic log: the bytes of the host collectives' formulas, which are those of NCCL's
// rings. Where a rank is absent, or all came and the end does not (within the timeout), or NCCL reports an
// error, the watch aborts NCCL's communicator, which frees the streams; what comes out of the compute stream
// then is worthless, and what is started later, on any of the rank's communicators, throws the error. A Wait
// may have returned before: a result can be trusted once a Barrier or a collective of host memory that was
// started after it is done, as the sum of the gradients' norms is in each step.
//
// Sums. 16-bit elements are sent as they are and added by each receiver in fp32 in rank order, rounded once:
// the bits are those of every other communicator. Sums of fp32, fp64 and integers are NCCL's: the same bits
// on all ranks, but NCCL chooses the order of the terms, by its version, the topology and the length, so they
// may differ from other communicators in the last bits, and a cut into other buckets may show. What the
// maximum over a NaN is, NCCL decides too.
//
// A group of one rank needs no library: its collectives are copies within the GPU.
#pragma once

#include <memory>
#include <string>

#include "parallel/host_group.h"

namespace strata {

/// The collectives of `host`'s group on the memory of the engine's device; takes `host` over. Null, with
/// `why_not` and `host` as it was, where the build or a rank has no NCCL, or two ranks of the group share a
/// GPU. Collective over the group; all of it come to the same. Throws CommError when NCCL does not come up.
std::unique_ptr<Communicator> NewNcclCommunicator(std::unique_ptr<HostCommunicator>& host,
                                                  std::string* why_not);

}  // namespace strata
