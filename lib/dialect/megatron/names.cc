#include "dialect/megatron/names.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <tuple>

namespace shardwright::dialect::megatron {
namespace {

constexpr std::array<std::string_view, 2> kStacks = {"decoder.layers.", "encoder.layers."};
constexpr std::string_view kExperts = "mlp.experts.";
constexpr std::string_view kLocal = "local_experts.";
constexpr std::array<std::string_view, 4> kNumbered = {"linear_fc1.weight", "linear_fc2.weight",
                                                       "linear_fc1.bias", "linear_fc2.bias"};

/// Takes a number from the front of a text.
std::optional<std::uint64_t> TakeNumber(std::string_view* text) {
  std::uint64_t number = 0;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), number);
  if (error != std::errc() || (text->size() > 1 && (*text)[0] == '0' && end != text->data() + 1)) {
    return std::nullopt;
  }
  text->remove_prefix(static_cast<std::size_t>(end - text->data()));
  return number;
}

/// Takes "5." from the front.
std::optional<std::uint64_t> TakeComponent(std::string_view* text) {
  std::string_view rest = *text;
  const auto number = TakeNumber(&rest);
  if (!number || !rest.starts_with('.')) return std::nullopt;
  *text = rest.substr(1);
  return number;
}

/// What of an expert a name below "mlp.experts." is.
bool TakeExpert(std::string_view text, ParamName* out) {
  if (text.starts_with(kLocal)) {
    text.remove_prefix(kLocal.size());
    out->expert = TakeComponent(&text);
    out->rest = text;
    return out->expert.has_value();
  }
  for (const std::string_view numbered : kNumbered) {
    if (!text.starts_with(numbered)) continue;
    std::string_view digits = text.substr(numbered.size());
    out->expert = TakeNumber(&digits);
    out->rest = numbered;
    if (out->expert && digits.empty()) return true;
    out->expert.reset();
  }
  return false;
}

constexpr std::array<std::string_view, 40> kOrder = {
    "embedding.word_embeddings.",
    "embedding.position_embeddings.",
    "embedding.tokentype_embeddings.",
    "input_layernorm.",
    "self_attention.core_attention.",
    "self_attention.linear_proj.",
    "self_attention.linear_q_proj.",
    "self_attention.linear_q_down_proj.",
    "self_attention.linear_q_up_proj.",
    "self_attention.linear_kv_down_proj.",
    "self_attention.linear_qkv_down_proj.",
    "self_attention.linear_kv_up_proj.",
    "self_attention.linear_qkv.layer_norm_weight",
    "self_attention.linear_qkv.layer_norm_bias",
    "self_attention.linear_qkv.",
    "self_attention.q_layernorm.",
    "self_attention.kv_layernorm.",
    "self_attention.k_layernorm.",
    "pre_cross_attn_layernorm.",
    "cross_attention.linear_proj.",
    "cross_attention.linear_q.",
    "cross_attention.linear_kv.",
    "pre_mlp_layernorm.",
    "mlp.router.",
    "mlp.experts.",
    "mlp.shared_experts.linear_fc1.",
    "mlp.shared_experts.linear_fc2.",
    "mlp.shared_experts.gate_weight",
    "mlp.linear_fc1.layer_norm_weight",
    "mlp.linear_fc1.layer_norm_bias",
    "mlp.linear_fc1.",
    "mlp.linear_fc2.",
    "post_mlp_layernorm.",
    "decoder.final_layernorm.",
    "encoder.final_layernorm.",
    "mtp.",
    "output_layer.",
    "linear_fc1.",
    "linear_fc2.",
    "",
};

std::size_t PlaceOf(std::string_view rest) {
  return static_cast<std::size_t>(
      std::find_if(kOrder.begin(), kOrder.end(),
                   [&](std::string_view one) { return rest.starts_with(one); }) -
      kOrder.begin());
}

/// Before, in, and after the layers.
int BlockOf(const ParamName& name) {
  if (name.layer) return 1;
  return name.rest.starts_with("embedding.") ? 0 : 2;
}

}  // namespace

std::string ParamName::Text() const {
  std::string text = stack;
  if (layer) text += std::to_string(*layer) + ".";
  text += module;
  if (expert) text += std::string(kLocal) + std::to_string(*expert) + ".";
  return text + rest;
}

ParamName ParseName(std::string_view name) {
  ParamName out;
  std::string_view rest = name;
  for (const std::string_view stack : kStacks) {
    if (!name.starts_with(stack)) continue;
    std::string_view below = name.substr(stack.size());
    out.layer = TakeComponent(&below);
    if (!out.layer) continue;
    out.stack = stack;
    rest = below;
  }
  const std::size_t at = rest.find(kExperts);
  const bool component = at == 0 || (at != std::string_view::npos && rest[at - 1] == '.');
  if (component && TakeExpert(rest.substr(at + kExperts.size()), &out)) {
    out.module = rest.substr(0, at + kExperts.size());
  } else {
    out.rest = rest;
  }
  return out;
}

bool IsOfVocabulary(std::string_view name) {
  return name == kEmbedding || name == kOutput || name == "output_layer.bias";
}

bool IsBuffer(std::string_view name) {
  return name.ends_with(".expert_bias") || name.ends_with(".local_tokens_per_expert") ||
         name.ends_with(".inv_freq");
}

bool IsOfLinear(const ParamName& name) {
  return name.layer && name.rest.find("linear_") != std::string::npos;
}

bool ModelOrderLess(std::string_view a, std::string_view b) {
  const ParamName x = ParseName(a);
  const ParamName y = ParseName(b);
  // A name that ends in ".weight" comes before its ".bias".
  const auto key = [](const ParamName& name, std::string_view text) {
    return std::tuple(BlockOf(name), std::string_view(name.stack), name.layer.value_or(0),
                      PlaceOf(name.expert ? std::string_view(name.module) : name.rest),
                      name.expert.value_or(0), PlaceOf(name.rest), text.ends_with(".bias"), text);
  };
  return key(x, a) < key(y, b);
}

}  // namespace shardwright::dialect::megatron
