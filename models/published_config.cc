#include <algorithm>
#include <nlohmann/json.hpp>

#include "models/presets.h"
#include "models/published_checkpoint.h"

namespace strata {
namespace {

using Json = nlohmann::ordered_json;

Activation GeluOrRelu(const std::string& name) {
  if (name == "gelu") return Activation::kGeluErf;
  if (name == "gelu_new" || name == "gelu_pytorch_tanh") return Activation::kGeluTanh;
  if (name == "relu") return Activation::kRelu;
  throw ConfigError("the activation " + name + " is not computed here", "gelu_new, gelu and relu are");
}

const char* NameOf(Activation activation) {
  return activation == Activation::kGeluTanh  ? "gelu_new"
         : activation == Activation::kGeluErf ? "gelu"
                                              : "relu";
}

TransformerConfig Gpt2Config(const nlohmann::json& json) {
  TransformerConfig c;
  c.num_layers = json.at("n_layer");
  c.hidden_size = json.at("n_embd");
  c.num_heads = c.num_kv_heads = json.at("n_head");
  c.max_seq_len = json.at("n_positions");
  c.vocab_size = json.at("vocab_size");
  c.norm_eps = json.value("layer_norm_epsilon", 1e-5);
  c.tie_embeddings = json.value("tie_word_embeddings", true);
  if (json.contains("n_inner") && !json["n_inner"].is_null()) c.ffn_hidden_size = json["n_inner"];
  c.activation = GeluOrRelu(json.value("activation_function", "gelu_new"));
  for (const char* key : {"scale_attn_by_inverse_layer_idx", "add_cross_attention"}) {
    if (json.value(key, false)) throw ConfigError(std::string(key) + " is not computed here");
  }
  return c;
}

TransformerConfig LlamaConfig(const nlohmann::json& json) {
  TransformerConfig c = TypeDefaults(ModelType::kLlama);
  c.num_layers = json.at("num_hidden_layers");
  c.hidden_size = json.at("hidden_size");
  c.num_heads = json.at("num_attention_heads");
  c.num_kv_heads = json.value("num_key_value_heads", c.num_heads);
  c.ffn_hidden_size = json.at("intermediate_size");
  c.max_seq_len = json.value("max_position_embeddings", int64_t{2048});
  c.vocab_size = json.at("vocab_size");
  c.norm_eps = json.value("rms_norm_eps", 1e-6);
  c.tie_embeddings = json.value("tie_word_embeddings", false);
  if (json.contains("head_dim") && !json["head_dim"].is_null()) c.head_dim = json["head_dim"];
  // The newer layout holds rotary settings in rope_parameters, the older one at the top and in rope_scaling.
  std::string rope_type = "default";
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    if (!json.contains(key) || !json[key].is_object()) continue;
    rope_type = json[key].value("rope_type", json[key].value("type", rope_type));
    c.rope_theta = json[key].value("rope_theta", c.rope_theta);
  }
  c.rope_theta = json.value("rope_theta", c.rope_theta);
  if (rope_type != "default")
    throw ConfigError("rotary scaling of type " + rope_type + " is not computed here");
  if (json.value("hidden_act", "silu") != "silu")
    throw ConfigError("hidden_act other than silu is not computed here");
  if (json.value("attention_bias", false) || json.value("mlp_bias", false)) {
    throw ConfigError("Llama layers with biases are not computed here");
  }
  return c;
}

// Mixtral (Jiang et al., 2024): Llama with a mixture of experts in every block, where nothing is dropped.
TransformerConfig MixtralConfig(const nlohmann::json& given) {
  nlohmann::json json = {{"num_key_value_heads", 8},
                         {"max_position_embeddings", 131072},
                         {"rms_norm_eps", 1e-5},
                         {"rope_parameters", {{"rope_theta", 1e6}}},
                         {"num_local_experts", 8},
                         {"num_experts_per_tok", 2},
                         {"output_router_logits", false},
                         {"router_aux_loss_coef", 0.001}};  // what `transformers` takes when nothing is said
  json.merge_patch(given);
  TransformerConfig c = LlamaConfig(json);
  if (json.value("sliding_window", c.max_seq_len) < c.max_seq_len) {
    throw ConfigError(StrCat("sliding_window ", json["sliding_window"].get<int64_t>(),
                             ": attention to a part of max_position_embeddings ", c.max_seq_len,
                             " is not computed here"));
  }
  c.moe.num_experts = {json["num_local_experts"].get<int64_t>()};
  c.moe.top_k = json["num_experts_per_tok"];
  if (c.moe.top_k < 2) {
    throw ConfigError(StrCat("num_experts_per_tok ", c.moe.top_k, " is not computed here"),
                      "two or more, whose weights add up to 1, are");
  }
  c.moe.expert_interval = 1;
  c.moe.dispatch = MoeConfig::Dispatch::kDropless;
  c.moe.sample_second_choice = false;
  c.moe.aux_loss = MoeConfig::AuxLoss::kPooled;
  // The loss holds the auxiliary one only where the routers' logits are kept.
  c.moe.aux_loss_coefficient =
      json["output_router_logits"].get<bool>() ? json["router_aux_loss_coef"].get<double>() : 0.0;
  c.moe.Validate(c.num_layers, 1);
  return c;
}

TransformerConfig BertConfig(const nlohmann::json& json) {
  TransformerConfig c = TypeDefaults(ModelType::kBert);
  c.num_layers = json.at("num_hidden_layers");
  c.hidden_size = json.at("hidden_size");
  c.num_heads = c.num_kv_heads = json.at("num_attention_heads");
  c.ffn_hidden_size = json.at("intermediate_size");
  c.max_seq_len = json.value("max_position_embeddings", int64_t{512});
  c.vocab_size = json.at("vocab_size");
  c.num_token_types = json.value("type_vocab_size", int64_t{2});
  c.norm_eps = json.value("layer_norm_eps", 1e-12);
  c.tie_embeddings = json.value("tie_word_embeddings", true);
  c.activation = GeluOrRelu(json.value("hidden_act", "gelu"));
  if (json.value("position_embedding_type", "absolute") != "absolute")
    throw ConfigError("position_embedding_type other than absolute is not computed here");
  for (const char* key : {"is_decoder", "add_cross_attention"}) {
    if (json.value(key, false)) throw ConfigError(std::string(key) + " is not computed here");
  }
  return c;
}

const char* TorchName(DType dtype) {
  return dtype == DType::kF32 ? "float32" : dtype == DType::kBF16 ? "bfloat16" : "float16";
}

}  // namespace

