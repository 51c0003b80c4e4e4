// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace shardwright::checkpoints::megatron {

/// A parameter's name, split by the parameter's place in the model.
/// "decoder.layers.3.mlp.experts.local_experts.5.linear_fc1.weight" is layer 3
/// of the stack "decoder.layers.", expert 5, and "linear_fc1.weight" as the rest.
///
/// Layers of multi-token prediction are not distributed over stages. They have a depth and no layer
/// number. Their stack contains the depth ("mtp.layers.0.mtp_model_layer."; "mtp.layers.0." for
/// the projection and the norms around the inner layer), so `rest` is the same as in other layers.
struct ParamName {
  std::string stack;                   ///< "decoder.layers."; empty outside of layers
  std::optional<std::uint64_t> layer;  ///< number among the layers that are distributed over stages
  std::optional<std::uint64_t> depth;  ///< index of a multi-token prediction layer
  std::string module;                  ///< of an expert: the text in between, "mlp.experts."
  std::optional<std::uint64_t> expert;
  std::string rest;  ///< "linear_fc1.weight", "mlp.linear_fc1.weight", "output_layer.weight"

  /// Returns the name in the whole model. Experts are named as separate
  /// modules, including those that grouped layers store as numbered weights
  /// ("mlp.experts.linear_fc1.weight5"). The inner layer of multi-token
  /// prediction is named "mtp_model_layer", as in Megatron-Core since 0.17.
  std::string Text() const;

  /// Returns the stack with the older name of that inner layer, "transformer_layer". Keys of
  /// torch_dist use it in all releases, except for hybrid models.
  std::string OldStack() const;
};

/// Parses a name. Never fails: a name outside of layers becomes `rest`.
ParamName ParseName(std::string_view name);

inline constexpr std::string_view kExtraState = "_extra_state";
inline constexpr std::string_view kEmbedding = "embedding.word_embeddings.weight";
inline constexpr std::string_view kOutput = "output_layer.weight";
inline constexpr std::string_view kOutputState = "output_layer._extra_state";
inline constexpr std::string_view kDecoderLayers = "decoder.layers.";
inline constexpr std::string_view kEncoderLayers = "encoder.layers.";

/// Returns true for tensors with vocabulary rows: the embedding and the output layer.
bool IsOfVocabulary(std::string_view name);

/// Returns true for tensors that are saved with the model but not trained.
bool IsBuffer(std::string_view name);

/// Returns true for a linear layer in a layer of the model. It has an object in addition to its
/// tensors, usually None.
/// \param name  name of a parameter, or of an object of the layer
bool IsOfLinear(const ParamName& name);

/// Returns the list of layers of a key or name that ParamName does not support, such as
/// "vision_model.decoder.layers." of a vision tower. Empty for all other names.
std::string_view OtherListOf(std::string_view name);

/// Compares the positions of two parameters in Megatron-Core's GPT: the order in
/// which its modules create them, which is also the order of gradient buffers.
bool ModelOrderLess(std::string_view a, std::string_view b);

}  // namespace shardwright::checkpoints::megatron
