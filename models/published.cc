#include "models/published.h"

namespace strata {
namespace {

std::vector<PublishedTensor> Gpt2Tensors(const TransformerConfig& c) {
  const int64_t h = c.hidden_size, f = c.ffn_hidden_size, qkv = c.qkv_size();
  std::vector<PublishedTensor> tensors;
  auto add = [&](const std::string& name, Shape shape, const std::string& parameter,
                 bool transposed = false) {
    tensors.push_back({"transformer." + name, shape, parameter, 0, transposed});
  };
  add("wte.weight", {c.vocab_size, h}, "embedding.tokens.weight");
  add("wpe.weight", {c.max_seq_len, h}, "embedding.positions.weight");
  for (int64_t i = 0; i < c.num_layers; ++i) {
    const std::string theirs = StrCat("h.", i, "."), ours = StrCat("blocks.", i, ".");
    auto norm = [&](const std::string& name, const std::string& parameter) {
      add(theirs + name + ".weight", {h}, ours + parameter + ".weight");
      add(theirs + name + ".bias", {h}, ours + parameter + ".bias");
    };
    auto linear = [&](const std::string& name, int64_t in, int64_t out, const std::string& parameter) {
      add(theirs + name + ".weight", {in, out}, ours + parameter + ".weight", true);
      add(theirs + name + ".bias", {out}, ours + parameter + ".bias");
    };
    norm("ln_1", "attention_norm");
    linear("attn.c_attn", h, qkv, "attention.qkv");
    linear("attn.c_proj", h, h, "attention.out");
    norm("ln_2", "mlp_norm");
    linear("mlp.c_fc", h, f, "mlp.in");
    linear("mlp.c_proj", f, h, "mlp.out");
  }
  add("ln_f.weight", {h}, "head.norm.weight");
  add("ln_f.bias", {h}, "head.norm.bias");
  if (!c.tie_embeddings)
    tensors.push_back({"lm_head.weight", {c.vocab_size, h}, "head.output.weight", 0, false});
  return tensors;
}

// Llama's, and Mixtral's with experts in place of the MLPs.
std::vector<PublishedTensor> LlamaTensors(const TransformerConfig& c) {
  const int64_t h = c.hidden_size, f = c.ffn_hidden_size;
  const int64_t q = c.num_heads * c.head_dim, kv = c.num_kv_heads * c.head_dim;
  std::vector<PublishedTensor> tensors;
  auto add = [&](const std::string& name, Shape shape, const std::string& parameter, int64_t row_begin = 0) {
    tensors.push_back({name, shape, parameter, row_begin, false});
  };
  // A gated MLP, one of those that are stacked in `in` and `out`.
  auto mlp = [&](const std::string& gate, const std::string& up, const std::string& down,
                 const std::string& in, const std::string& out, int64_t number) {
    add(gate + ".weight", {f, h}, in + ".weight", 2 * f * number);
    add(up + ".weight", {f, h}, in + ".weight", 2 * f * number + f);
    add(down + ".weight", {h, f}, out + ".weight", h * number);
  };
  add("model.embed_tokens.weight", {c.vocab_size, h}, "embedding.tokens.weight");
  for (int64_t i = 0; i < c.num_layers; ++i) {
    const std::string theirs = StrCat("model.layers.", i, "."), ours = StrCat("blocks.", i, ".");
    add(theirs + "self_attn.q_proj.weight", {q, h}, ours + "attention.qkv.weight", 0);
    add(theirs + "self_attn.k_proj.weight", {kv, h}, ours + "attention.qkv.weight", q);
    add(theirs + "self_attn.v_proj.weight", {kv, h}, ours + "attention.qkv.weight", q + kv);
    add(theirs + "self_attn.o_proj.weight", {h, q}, ours + "attention.out.weight");
    if (c.moe.enabled()) {
      const std::string layer = theirs + "block_sparse_moe.", experts = ours + "moe.experts.";
      add(layer + "gate.weight", {c.moe.NumExperts(i), h}, ours + "moe.gate.weight");
      for (int64_t e = 0; e < c.moe.NumExperts(i); ++e) {
        const std::string w = StrCat(layer, "experts.", e, ".w");
        mlp(w + "1", w + "3", w + "2", experts + "in", experts + "out", e);
      }
    } else {
      const std::string layer = theirs + "mlp.";
      mlp(layer + "gate_proj", layer + "up_proj", layer + "down_proj", ours + "mlp.in", ours + "mlp.out", 0);
    }
    add(theirs + "input_layernorm.weight", {h}, ours + "attention_norm.weight");
    add(theirs + "post_attention_layernorm.weight", {h}, ours + "mlp_norm.weight");
  }
  add("model.norm.weight", {h}, "head.norm.weight");
  if (!c.tie_embeddings) add("lm_head.weight", {c.vocab_size, h}, "head.output.weight");
  return tensors;
}

std::vector<PublishedTensor> BertTensors(const TransformerConfig& c) {
  const int64_t h = c.hidden_size, f = c.ffn_hidden_size;
  std::vector<PublishedTensor> tensors;
  auto add = [&](const std::string& name, Shape shape, const std::string& parameter, int64_t row_begin = 0) {
    tensors.push_back({name, shape, parameter, row_begin, false});
  };
  auto linear = [&](const std::string& name, int64_t in, int64_t out, const std::string& parameter,
                    int64_t row_begin = 0) {
    add(name + ".weight", {out, in}, parameter + ".weight", row_begin);
    add(name + ".bias", {out}, parameter + ".bias", row_begin);
  };
  auto norm = [&](const std::string& name, const std::string& parameter) {
    add(name + ".weight", {h}, parameter + ".weight");
    add(name + ".bias", {h}, parameter + ".bias");
  };
  const std::string embeddings = "bert.embeddings.";
  add(embeddings + "word_embeddings.weight", {c.vocab_size, h}, "embedding.tokens.weight");
  add(embeddings + "position_embeddings.weight", {c.max_seq_len, h}, "embedding.positions.weight");
  add(embeddings + "token_type_embeddings.weight", {c.num_token_types, h}, "embedding.token_types.weight");
  norm(embeddings + "LayerNorm", "embedding.norm");
  for (int64_t i = 0; i < c.num_layers; ++i) {
    const std::string theirs = StrCat("bert.encoder.layer.", i, "."), ours = StrCat("blocks.", i, ".");
    linear(theirs + "attention.self.query", h, h, ours + "attention.qkv", 0);
    linear(theirs + "attention.self.key", h, h, ours + "attention.qkv", h);
    linear(theirs + "attention.self.value", h, h, ours + "attention.qkv", 2 * h);
    linear(theirs + "attention.output.dense", h, h, ours + "attention.out");
    norm(theirs + "attention.output.LayerNorm", ours + "attention_norm");
    linear(theirs + "intermediate.dense", h, f, ours + "mlp.in");
    linear(theirs + "output.dense", f, h, ours + "mlp.out");
    norm(theirs + "output.LayerNorm", ours + "mlp_norm");
  }
  add("cls.predictions.bias", {c.vocab_size}, "head.bias");
  linear("cls.predictions.transform.dense", h, h, "head.transform");
  norm("cls.predictions.transform.LayerNorm", "head.norm");
  if (!c.tie_embeddings) add("cls.predictions.decoder.weight", {c.vocab_size, h}, "head.output.weight");
  return tensors;
}

}  // namespace

std::vector<PublishedTensor> PublishedTensors(PublishedFamily family, const TransformerConfig& config) {
  switch (family) {
    case PublishedFamily::kGpt2:
      return Gpt2Tensors(config);
    case PublishedFamily::kBert:
      return BertTensors(config);
    case PublishedFamily::kLlama:
    case PublishedFamily::kMixtral:
      break;
  }
  return LlamaTensors(config);
}

}  // namespace strata
