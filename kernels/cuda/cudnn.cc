#include "kernels/cuda/cudnn.h"

#include <algorithm>

#include "kernels/cuda/cudnn_plans.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/queue.h"

namespace strata::cuda {
namespace {

CudnnAttention::Strides StridesOf(const HeadsView& view) { return {view.batch_stride, view.row_stride}; }

// cuDNN's kernels load packs of 16 bytes, and do not look whether they may.
bool HasPacks(const HeadsView& view) {
  return Aligned(16, view.data) && view.batch_stride % 8 == 0 && view.row_stride % 8 == 0;
}

bool Takes(const AttentionShape& shape, const TensorView& lse, std::initializer_list<HeadsView> views) {
  const DType dtype = views.begin()->dtype;
  return (dtype == DType::kBF16 || dtype == DType::kF16) && shape.batch > 0 && shape.num_kv_heads > 0 &&
         shape.q_len > 1 && shape.kv_len > 1 && shape.head_dim % 8 == 0 && shape.head_dim <= 128 &&
         shape.scale > 0.0f && (!shape.causal || shape.q_offset == 0) && !shape.key_mask.defined() &&
         !shape.segment_ids.defined() && std::all_of(views.begin(), views.end(), HasPacks) &&
         Aligned(16, lse.data);
}

CudnnAttention Describe(const AttentionShape& shape, const HeadsView& q, const HeadsView& k,
                        const HeadsView& v, const HeadsView& out) {
  CudnnAttention attention;
  attention.causal = shape.causal;
  attention.dtype = q.dtype;
  attention.batch = shape.batch, attention.q_len = shape.q_len, attention.kv_len = shape.kv_len;
  attention.num_heads = shape.num_heads, attention.num_kv_heads = shape.num_kv_heads;
  attention.head_dim = shape.head_dim;
  attention.q = StridesOf(q), attention.k = StridesOf(k), attention.v = StridesOf(v);
  attention.out = StridesOf(out);
  return attention;
}

int64_t NumStatistics(const AttentionShape& shape) { return shape.batch * shape.num_heads * shape.q_len; }

// Says whether cuDNN has a plan; if not, nothing was done.
bool Run(Queue& queue, const CudnnAttention& attention, CudnnMemory memory) {
  std::shared_ptr<CudnnPlans>& plans = queue.stream().attention;
  if (plans == nullptr) plans = std::make_shared<CudnnPlans>(queue.stream().stream);
  const std::optional<size_t> bytes = plans->Workspace(attention);
  if (!bytes) return false;
  constexpr int64_t kAlignment = 256;
  char* const scratch = queue.Scratch<char>(static_cast<int64_t>(*bytes) + kAlignment);
  memory.workspace = scratch + (-reinterpret_cast<intptr_t>(scratch) & (kAlignment - 1));
  plans->Run(attention, memory);
  return true;
}

}  // namespace

void cudnn_attention_forward(const KernelContext& context, const AttentionForwardArgs& args) {
  if (Takes(args.shape, args.lse, {args.q, args.k, args.v, args.out})) {
    Queue queue(context, "attention_forward", {args.lse});
    // Without statistics the same plan runs: what is computed again must have the same bits.
    float* const lse =
        args.lse.defined() ? Pointer<float>(args.lse) : queue.Scratch<float>(NumStatistics(args.shape));
    const CudnnMemory memory{.q = args.q.data,
                             .k = args.k.data,
                             .v = args.v.data,
                             .out = args.out.data,
                             .lse = lse,
                             .scale = args.shape.scale};
    if (Run(queue, Describe(args.shape, args.q, args.k, args.v, args.out), memory)) return;
  }
  attention_forward(context, args);
}

void cudnn_attention_backward(const KernelContext& context, const AttentionBackwardArgs& args) {
  if (Takes(args.shape, args.lse, {args.q, args.k, args.v, args.out, args.dout, args.dq, args.dk, args.dv})) {
    Queue queue(context, "attention_backward", {args.lse});
    CudnnAttention attention = Describe(args.shape, args.q, args.k, args.v, args.out);
    attention.backward = true;
    attention.dout = StridesOf(args.dout);
    attention.dq = StridesOf(args.dq), attention.dk = StridesOf(args.dk), attention.dv = StridesOf(args.dv);
    const CudnnMemory memory{.q = args.q.data,
                             .k = args.k.data,
                             .v = args.v.data,
                             .out = args.out.data,
                             .dout = args.dout.data,
                             .dq = args.dq.data,
                             .dk = args.dk.data,
                             .dv = args.dv.data,
                             .lse = Pointer<float>(args.lse),
                             .delta = queue.Scratch<float>(NumStatistics(args.shape)),
                             .scale = args.shape.scale};
    if (Run(queue, attention, memory)) return;
  }
  attention_backward(context, args);
}

}  // namespace strata::cuda
