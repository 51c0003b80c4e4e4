// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/megatron/names.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <tuple>

namespace shardwright::checkpoints::megatron {
namespace {

constexpr std::array<std::string_view, 2> kStacks = {kDecoderLayers, kEncoderLayers};
constexpr std::string_view kMtp = "mtp.layers.";
constexpr std::string_view kInner = "mtp_model_layer.";
constexpr std::string_view kOldInner = "transformer_layer.";
constexpr std::string_view kExperts = "mlp.experts.";
constexpr std::string_view kLocal = "local_experts.";
constexpr std::array<std::string_view, 4> kNumbered = {"linear_fc1.weight", "linear_fc2.weight",
                                                       "linear_fc1.bias", "linear_fc2.bias"};

/// Removes a number from the front of a text.
std::optional<std::uint64_t> TakeNumber(std::string_view* text) {
  std::uint64_t number = 0;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), number);
  if (error != std::errc() || (text->size() > 1 && (*text)[0] == '0' && end != text->data() + 1)) {
    return std::nullopt;
  }
  text->remove_prefix(static_cast<std::size_t>(end - text->data()));
  return number;
}

/// Removes a component like "5." from the front.
std::optional<std::uint64_t> TakeComponent(std::string_view* text) {
  std::string_view rest = *text;
  const auto number = TakeNumber(&rest);
  if (!number || !rest.starts_with('.')) return std::nullopt;
  *text = rest.substr(1);
  return number;
}

/// Parses an expert's name below "mlp.experts.". Returns false for other names.
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

/// Removes a prefix like "mtp.layers.0.mtp_model_layer.".
void TakeMtp(std::string_view* text, ParamName* out) {
  if (!text->starts_with(kMtp)) return;
  std::string_view below = text->substr(kMtp.size());
  out->depth = TakeComponent(&below);
  if (!out->depth) return;
  out->stack = std::string(kMtp) + std::to_string(*out->depth) + ".";
  for (const std::string_view inner : {kInner, kOldInner}) {
    if (!below.starts_with(inner)) continue;
    below.remove_prefix(inner.size());
    out->stack += kInner;
    break;
  }
  *text = below;
}

constexpr std::array<std::string_view, 43> kOrder = {
    "embedding.word_embeddings.",
    "embedding.position_embeddings.",
    "embedding.tokentype_embeddings.",
    "enorm.",  // of multi-token prediction, like the next two
    "hnorm.",
    "eh_proj.",
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

/// Returns the position relative to the layers: 0 before them, 1 in them, 2 the decoder's
/// last norm, 3 layers of multi-token prediction, 4 the output layer and all other modules.
int BlockOf(const ParamName& name) {
  if (name.layer) return 1;
  if (name.depth) return 3;
  if (name.rest.starts_with("embedding.")) return 0;
  const bool norm = name.rest.starts_with("decoder.") || name.rest.starts_with("encoder.");
  return norm ? 2 : 4;
}

/// Returns true for the norm after the inner layer of multi-token prediction, for any inner layer.
bool IsAfterInner(const ParamName& name) {
  return name.depth && name.rest.starts_with("final_layernorm.");
}

}  // namespace

std::string ParamName::Text() const {
  std::string text = stack;
  if (layer) text += std::to_string(*layer) + ".";
  text += module;
  if (expert) text += std::string(kLocal) + std::to_string(*expert) + ".";
  return text + rest;
}

std::string ParamName::OldStack() const {
  if (!depth || !stack.ends_with(kInner)) return stack;
  return stack.substr(0, stack.size() - kInner.size()) + std::string(kOldInner);
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
  TakeMtp(&rest, &out);
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
  if (!name.layer && !name.depth) return false;
  return name.rest.find("linear_") != std::string::npos || name.rest.starts_with("eh_proj.");
}

std::string_view OtherListOf(std::string_view name) {
  constexpr std::string_view kList = "layers.";
  for (std::size_t at = name.find(kList); at != std::string_view::npos;
       at = name.find(kList, at + 1)) {
    if (at > 0 && name[at - 1] != '.') continue;
    const std::string_view list = name.substr(0, at + kList.size());
    const bool known =
        list == kMtp || std::find(kStacks.begin(), kStacks.end(), list) != kStacks.end();
    return known ? std::string_view() : list;
  }
  return {};
}

bool ModelOrderLess(std::string_view a, std::string_view b) {
  const ParamName x = ParseName(a);
  const ParamName y = ParseName(b);
  // The name with ".weight" precedes the one with ".bias".
  const auto key = [](const ParamName& name, std::string_view text) {
    return std::tuple(BlockOf(name), name.layer ? std::string_view(name.stack) : "",
                      name.layer.value_or(name.depth.value_or(0)), IsAfterInner(name),
                      PlaceOf(name.expert ? std::string_view(name.module) : name.rest),
                      name.expert.value_or(0), PlaceOf(name.rest), text.ends_with(".bias"), text);
  };
  return key(x, a) < key(y, b);
}

}  // namespace shardwright::checkpoints::megatron
