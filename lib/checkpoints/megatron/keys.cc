// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/megatron/keys.h"

#include <array>

#include "support/base/checked.h"

namespace shardwright::checkpoints::megatron {
namespace {

constexpr std::string_view kStacked = "experts.";  // follows "mlp.experts."

/// Names of norms: in local modules, and in keys.
struct Alias {
  std::string_view module;
  std::string_view key;
};
constexpr std::array<Alias, 2> kAliases = {
    {{"input_layernorm.", "self_attention.linear_qkv.layer_norm_"},
     {"pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"}}};

/// Removes a prefix like "name_12." and returns its number.
std::optional<std::uint64_t> TakeIndex(std::string_view start, std::string_view* text) {
  if (!text->starts_with(start)) return std::nullopt;
  const std::string_view rest = text->substr(start.size());
  const std::size_t dot = rest.find('.');
  if (dot == std::string_view::npos) return std::nullopt;
  const auto number = NumberIn<std::uint64_t>(rest.substr(0, dot));
  if (number) *text = rest.substr(dot + 1);
  return number;
}

Result<std::vector<std::uint64_t>> Numbers(std::string_view text, std::string_view key) {
  std::vector<std::uint64_t> numbers;
  while (true) {
    const std::string_view one = text.substr(0, text.find('.'));
    const auto number = NumberIn<std::uint64_t>(one);
    if (!number) {
      return Fail(Errc::kBadInput, "\"", key, "\": not a valid object key");
    }
    numbers.push_back(*number);
    if (one.size() == text.size()) return numbers;
    text.remove_prefix(one.size() + 1);
  }
}

std::string Dotted(const std::vector<std::uint64_t>& numbers) {
  std::string text;
  for (const std::uint64_t number : numbers) {
    text += (text.empty() ? "" : ".") + std::to_string(number);
  }
  return text;
}

}  // namespace

std::string Key::Text(std::uint64_t layer, std::uint64_t expert) const {
  ParamName one = name;
  if (layers) one.layer = layer;
  if (experts) one.expert = expert;
  return one.Text();
}

Key ParseKey(std::string_view key, const Args& args) {
  Key out;
  out.name = ParseName(key);
  std::string& rest = out.name.rest;
  if (!out.name.layer) {
    for (const std::string_view stack : {"decoder.layers.", "encoder.layers."}) {
      if (!rest.starts_with(stack)) continue;
      out.name.stack = stack;
      out.layers = true;
      rest = rest.substr(stack.size());
    }
  }
  const std::string stacked = "mlp.experts." + std::string(kStacked);
  if (rest.starts_with(stacked)) {
    out.experts = true;
    out.name.module = "mlp.experts.";
    rest = rest.substr(stacked.size());
  }
  const bool in_layer = out.layers || out.name.layer || out.name.depth;
  for (const Alias& alias : kAliases) {
    if (args.transformer_engine || !in_layer || !rest.starts_with(alias.key)) continue;
    rest = std::string(alias.module) + rest.substr(alias.key.size());
  }
  return out;
}

Key KeyOf(std::string_view name, const Args& args) {
  Key out;
  out.name = ParseName(name);
  if (!out.name.layer && !out.name.depth) return out;
  out.layers = out.name.layer && !args.layers_differ;
  out.experts = out.name.expert.has_value();
  if (!args.hybrid) out.name.stack = out.name.OldStack();
  std::string& rest = out.name.rest;
  // Only tensors have other names, and only if keys come from another implementation:
  // local modules use the keys of Transformer Engine, except for latent attention.
  if (rest.ends_with(kExtraState) || args.transformer_engine || args.latent) return out;
  for (const Alias& alias : kAliases) {
    if (!rest.starts_with(alias.module)) continue;
    rest = std::string(alias.key) + rest.substr(alias.module.size());
  }
  return out;
}

std::string KeyText(const Key& key) {
  std::string text = key.name.stack;
  if (key.name.layer && !key.layers) text += std::to_string(*key.name.layer) + ".";
  text += key.name.module;
  if (key.experts) text += kStacked;
  return text + key.name.rest;
}

Result<ObjectKey> ParseObjectKey(std::string_view key) {
  constexpr std::string_view kShard = "/shard_";
  ObjectKey out;
  const std::size_t at = key.rfind(kShard);
  const std::size_t bar = key.rfind('_');
  if (at == std::string_view::npos || bar < at + kShard.size()) {
    return Fail(Errc::kBadInput, "\"", key, "\": not a valid object key");
  }
  out.name = key.substr(0, at);
  const std::size_t first = at + kShard.size();
  SW_TRY_ASSIGN(out.offset, Numbers(key.substr(first, bar - first), key));
  SW_TRY_ASSIGN(out.shape, Numbers(key.substr(bar + 1), key));
  // An older form has one more component.
  if (out.offset.size() == out.shape.size() + 1) out.offset.pop_back();
  bool inside = out.offset.size() == out.shape.size();
  for (std::size_t i = 0; inside && i < out.offset.size(); ++i) {
    inside = out.offset[i] < out.shape[i];
  }
  if (inside) return out;
  return Fail(Errc::kBadInput, "\"", key, "\": the position of the object is outside of its grid");
}

std::string ObjectKeyText(std::string_view name, const std::vector<std::uint64_t>& offset,
                          const std::vector<std::uint64_t>& shape) {
  return std::string(name) + "/shard_" + Dotted(offset) + "_" + Dotted(shape);
}

std::optional<BucketKey> ParseBucketKey(std::string_view key) {
  BucketKey out;
  if (const auto part = TakeIndex("chained_", &key)) {
    out.part = *part;
    out.chained = true;
  }
  const auto group = TakeIndex("optimizer.distributed.dp_group_idx_", &key);
  if (!group) return std::nullopt;
  out.group = *group;
  const auto buffer = TakeIndex("gbuf_idx_", &key);
  if (!buffer) {
    out.slot = key;
    return out;
  }
  out.buffer = *buffer;
  constexpr std::string_view kDtype = "dtype_";
  const std::size_t end = key.find(')');
  if (!key.starts_with(kDtype) || end == std::string_view::npos || end + 1 >= key.size() ||
      key[end + 1] != '.') {
    return std::nullopt;
  }
  out.dtypes = key.substr(kDtype.size(), end + 1 - kDtype.size());
  key.remove_prefix(end + 2);
  const auto bucket = TakeIndex("bucket_idx_", &key);
  if (!bucket) return std::nullopt;
  out.bucket = *bucket;
  out.slot = key;
  return out;
}

std::string BucketKeyText(const BucketKey& key) {
  std::string text = key.chained ? "chained_" + std::to_string(key.part) + "." : "";
  text += "optimizer.distributed.dp_group_idx_" + std::to_string(key.group) + ".";
  if (!key.dtypes.empty()) {
    text += "gbuf_idx_" + std::to_string(key.buffer) + ".dtype_" + key.dtypes + ".bucket_idx_" +
            std::to_string(key.bucket) + ".";
  }
  return text + key.slot;
}

}  // namespace shardwright::checkpoints::megatron
