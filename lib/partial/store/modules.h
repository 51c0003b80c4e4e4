// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoints/model/checkpoint.h"
#include "engine/exec/integrity.h"
#include "engine/tensor/dtype.h"
#include "engine/tensor/shape.h"
#include "partial/select/sizes.h"
#include "partial/select/types.h"
#include "support/base/result.h"

namespace shardwright::partial {

/// Tensors of a module that are selected together.
enum class Component : std::uint8_t {
  kWeights,  ///< compute weights, frozen parameters, buffers
  kMaster,   ///< master weights: "fp32"
  kMoments,  ///< every other state of the optimizer
};
inline constexpr std::size_t kComponents = 3;
inline constexpr std::array<Component, kComponents> kAllComponents = {
    Component::kWeights, Component::kMaster, Component::kMoments};

/// Returns "weights", "master" or "moments".
std::string_view Name(Component component);

/// \error kUsage  unknown name; the message lists the valid ones
Result<Component> ParseComponent(std::string_view name);

/// Returns the component that a tensor state belongs to.
Component ComponentOf(std::string_view state);

/// Position of a logical tensor in the blob of its component.
struct ModuleTensor {
  std::uint32_t tensor = 0;  ///< index into the checkpoint's map.tensors
  std::uint64_t offset = 0;  ///< in the blob, in bytes
  std::uint64_t bytes = 0;
};

/// One component of a module: its tensors concatenated, sorted by name and state.
struct ModulePart {
  std::vector<ModuleTensor> tensors;
  std::uint64_t bytes = 0;
};

/// The unit that is saved and versioned.
struct Module {
  std::string name;  ///< "blocks.0.moe.deepspeed_moe.experts.deepspeed_experts.3", "blocks.0.qkv"
  ModuleId id;
  std::array<ModulePart, kComponents> parts;  ///< empty if the model has no such tensors

  const ModulePart& part(Component component) const {
    return parts[static_cast<std::size_t>(component)];
  }
  std::uint64_t bytes() const { return parts[0].bytes + parts[1].bytes + parts[2].bytes; }
};

/// The modules of a checkpoint, independent of its layout.
struct Model {
  std::vector<Module> modules;          ///< non-experts by name, then experts by (layer, id)
  std::uint32_t nonexpert_count = 0;    ///< number of non-expert modules
  LayerExperts experts;                 ///< by MoE layer; empty for a model without experts
  std::vector<std::uint32_t> layer_id;  ///< by MoE layer: its number in the checkpoint's files
  exec::Digest fingerprint{};           ///< over names, states, shapes and types
                                        ///< of all tensors, and tied names

  /// Returns the index of an expert in `modules`. \pre it exists
  std::uint32_t expert_module(std::size_t layer, std::size_t expert) const {
    return first_of_layer[layer] + static_cast<std::uint32_t>(expert);
  }
  /// Returns the index in `modules` of a module or of a part of one. \pre it exists
  std::uint32_t index_of(const ModuleId& id) const {
    if (!id.is_expert()) return static_cast<std::uint32_t>(id.layer);
    return expert_module(static_cast<std::size_t>(id.layer), static_cast<std::size_t>(id.expert));
  }
  std::vector<std::uint32_t> first_of_layer;  ///< by MoE layer: index of its expert 0
};

/// Set of components that belong to a part of a module.
using Mask = std::array<bool, kComponents>;

/// Returns the parts of a module that have their own versions, each with
/// the components that the module has. That is the whole module, or two
/// parts for an expert in a store that keeps components: kept and selected.
/// Pure.
std::vector<std::pair<Part, Mask>> PartsOf(const Module& module, const Mask& keep);

/// Groups the logical tensors of a checkpoint into modules. An expert of a MoE layer is
/// one module. Other tensors form one per common name up to the component after the first
/// number ("blocks.0.qkv") or, without a number, up to the last component ("model.embed").
/// \error kBadInput  the experts of a layer are not numbered
///        consecutively: names the missing one; kLimit
/// Pure. Source: docs/formats/store.md, "Modules".
Result<Model> DescribeModel(const checkpoints::Checkpoint& checkpoint);

/// Returns the sizes of a model's modules.
ModelBytes BytesOf(const Model& model);

/// Describes the first difference between two models with both values; empty if they are equal.
/// Pure.
std::string FirstDifference(const checkpoints::Checkpoint& a, const checkpoints::Checkpoint& b);

/// Returns the source members that belong to no module but must be saved:
/// tensors in client state, schedulers and random states. Ascending.
/// Pure.
std::vector<std::uint32_t> PassedMembers(const checkpoints::Checkpoint& checkpoint);

}  // namespace shardwright::partial
