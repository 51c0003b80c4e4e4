// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/tp_rules/quantized.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

namespace shardwright::checkpoints {
namespace {

constexpr std::array<std::string_view, 4> kPackedEnds = {"_blocks", "_packed", "_qdata", "_q"};

bool IsAny(std::string_view text, std::span<const std::string_view> words) {
  return std::find(words.begin(), words.end(), text) != words.end();
}

std::string_view LastOf(std::string_view name) {
  const std::size_t dot = name.rfind('.');
  return dot == std::string_view::npos ? name : name.substr(dot + 1);
}

std::string_view ParentOf(std::string_view name) {
  const std::size_t dot = name.rfind('.');
  return dot == std::string_view::npos ? std::string_view() : name.substr(0, dot);
}

/// Returns true for the last part of a scale's or zero point's name.
bool IsCompanionWord(std::string_view word) {
  constexpr std::array<std::string_view, 12> kWords = {
      "zero", "zeros", "qzeros",    "g_idx", "SCB",          "absmax",
      "amax", "qmap",  "quant_map", "code",  "weight_shape", "weight_format"};
  if (word == "logit_scale" || word == "layer_scale") return false;  // names of trained parameters
  return IsAny(word, kWords) || word.find("scale") != std::string_view::npos ||
         word.find("zero_point") != std::string_view::npos || word.ends_with("_amax") ||
         word.ends_with("absmax") || word.ends_with("quant_map") || word.ends_with("_g_idx");
}

/// Returns true for scales of activations and the key-value cache, also in modules without weights.
bool IsActivationScale(std::string_view word) {
  constexpr std::array<std::string_view, 8> kWords = {"k_scale",  "v_scale",     "q_scale",
                                                      "kv_scale", "prob_scale",  "input_scale",
                                                      "p_scale",  "output_scale"};
  return IsAny(word, kWords);
}

/// Returns true for a tensor that contains quantized weights.
bool IsQuantized(const NamedTensor& tensor) {
  const std::string_view last = LastOf(tensor.name);
  switch (tensor.dtype) {
    case DType::kF8E5M2:
    case DType::kF8E4M3:
    case DType::kF8E5M2Fnuz:
    case DType::kF8E4M3Fnuz:
    case DType::kF4E2M1x2:
    case DType::kF6E2M3:
    case DType::kF6E3M2:
      return !IsCompanionWord(last);
    case DType::kI8:
    case DType::kU8:
      return last == "weight" || last == "qweight" || last == "W_q" || last == "_data" ||
             last == "qdata" || last.ends_with("_blocks") || last.ends_with("_packed") ||
             last.ends_with("_qdata") || last.ends_with("_proj");
    case DType::kI32:
    case DType::kI16:
      return last == "qweight" || last == "weight_packed" || last == "B";
    default:
      return false;
  }
}

using Texts = std::set<std::string, std::less<>>;

/// Prefixes of the names of companion tensors.
struct Owners {
  Texts stems;    ///< "experts.gate_up_proj", followed by "_scales" or ".absmax"
  Texts modules;  ///< "layers.0.q_proj", followed by ".weight_scale"

  void Add(std::string_view name) {
    stems.emplace(name);
    for (const std::string_view end : kPackedEnds) {
      if (name.ends_with(end)) stems.emplace(name.substr(0, name.size() - end.size()));
    }
    modules.emplace(ParentOf(name));
    // Quanto stores "weight._data" next to "weight._scale", and "input_scale" in the module.
    if (LastOf(name).starts_with('_')) modules.emplace(ParentOf(ParentOf(name)));
  }

  bool Has(std::string_view name) const {
    const std::string_view last = LastOf(name);
    const std::string_view module = ParentOf(name);
    // A tensor has no other children: "weight.absmax", "weight.quant_state.nf4".
    for (std::size_t dot = name.rfind('.'); dot != std::string_view::npos && dot > 0;
         dot = name.rfind('.', dot - 1)) {
      if (stems.contains(name.substr(0, dot))) return true;
    }
    if (!IsCompanionWord(last)) return false;
    if (modules.contains(module)) return true;
    for (std::size_t cut = name.rfind('_'); cut != std::string_view::npos && cut > 0;
         cut = name.rfind('_', cut - 1)) {
      if (stems.contains(name.substr(0, cut))) return true;
    }
    return false;
  }
};

}  // namespace

Texts QuantizationTensors(std::span<const NamedTensor> tensors) {
  Owners owners;
  for (const NamedTensor& tensor : tensors) {
    if (IsQuantized(tensor)) owners.Add(tensor.name);
  }
  Texts out;
  if (owners.stems.empty()) return out;
  for (const NamedTensor& tensor : tensors) {
    if (IsQuantized(tensor)) continue;
    const bool activation = IsActivationScale(LastOf(tensor.name)) && Elems(tensor.shape) == 1;
    if (activation || owners.Has(tensor.name)) out.emplace(tensor.name);
  }
  return out;
}

std::string KeptWithWeights(std::size_t count) {
  return std::to_string(count) +
         " tensors are scales or other data of quantized weights: they stay with these weights, "
         "unchanged, and are not trained";
}

Texts QuantizationTensors(const Checkpoint& checkpoint) {
  std::vector<NamedTensor> tensors;
  tensors.reserve(checkpoint.params.size());
  for (const Param& param : checkpoint.params) {
    tensors.push_back({param.name, param.dtype, param.shape});
  }
  return QuantizationTensors(tensors);
}

}  // namespace shardwright::checkpoints
