#include "runtime/autograd/ops.h"

#include <algorithm>
#include <cmath>

namespace strata {
namespace {

TensorView ViewOf(const Tensor& tensor) { return tensor.defined() ? tensor.view() : TensorView(); }

// The device memory of a result that is no activation of the tape's type.
Tensor EmptyF32(Tape& tape, const Shape& shape) { return tape.Empty(shape, DType::kF32); }

}  // namespace

void LinearBackward(Tape& tape, const TensorView& dy, const TensorView& x, Parameter& weight, Parameter* bias,
                    const GradTarget& dx) {
  const Executor& run = tape.executor();
  if (bias && bias->requires_grad) {
    const GradTarget db = tape.WeightGrad(*bias);
    run.column_sum({.x = dy, .sum = db.view, .accumulate = db.accumulate});
  }
  if (weight.requires_grad) {
    const GradTarget dw = tape.WeightGrad(weight);
    MatmulArgs product;
    product.a = dy;
    product.b = x;
    product.c = dw.view;
    product.trans_a = true;
    product.accumulate = dw.accumulate;
    run.matmul(product);
  }
  if (dx.view.defined()) {
    MatmulArgs product;
    product.a = dy;
    product.b = weight.data;
    product.c = dx.view;
    product.accumulate = dx.accumulate;
    run.matmul(product);
  }
}

Tensor Embedding(Tape& tape, const Tensor& ids, Parameter& table, const Tensor& positions,
                 Parameter* position_table, int64_t first_id) {
  const Executor& run = tape.executor();
  const int64_t n = ids.view().num_elements();
  Tensor out = tape.Empty({n, table.shape[1]});
  run.embedding_forward({.ids = ids.view(), .table = table.data, .out = out.view(), .first_id = first_id});
  if (position_table) {
    run.embedding_forward(
        {.ids = positions.view(), .table = position_table->data, .out = out.view(), .accumulate = true});
  }
  Parameter* const parameters[] = {&table, position_table};
  tape.Record("embedding", {}, parameters, {&out},
              [&tape, ids, positions, table = &table, position_table, first_id](Backprop& bp) {
                auto backward = [&](const Tensor& index, Parameter* p, int64_t first) {
                  if (!p || !p->requires_grad) return;
                  const GradTarget grad = tape.WeightGrad(*p);
                  tape.executor().embedding_backward({.ids = index.view(),
                                                      .dout = bp.dout().view(),
                                                      .dtable = grad.view,
                                                      .accumulate = grad.accumulate,
                                                      .first_id = first});
                };
                backward(ids, table, first_id);
                backward(positions, position_table, 0);
              });
  return out;
}

Tensor Linear(Tape& tape, const Tensor& x, Parameter& weight, Parameter* bias, const LinearOptions& options) {
  const Executor& run = tape.executor();
  const Activation activation = options.activation;
  const TensorView xv = x.view().Reshaped({x.view().rows(), x.view().cols()});
  const Shape out_shape{xv.rows(), weight.shape[0]};
  const bool is_partial = options.sum_over_ranks != nullptr;
  STRATA_CHECK(!is_partial || activation == Activation::kNone) << "an activation of a partial product";
  Tensor z;  // before the activation
  auto multiply = [&] {
    Tensor y = tape.Empty(out_shape);
    if (activation != Activation::kNone && tape.recording()) z = tape.Empty(out_shape);
    MatmulArgs product;
    product.a = xv;
    product.b = weight.data;
    product.c = y.view();
    product.trans_b = true;
    if (bias && options.adds_bias) product.bias = bias->data;
    product.activation = activation;
    product.pre_activation = ViewOf(z);
    if (!is_partial) product.residual = ViewOf(options.residual);
    run.matmul(product);
    if (is_partial) {
      options.sum_over_ranks(y.view());
      if (options.residual.defined()) {
        run.axpby({.a = options.residual.view(), .b = y.view(), .out = y.view()});
      }
    }
    return y;
  };
  Tensor y = is_partial ? tape.StashOrReplay("linear", out_shape, multiply) : multiply();
  if (z.defined() && !options.residual.defined()) {
    tape.SetRecipe(y, [&tape, z, activation] {
      Tensor again = tape.Empty(z.shape());
      tape.executor().activation_forward({.activation = activation, .x = z.view(), .y = again.view()});
      return again;
    });
  }
  Parameter* const parameters[] = {&weight, bias};
  tape.Record("linear", {x, options.residual}, parameters, {&y},
              [&tape, saved_x = tape.Save(x), z, weight = &weight, bias, activation](Backprop& bp) {
                Tensor dy = bp.TakeDout();
                Tensor dz;
                if (activation == Activation::kNone) {
                  dz = dy;
                } else {
                  dz = dy.Unique() && !bp.Needs(1) ? dy : tape.Empty(dy.shape());
                  tape.executor().activation_backward(
                      {.activation = activation, .dy = dy.view(), .x = z.view(), .dx = dz.view()});
                }
                {
                  const Tensor saved = saved_x.Get();
                  const TensorView& sv = saved.view();
                  const Shape rows{sv.rows(), sv.cols()};
                  GradTarget dx;
                  if (bp.Needs(0)) {
                    dx = bp.Din(0);
                    dx.view = dx.view.Reshaped(rows);
                  }
                  LinearBackward(tape, dz.view(), sv.Reshaped(rows), *weight, bias, dx);
                }
                dz = Tensor();
                bp.GiveDin(1, std::move(dy));
              });
  return y;
}

namespace {

// The three parts of a packed qkv matrix.
struct PackedHeads {
  HeadsView q, k, v;
};

PackedHeads Split(const TensorView& qkv, const AttentionOptions& o) {
  const int64_t stride = qkv.cols();
  auto at = [&](int64_t column) {
    char* data = static_cast<char*>(qkv.data) + column * static_cast<int64_t>(SizeOf(qkv.dtype));
    return HeadsView{data, qkv.dtype, o.seq_len * stride, stride};
  };
  return {at(0), at(o.num_heads * o.head_dim), at((o.num_heads + o.num_kv_heads) * o.head_dim)};
}

HeadsView Whole(const TensorView& out, int64_t seq_len) {
  return {out.data, out.dtype, seq_len * out.cols(), out.cols()};
}

void Rotate(const Tape& tape, const TensorView& qkv, const AttentionOptions& o, bool inverse) {
  if (!o.inv_freq.defined()) return;
  RotaryArgs rotary;
  rotary.x = Split(qkv, o).q;  // q and k lie side by side
  rotary.batch = o.batch;
  rotary.len = o.seq_len;
  rotary.num_heads = o.num_heads + o.num_kv_heads;
  rotary.head_dim = o.head_dim;
  rotary.inv_freq = o.inv_freq.view();
  rotary.positions = ViewOf(o.positions);
  rotary.position_offset = o.cache ? o.cache->length : 0;
  rotary.inverse = inverse;
  tape.executor().rotary(rotary);
}

}  // namespace

namespace {

// Moves the new keys and values behind the old ones, and lets `heads` and `shape` speak of all of them.
void AppendToCache(Tape& tape, const AttentionOptions& o, PackedHeads& heads, AttentionShape& shape) {
  STRATA_CHECK(!tape.recording()) << "a cache serves evaluation only";
  AttentionCache& cache = *o.cache;
  if (cache.length + o.seq_len > cache.max_len) {
    throw Error(StrCat("a cache of ", cache.max_len, " tokens holds ", cache.length, " and cannot take ",
                       o.seq_len, " more"),
                "generate fewer tokens, or a shorter prompt");
  }
  Device& device = tape.executor().device();
  const int64_t row = o.num_kv_heads * o.head_dim;
  auto append = [&](HeadsView& from, const Tensor& to) {
    const auto size = static_cast<int64_t>(SizeOf(from.dtype));
    for (int64_t b = 0; b < o.batch; ++b) {
      for (int64_t t = 0; t < o.seq_len; ++t) {
        device.Copy(static_cast<char*>(to.view().data) + (b * cache.max_len + cache.length + t) * row * size,
                    static_cast<char*>(from.data) + (b * from.batch_stride + t * from.row_stride) * size,
                    static_cast<size_t>(row * size), device.compute_stream());
      }
    }
    from = {to.view().data, from.dtype, cache.max_len * row, row};
  };
  append(heads.k, cache.keys);
  append(heads.v, cache.values);
  shape.q_offset = cache.length;
  cache.length += o.seq_len;
  shape.kv_len = cache.length;
}

}  // namespace

Tensor Attention(Tape& tape, Tensor qkv, const AttentionOptions& options) {
  const Executor& run = tape.executor();
  AttentionShape shape;
  shape.batch = options.batch;
  shape.q_len = shape.kv_len = options.seq_len;
  shape.num_heads = options.num_heads;
  shape.num_kv_heads = options.num_kv_heads;
  shape.head_dim = options.head_dim;
  shape.scale = 1.0f / std::sqrt(static_cast<float>(options.head_dim));
  shape.causal = options.causal;
  shape.key_mask = ViewOf(options.key_mask);
  shape.segment_ids = ViewOf(options.segment_ids);

  Tensor turned = qkv;
  if (options.inv_freq.defined()) {
    qkv = Tensor();
    // On the tape the producer's record holds a slot, not the tensor: the memory is ours when the caller
    // moved it in.
    if (!turned.Unique()) {
      Tensor copy = tape.Empty(turned.shape());
      run.axpby({.a = turned.view(), .b = {}, .out = copy.view()});
      qkv = std::exchange(turned, std::move(copy));
    } else {
      qkv = turned;
    }
    Rotate(tape, turned.view(), options, false);
  }
  const int64_t rows = options.batch * options.seq_len;
  Tensor out = tape.Empty({rows, options.num_heads * options.head_dim});
  Tensor lse;
  if (tape.recording()) lse = EmptyF32(tape, {options.batch, options.num_heads, options.seq_len});
  PackedHeads in = Split(turned.view(), options);
  if (options.cache) AppendToCache(tape, options, in, shape);
  run.attention_forward({.shape = shape,
                         .q = in.q,
                         .k = in.k,
                         .v = in.v,
                         .out = Whole(out.view(), options.seq_len),
                         .lse = ViewOf(lse)});
  // The gradient belongs to the input handle; when it was copied, `turned` only holds the turned values.
  tape.Record("attention", {qkv}, {}, {&out},
              [&tape, turned, out = out.Detached(), lse, shape, options](Backprop& bp) {
                if (!bp.Needs(0)) return;
                Tensor d = tape.Empty(turned.shape());
                const PackedHeads in = Split(turned.view(), options), din = Split(d.view(), options);
                tape.executor().attention_backward({.shape = shape,
                                                    .q = in.q,
                                                    .k = in.k,
                                                    .v = in.v,
                                                    .out = Whole(out.view(), options.seq_len),
                                                    .dout = Whole(bp.dout().view(), options.seq_len),
                                                    .lse = lse.view(),
                                                    .dq = din.q,
                                                    .dk = din.k,
                                                    .dv = din.v});
                Rotate(tape, d.view(), options, true);
                bp.GiveDin(0, std::move(d));
              });
  return out;
}

namespace {

// Where a norm's gradient of x goes. The kernels always make it; when nobody wants it (all below is frozen),
// it goes into `unwanted`.
GradTarget NormInputGrad(const Tape& tape, const Tensor& x, Backprop& bp, Tensor& unwanted) {
  if (bp.Needs(0)) return bp.Din(0);
  unwanted = tape.Empty(x.shape(), x.dtype());
  return {unwanted.view(), false};
}

}  // namespace

Tensor LayerNorm(Tape& tape, const Tensor& x, Parameter& gain, Parameter* bias, float eps) {
  const TensorView& xv = x.view();
  Tensor y = tape.Empty(xv.shape);
  Tensor mean, rstd;
  if (tape.recording()) {
    mean = EmptyF32(tape, {xv.rows()});
    rstd = EmptyF32(tape, {xv.rows()});
  }
  auto forward = [&tape, gain = &gain, bias, eps](const TensorView& in, const TensorView& out,
                                                  const TensorView& m, const TensorView& r) {
    tape.executor().layer_norm_forward({.x = in,
                                        .gain = gain->data,
                                        .bias = bias ? bias->data : TensorView(),
                                        .y = out,
                                        .mean = m,
                                        .rstd = r,
                                        .eps = eps});
  };
  forward(xv, y.view(), ViewOf(mean), ViewOf(rstd));
  tape.SetRecipe(y, [&tape, x, forward] {
    Tensor again = tape.Empty(x.shape());
    forward(x.view(), again.view(), {}, {});
    return again;
  });
  Parameter* const parameters[] = {&gain, bias};
  tape.Record("layer_norm", {x}, parameters, {&y}, [&tape, x, mean, rstd, gain = &gain, bias](Backprop& bp) {
    LayerNormBackwardArgs args;
    args.dy = bp.dout().view();
    args.x = x.view();
    args.gain = gain->data;
    args.mean = mean.view();
    args.rstd = rstd.view();
    Tensor unwanted;
    const GradTarget dx = NormInputGrad(tape, x, bp, unwanted);
    args.dx = dx.view;
    args.accumulate_dx = dx.accumulate;
    if (gain->requires_grad) {
      const GradTarget dgain = tape.WeightGrad(*gain);
      args.dgain = dgain.view;
      args.accumulate_dgain = dgain.accumulate;
    }
    if (bias && bias->requires_grad) {
      const GradTarget dbias = tape.WeightGrad(*bias);
      args.dbias = dbias.view;
      args.accumulate_dbias = dbias.accumulate;
    }
    tape.executor().layer_norm_backward(args);
  });
  return y;
}

Tensor RmsNorm(Tape& tape, const Tensor& x, Parameter& gain, float eps) {
  const TensorView& xv = x.view();
  Tensor y = tape.Empty(xv.shape);
  Tensor rstd;
  if (tape.recording()) rstd = EmptyF32(tape, {xv.rows()});
  tape.executor().rms_norm_forward(
      {.x = xv, .gain = gain.data, .y = y.view(), .rstd = ViewOf(rstd), .eps = eps});
  tape.SetRecipe(y, [&tape, x, gain = &gain, eps] {
    Tensor again = tape.Empty(x.shape());
    tape.executor().rms_norm_forward(
        {.x = x.view(), .gain = gain->data, .y = again.view(), .rstd = {}, .eps = eps});
    return again;
  });
  Parameter* const parameters[] = {&gain};
  tape.Record("rms_norm", {x}, parameters, {&y}, [&tape, x, rstd, gain = &gain](Backprop& bp) {
    RmsNormBackwardArgs args;
    args.dy = bp.dout().view();
    args.x = x.view();
    args.gain = gain->data;
    args.rstd = rstd.view();
    Tensor unwanted;
    const GradTarget dx = NormInputGrad(tape, x, bp, unwanted);
    args.dx = dx.view;
    args.accumulate_dx = dx.accumulate;
    if (gain->requires_grad) {
      const GradTarget dgain = tape.WeightGrad(*gain);
      args.dgain = dgain.view;
      args.accumulate_dgain = dgain.accumulate;
    }
    tape.executor().rms_norm_backward(args);
  });
  return y;
}

Tensor Activate(Tape& tape, const Tensor& x, Activation activation) {
  auto forward = [&tape, x, activation] {
    Tensor y = tape.Empty(x.shape());
    tape.executor().activation_forward({.activation = activation, .x = x.view(), .y = y.view()});
    return y;
  };
  Tensor y = forward();
  tape.SetRecipe(y, forward);
  tape.Record("activation", {x}, {}, {&y}, [&tape, x, activation](Backprop& bp) {
    const GradTarget dx = bp.Din(0);
    tape.executor().activation_backward({.activation = activation,
                                         .dy = bp.dout().view(),
                                         .x = x.view(),
                                         .dx = dx.view,
                                         .accumulate = dx.accumulate});
  });
  return y;
}

Tensor Swiglu(Tape& tape, const Tensor& gate_up) {
  auto forward = [&tape, gate_up] {
    Tensor y = tape.Empty({gate_up.view().rows(), gate_up.view().cols() / 2});
    tape.executor().swiglu_forward({.gate_up = gate_up.view(), .y = y.view()});
    return y;
  };
  Tensor y = forward();
  tape.SetRecipe(y, forward);
  tape.Record("swiglu", {gate_up}, {}, {&y}, [&tape, gate_up](Backprop& bp) {
    Tensor d = tape.Empty(gate_up.shape());
    tape.executor().swiglu_backward(
        {.dy = bp.dout().view(), .gate_up = gate_up.view(), .d_gate_up = d.view()});
    bp.GiveDin(0, std::move(d));
  });
  return y;
}

Tensor Dropout(Tape& tape, const Tensor& x, float p, uint32_t site, GlobalIndex index) {
  if (p == 0.0f || !tape.options().training) return x;
  index.row_offset += tape.options().row_offset;
  DropoutArgs args;
  args.p = p;
  args.random = tape.random(site);
  args.index = index;
  auto forward = [&tape, x, args]() mutable {
    Tensor y = tape.Empty(x.shape());
    args.x = x.view();
    args.y = y.view();
    tape.executor().dropout(args);
    return y;
  };
  Tensor y = forward();
  // Nothing is saved: backward draws the same numbers again.
  tape.Record("dropout", {x}, {}, {&y}, [&tape, args](Backprop& bp) mutable {
    const GradTarget dx = bp.Din(0);
    args.x = bp.dout().view();
    args.y = dx.view;
    args.accumulate = dx.accumulate;
    tape.executor().dropout(args);
  });
  return y;
}

Tensor Add(Tape& tape, const Tensor& a, const Tensor& b) {
  Tensor y = tape.Empty(a.shape());
  tape.executor().axpby({.a = a.view(), .b = b.view(), .out = y.view()});
  tape.Record("add", {a, b}, {}, {&y}, [](Backprop& bp) {
    Tensor dy = bp.TakeDout();
    bp.GiveDin(0, dy);
    bp.GiveDin(1, std::move(dy));
  });
  return y;
}

Tensor GatherRows(Tape& tape, const Tensor& x, const Tensor& index) {
  Tensor y = tape.Empty({index.view().num_elements(), x.view().cols()});
  tape.executor().gather_rows({.x = x.view(), .index = index.view(), .out = y.view()});
  tape.Record("gather_rows", {x}, {}, {&y}, [&tape, index](Backprop& bp) {
    const GradTarget dx = bp.Din(0);
    if (!dx.accumulate) tape.executor().fill({.out = dx.view});
    tape.executor().scatter_rows(
        {.x = bp.dout().view(), .index = index.view(), .out = dx.view, .accumulate = true});
  });
  return y;
}

Tensor ScatterRows(Tape& tape, const Tensor& base, const Tensor& x, const Tensor& index) {
  Tensor y = tape.Empty(base.shape());
  tape.executor().axpby({.a = base.view(), .b = {}, .out = y.view()});
  tape.executor().scatter_rows({.x = x.view(), .index = index.view(), .out = y.view()});
  tape.Record("scatter_rows", {base, x}, {}, {&y}, [&tape, index, rows = x.shape()](Backprop& bp) {
    if (bp.Needs(1)) {
      Tensor dx = tape.Empty(rows);
      tape.executor().gather_rows({.x = bp.dout().view(), .index = index.view(), .out = dx.view()});
      bp.GiveDin(1, std::move(dx));
    }
    if (!bp.Needs(0)) return;
    Tensor dbase = bp.TakeDout();
    if (!dbase.Unique()) {
      Tensor copy = tape.Empty(dbase.shape());
      tape.executor().axpby({.a = dbase.view(), .b = {}, .out = copy.view()});
      dbase = std::move(copy);
    }
    Tensor zeros = tape.Empty(rows);
    tape.executor().fill({.out = zeros.view()});
    tape.executor().scatter_rows({.x = zeros.view(), .index = index.view(), .out = dbase.view()});
    bp.GiveDin(0, std::move(dbase));
  });
  return y;
}

int64_t CrossEntropyChunkRows(int64_t rows) {
  // Long enough that adding each chunk's product into the weight's gradient costs little beside the product
  // (a matrix product passes over its result once for each few hundred of its inner dimension anyway), short
  // enough that the logits stay small.
  return std::min<int64_t>(rows, 512);
}

Tensor LinearCrossEntropy(Tape& tape, const Tensor& x, Parameter& weight, Parameter* bias,
                          const Tensor& targets, float grad_scale, const ChunkLoss& loss_of_chunk) {
  const Executor& run = tape.executor();
  const TensorView xv = x.view().Reshaped({x.view().rows(), x.view().cols()});
  const int64_t rows = xv.rows(), hidden = xv.cols(), vocab = weight.shape[0];
  Tensor loss = EmptyF32(tape, {rows});
  Tensor dx;
  const bool train = tape.recording();
  if (train) dx = tape.Empty({rows, hidden});
  const int64_t chunk = CrossEntropyChunkRows(rows);
  Tensor logits = EmptyF32(tape, {chunk, vocab});
  for (int64_t begin = 0; begin < rows; begin += chunk) {
    const int64_t n = std::min(chunk, rows - begin);
    const TensorView part = logits.view().Rows(0, n), x_part = xv.Rows(begin, n);
    MatmulArgs forward;
    forward.a = x_part;
    forward.b = weight.data;
    forward.c = part;
    forward.trans_b = true;
    if (bias) forward.bias = bias->data;
    run.matmul(forward);
    const SoftmaxCrossEntropyArgs softmax = {.logits = part,
                                             .targets = targets.view().Slice(begin, n),
                                             .loss = loss.view().Slice(begin, n),
                                             .grad_scale = train ? grad_scale : 0.0f};
    if (loss_of_chunk) {
      loss_of_chunk(softmax);
    } else {
      run.softmax_cross_entropy(softmax);
    }
    if (train) LinearBackward(tape, part, x_part, weight, bias, {dx.view().Rows(begin, n), false});
  }
  Parameter* const parameters[] = {&weight, bias};
  tape.Record("linear_cross_entropy", {x}, parameters, {&loss},
              [dx](Backprop& bp) mutable { bp.GiveDin(0, std::move(dx)); });
  tape.MarkRootOnly(loss);
  return loss;
}

}  // namespace strata
