// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace shardwright::checkpoints::megatron {

/// A parameter's name, by what it says of the parameter's place in the model:
/// "decoder.layers.3.mlp.experts.local_experts.5.linear_fc1.weight" is layer 3 of the stack
/// "decoder.layers.", expert 5, and "linear_fc1.weight" of it.
///
/// Layers of multi-token prediction are not distributed over stages: they have a depth and no
/// layer. Their stack contains the depth ("mtp.layers.0.mtp_model_layer."; "mtp.layers.0." for the
/// projection and the norms around the inner layer). So `rest` is the same as in other layers.
struct ParamName {
  std::string stack;                   ///< "decoder.layers."; empty outside of layers
  std::optional<std::uint64_t> layer;  ///< number among the layers that are distributed over stages
  std::optional<std::uint64_t> depth;  ///< of a layer of multi-token prediction
  std::string module;                  ///< of an expert: what lies between, "mlp.experts."
  std::optional<std::uint64_t> expert;
  std::string rest;  ///< "linear_fc1.weight", "mlp.linear_fc1.weight", "output_layer.weight"

  /// The name in the whole model. Experts are named as modules of their own, also those that
  /// grouped layers keep as numbered weights ("mlp.experts.linear_fc1.weight5").
  /// The inner layer of multi-token prediction is named "mtp_model_layer", as in Megatron-Core
  /// since 0.17.
  std::string Text() const;

  /// Returns the stack with the older name of that inner layer, "transformer_layer". Keys of
  /// torch_dist use it in all releases, except for hybrid models.
  std::string OldStack() const;
};

/// Never fails: what is no layer has the whole name as `rest`.
ParamName ParseName(std::string_view name);

inline constexpr std::string_view kExtraState = "_extra_state";
inline constexpr std::string_view kEmbedding = "embedding.word_embeddings.weight";
inline constexpr std::string_view kOutput = "output_layer.weight";
inline constexpr std::string_view kOutputState = "output_layer._extra_state";
inline constexpr std::string_view kDecoderLayers = "decoder.layers.";
inline constexpr std::string_view kEncoderLayers = "encoder.layers.";

/// True for the rows of a vocabulary: embedding and output layer.
bool IsOfVocabulary(std::string_view name);

/// True for tensors that are saved with the model and not trained.
bool IsBuffer(std::string_view name);

/// Returns true for a linear layer in a layer of the model. It has an object in addition to its
/// tensors, usually None.
/// \param name  of a parameter or an object of it
bool IsOfLinear(const ParamName& name);

/// Returns the list of layers of a key or name that ParamName does not support, such as
/// "vision_model.decoder.layers." of a vision tower. Empty for all other names.
std::string_view OtherListOf(std::string_view name);

/// Where Megatron-Core's GPT has a parameter: names ascend in the order in which its modules make
/// them, which is the order of gradient buffers.
bool ModelOrderLess(std::string_view a, std::string_view b);

}  // namespace shardwright::checkpoints::megatron
