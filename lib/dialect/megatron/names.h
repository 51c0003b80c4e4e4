#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace shardwright::dialect::megatron {

/// A parameter's name, by what it says of the parameter's place in the model:
/// "decoder.layers.3.mlp.experts.local_experts.5.linear_fc1.weight" is layer 3 of the stack
/// "decoder.layers.", expert 5, and "linear_fc1.weight" of it.
struct ParamName {
  std::string stack;  ///< "decoder.layers."; empty outside of the layers that stages share out
  std::optional<std::uint64_t> layer;
  std::string module;  ///< of an expert: what lies between, "mlp.experts."
  std::optional<std::uint64_t> expert;
  std::string rest;  ///< "linear_fc1.weight", "mlp.linear_fc1.weight", "output_layer.weight"

  /// The name in the whole model. Experts are named as modules of their own, also those that
  /// grouped layers keep as numbered weights ("mlp.experts.linear_fc1.weight5").
  std::string Text() const;
};

/// Never fails: what is no layer has the whole name as `rest`.
ParamName ParseName(std::string_view name);

inline constexpr std::string_view kExtraState = "_extra_state";
inline constexpr std::string_view kEmbedding = "embedding.word_embeddings.weight";
inline constexpr std::string_view kOutput = "output_layer.weight";

/// True for the rows of a vocabulary: embedding and output layer.
bool IsOfVocabulary(std::string_view name);

/// True for tensors that are saved with the model and not trained.
bool IsBuffer(std::string_view name);

/// True for a linear layer, which has an object beside its tensors, mostly None.
/// \param name  of a parameter or an object of it
bool IsOfLinear(const ParamName& name);

/// Where Megatron-Core's GPT has a parameter: names ascend in the order in which its modules make
/// them, which is the order of gradient buffers.
bool ModelOrderLess(std::string_view a, std::string_view b);

}  // namespace shardwright::dialect::megatron
