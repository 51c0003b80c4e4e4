// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoints/model/checkpoint.h"
#include "support/base/result.h"

namespace shardwright::checkpoints {

/// Tensors of a checkpoint that may be the model's weights: the tensors
/// under one name prefix of a DCP folder, or one item of per-rank files.
struct WeightCandidate {
  std::string name;           ///< the name prefix, with dots; kTopLevel for tensors without one
  std::uint64_t tensors = 0;  ///< their number
  std::uint64_t bytes = 0;
  /// The number of the optimizer's parameters in this candidate. Without an optimizer: the number
  /// of its tensors that have the same name and shape in the largest candidate.
  std::uint64_t matches = 0;
};

/// The candidate name of tensors without a prefix.
inline constexpr std::string_view kTopLevel = ".";

/// Returns true if a prefix denotes an average or a copy of
/// other weights, such as "ema", "model_ema" or "ref.model".
bool NamesCopy(std::string_view root);

/// Chooses the weights that the optimizer trains: the only candidate with the most matches that is
/// not a copy, otherwise the only one with a usual name of a model ("model", "net", ...).
/// \param by_optimizer  `matches` counts parameters of the optimizer
/// \pre `candidates` is not empty
/// \error kUnsupported  several candidates remain; names them and --weights-of
/// Pure.
Result<std::size_t> ChooseWeights(std::span<const WeightCandidate> candidates, bool by_optimizer);

/// Returns the candidate with the name that the user asks for. A part of a name suffices if no
/// other candidate has it, such as "ema" for "app.ema.model".
/// \error kUsage  no candidate or several have this name; lists the candidates
/// Pure.
Result<std::size_t> FindWeights(std::span<const WeightCandidate> candidates,
                                std::string_view asked);

/// Converts candidates to Checkpoint::weight_sets, with `taken` first.
std::vector<WeightSet> WeightSetsOf(std::span<const WeightCandidate> candidates, std::size_t taken);

/// Returns the message that names the set that is read; empty if there is only one set.
std::string WeightSetsMessage(std::span<const WeightSet> sets);

/// Describes a set for messages: "the weights of "ema" (12 tensors)".
std::string WeightSetText(const WeightSet& set);

}  // namespace shardwright::checkpoints
