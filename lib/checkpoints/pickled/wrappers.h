// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace shardwright::checkpoints {

/// Returns a parameter's name without the parts that wrappers add: "_orig_mod.",
/// "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", and the adapter's name in PEFT's
/// "lora_A.default.weight". None of these parts is a module of the model.
std::string PlainName(std::string_view name);

/// Returns true if a parameter belongs to an adapter, such as "lora_A.default.weight".
bool IsAdapterName(std::string_view name);

/// Returns true if `full` is `name` with an adapter's name in it: "lora_A.default.weight" for
/// "lora_A.weight".
/// Pure.
bool IsWithAdapter(std::string_view full, std::string_view name);

/// Returns the name of a parameter in PEFT's files, which is that of the running model without the
/// adapter's name. Other names are returned unchanged.
/// Pure.
std::string PeftName(std::string_view name);

/// Maps the optimizer's parameter names to the model's names. Names match if they are equal, or
/// if exactly one name of the model is equal after wrapper parts are removed. A prefix "module." or
/// "model." on all names of the model or of the optimizer is also removed. Leaves out names without
/// a match.
/// \returns by name of the optimizer; views into `model`
/// Pure.
std::unordered_map<std::string_view, std::string_view> MatchNames(
    std::span<const std::string_view> model, std::span<const std::string_view> optimizer);

/// The key in Checkpoint::facts, and in the client state,
/// that marks checkpoints saved by PyTorch Lightning.
inline constexpr std::string_view kLightningFact = "pytorch-lightning_version";

/// Result of Unwrap: the removed parts and the new names.
struct Unwrapped {
  std::string front;                  ///< "module." or "model.", or empty
  std::vector<std::string> wrappers;  ///< removed parts, such as "_orig_mod."
  std::vector<std::string> names;     ///< new names, in the order of the given ones
  bool changed() const { return !front.empty() || !wrappers.empty(); }
};

/// Removes the parts that wrappers add to names. Parts that no module has, such as "_orig_mod.",
/// are removed anywhere in a name. "module." is removed if all names begin with it. "model." is
/// removed if all names begin with it, and either some begin with "model.model." or `lightning` is
/// set. Removes nothing if two names would become equal.
/// Pure.
Unwrapped Unwrap(std::span<const std::string_view> names, bool lightning);

}  // namespace shardwright::checkpoints