std::pair<PublishedFamily, TransformerConfig> ParsePublishedConfig(const std::string& text,
                                                                   const std::string& path) {
  const nlohmann::json json = nlohmann::json::parse(text, nullptr, false);
  if (!json.is_object()) throw CheckpointError(path + ": no JSON object", "copy the file again");
  try {
    const std::string type = json.value("model_type", "");
    std::pair<PublishedFamily, TransformerConfig> model;
    if (type == "gpt2") {
      model = {PublishedFamily::kGpt2, Gpt2Config(json)};
    } else if (type == "llama") {
      model = {PublishedFamily::kLlama, LlamaConfig(json)};
    } else if (type == "mixtral") {
      model = {PublishedFamily::kMixtral, MixtralConfig(json)};
    } else if (type == "bert") {
      model = {PublishedFamily::kBert, BertConfig(json)};
    } else {
      throw CheckpointError(path + ": model_type '" + type + "' is not known",
                            "gpt2, llama, mixtral and bert are");
    }
    model.second.Resolve();
    return model;
  } catch (const nlohmann::json::exception& e) {
    throw CheckpointError(StrCat(path, ": ", e.what()),
                          "the configuration lacks a size, or has one of a wrong type");
  } catch (const ConfigError& e) {
    throw CheckpointError(StrCat(path, ": ", e.what()), e.hint());
  }
}

namespace {

// A capacity is a limit of the machine in training, not of the model: Mixtral has none.
bool HasMixtralsExperts(const TransformerConfig& c) {
  const auto& experts = c.moe.num_experts;
  return c.moe.expert_interval == 1 && c.moe.top_k >= 2 && !c.moe.residual &&
         std::all_of(experts.begin(), experts.end(), [&](int64_t n) { return n == experts[0]; });
}

}  // namespace

