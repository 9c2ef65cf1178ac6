// Attention by NVIDIA's cuDNN (cudnn_plans.h) where it is chosen (device.attention: cudnn) and takes it.
//
// What it is given: bf16 and fp16; heads of up to 128 features, in packs of 8; any number of heads to a
// key/value head; all keys, or the causal mask from the first key on (q_offset 0); a positive scale; two
// or more queries and keys; views whose addresses and strides, and lse whose address, are multiples of 16
// bytes. Our own kernels run the rest: fp32; other heads and views; key_mask (only the device knows
// whether it hides but the ends of sequences) and segment_ids; the causal mask of a cache (q_offset);
// single queries; and shapes for which cuDNN has no deterministic engine on this GPU, or one that wants
// too much workspace, which the log says once a shape.
//
// lse has one layout and meaning: what one forward wrote the other's backward reads. The bits of both are the
// same every time, but those of one are not those of the other.
//
// Threading: the rank's thread.
#pragma once

#include "kernels/ops.h"

namespace strata::cuda {

/// attention_forward and attention_backward by cuDNN where it takes them, else by our own kernels. Need that
/// WhyNoCudnn (cudnn_plans.h) says nothing.
void cudnn_attention_forward(const KernelContext& context, const AttentionForwardArgs& args);
void cudnn_attention_backward(const KernelContext& context, const AttentionBackwardArgs& args);

}  // namespace strata::cuda
