// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "support/base/result.h"

namespace shardwright::partial {

/// ModuleId::expert of a module that is no expert.
inline constexpr std::int32_t kNonExpert = -1;

/// What of a module is meant. Expert modules have parts only in a store that keeps some components
/// (say the master weights) of all experts at every checkpoint (docs/pec-planning.md section 1,
/// kept bytes).
enum class Part : std::uint8_t {
  kWhole,     ///< all of it, one version
  kKept,      ///< the components that every checkpoint has of every expert
  kSelected,  ///< the components that a checkpoint has of the selected experts only
};

/// The unit that is saved and versioned: an expert of a layer, or a non-expert layer.
struct ModuleId {
  std::int32_t layer = 0;  ///< expert: ordinal of its MoE layer; else the non-expert's own ordinal
  std::int32_t expert = kNonExpert;
  Part part = Part::kWhole;

  auto operator<=>(const ModuleId&) const = default;
  bool is_expert() const { return expert != kNonExpert; }
  /// Whether every checkpoint has it: non-expert modules and kept parts.
  bool is_complete() const { return !is_expert() || part == Part::kKept; }
};

/// "expert 3 of MoE layer 0", "kept part of expert 3 of MoE layer 0", "non-expert module 2".
std::string Name(const ModuleId& id);

/// The same of an expert by its place in a table of layers.
std::string ExpertName(std::size_t layer, std::size_t expert);

/// A value for every expert: [layer][expert]. Layers may have different numbers of experts.
template <class T>
using PerExpert = std::vector<std::vector<T>>;

/// Tokens, bytes or iterations: [layer][expert].
using Counts = PerExpert<std::uint64_t>;

/// Chosen experts, distinct ids, by layer: [layer][i], in the order of choice.
using Selection = std::vector<std::vector<std::uint32_t>>;

/// Experts of every MoE layer: [layer].
using LayerExperts = std::vector<std::uint32_t>;

/// A value for every expert, all equal.
Counts MakeCounts(const LayerExperts& experts, std::uint64_t value = 0);

/// Experts by layer of a table. \pre no layer has more than 2^32 - 1 of them
template <class T>
LayerExperts ShapeOf(const PerExpert<T>& table) {
  LayerExperts experts;
  experts.reserve(table.size());
  for (const std::vector<T>& layer : table) {
    experts.push_back(static_cast<std::uint32_t>(layer.size()));
  }
  return experts;
}

/// Proves that a model has layers, that every layer has experts, and that both are within limits.
/// \error kBadInput  names the layer; kLimit
/// Pure.
Status ValidateExperts(const LayerExperts& experts);

/// Proves that a table has the given experts in every layer.
/// \param what  names it in the message
/// \error kMismatch  names the layer and both numbers
/// Pure.
Status ValidateShape(const Counts& table, const LayerExperts& experts, const std::string& what);

/// Proves that a selection has distinct experts that exist.
/// \error kMismatch  another number of layers; kBadInput  names layer and expert
/// Pure.
Status Validate(const Selection& selection, const LayerExperts& experts);

/// Number of experts in all layers of a selection.
std::uint64_t SizeOf(const Selection& selection);

}  // namespace shardwright::partial