PublishedFamily ExportFamily(const TransformerConfig& c) {
  const bool vaswani = c.learned_positions && c.bias && c.norm == NormKind::kLayerNorm && !c.gated &&
                       c.num_kv_heads == c.num_heads && c.head_dim * c.num_heads == c.hidden_size;
  const bool decoder = c.causal && !c.post_norm && !c.head_transform && c.num_token_types == 0;
  const bool gpt2 = vaswani && decoder;
  const bool bert = vaswani && !c.causal && c.post_norm && c.head_transform && c.num_token_types > 0;
  const bool llama = decoder && !c.learned_positions && !c.bias && c.norm == NormKind::kRmsNorm && c.gated &&
                     c.activation == Activation::kSilu;
  if (c.moe.enabled()) {
    if (llama && HasMixtralsExperts(c)) return PublishedFamily::kMixtral;
    throw ConfigError(
        "this mixture of experts is not of Mixtral's form (Llama's blocks, each with the same number of "
        "experts, of which a token goes to two or more; no residual MLP): no published layout holds it",
        "train with model.type: llama, moe.expert_interval: 1 and moe.top_k: 2 to export it");
  }
  if (gpt2) return PublishedFamily::kGpt2;
  if (llama) return PublishedFamily::kLlama;
  if (bert) return PublishedFamily::kBert;
  throw ConfigError(
      "this model is neither of GPT-2's or BERT's form (learned positions, layer norm, biases, GELU) nor of "
      "Llama's (rotary positions, RMS norm, no biases, SwiGLU): no published layout holds it",
      "train one of these forms to export it");
}

std::string PublishedConfigJson(PublishedFamily family, const TransformerConfig& c, DType dtype) {
  Json json;
  if (family == PublishedFamily::kGpt2) {
    json = {{"architectures", {"GPT2LMHeadModel"}},
            {"model_type", "gpt2"},
            {"activation_function", NameOf(c.activation)},
            {"n_layer", c.num_layers},
            {"n_embd", c.hidden_size},
            {"n_head", c.num_heads},
            {"n_inner", c.ffn_hidden_size},
            {"n_positions", c.max_seq_len},
            {"layer_norm_epsilon", c.norm_eps}};
  } else if (family == PublishedFamily::kBert) {
    json = {{"architectures", {"BertForMaskedLM"}}, {"model_type", "bert"},
            {"hidden_act", NameOf(c.activation)},   {"num_hidden_layers", c.num_layers},
            {"hidden_size", c.hidden_size},         {"intermediate_size", c.ffn_hidden_size},
            {"num_attention_heads", c.num_heads},   {"max_position_embeddings", c.max_seq_len},
            {"type_vocab_size", c.num_token_types}, {"layer_norm_eps", c.norm_eps}};
  } else {
    const bool mixtral = family == PublishedFamily::kMixtral;
    json = {{"architectures", {mixtral ? "MixtralForCausalLM" : "LlamaForCausalLM"}},
            {"model_type", mixtral ? "mixtral" : "llama"},
            {"hidden_act", "silu"},
            {"num_hidden_layers", c.num_layers},
            {"hidden_size", c.hidden_size},
            {"intermediate_size", c.ffn_hidden_size},
            {"num_attention_heads", c.num_heads},
            {"num_key_value_heads", c.num_kv_heads},
            {"head_dim", c.head_dim},
            {"max_position_embeddings", c.max_seq_len},
            {"rms_norm_eps", c.norm_eps},
            {"rope_theta", c.rope_theta},
            {"rope_parameters", {{"rope_theta", c.rope_theta}, {"rope_type", "default"}}}};
    if (mixtral) {
      // Only the pooled auxiliary loss is Mixtral's.
      const double aux = c.moe.aux_loss == MoeConfig::AuxLoss::kPooled ? c.moe.aux_loss_coefficient : 0.0;
      json.update({{"num_local_experts", c.moe.num_experts[0]},
                   {"num_experts_per_tok", c.moe.top_k},
                   {"output_router_logits", aux > 0},
                   {"router_aux_loss_coef", aux},
                   {"sliding_window", nullptr}});
    } else {
      json.update({{"attention_bias", false}, {"mlp_bias", false}});
    }
  }
  json["initializer_range"] = c.init_std;
  json["tie_word_embeddings"] = c.tie_embeddings;
  json["vocab_size"] = c.vocab_size;
  json["torch_dtype"] = TorchName(dtype);
  json["dtype"] = TorchName(dtype);
  return json.dump(2) + "\n";
}

}  // namespace strata
