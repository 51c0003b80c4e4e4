// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "support/base/result.h"

namespace shardwright::partial {

/// Value of ModuleId::expert for a non-expert module.
inline constexpr std::int32_t kNonExpert = -1;

/// Selects a part of a module. Expert modules have parts only in a store
/// that keeps some components (for example the master weights) of all
/// experts at every checkpoint (docs/pec-planning.md section 1, kept bytes).
enum class Part : std::uint8_t {
  kWhole,     ///< the whole module, in one version
  kKept,      ///< components of every expert in every checkpoint
  kSelected,  ///< components of only the selected experts
};

/// Identifies the unit that is saved and versioned: an expert of a layer, or a non-expert layer.
struct ModuleId {
  std::int32_t layer = 0;  ///< ordinal of the MoE layer; for non-experts the module's own ordinal
  std::int32_t expert = kNonExpert;
  Part part = Part::kWhole;

  auto operator<=>(const ModuleId&) const = default;
  bool is_expert() const { return expert != kNonExpert; }
  /// Returns true if every checkpoint contains it: non-expert modules and kept parts.
  bool is_complete() const { return !is_expert() || part == Part::kKept; }
};

/// Returns for example "expert 3 of MoE layer 0", "kept part of ...", or "non-expert module 2".
std::string Name(const ModuleId& id);

/// Returns the same for an expert by its position in a table of layers.
std::string ExpertName(std::size_t layer, std::size_t expert);

/// A value for every expert: [layer][expert]. Layers may differ in their number of experts.
template <class T>
using PerExpert = std::vector<std::vector<T>>;

/// Tokens, bytes or iterations: [layer][expert].
using Counts = PerExpert<std::uint64_t>;

/// Selected experts by layer, distinct ids: [layer][i], in the order of selection.
using Selection = std::vector<std::vector<std::uint32_t>>;

/// Number of experts of every MoE layer: [layer].
using LayerExperts = std::vector<std::uint32_t>;

/// Returns a table with the same value for every expert.
Counts MakeCounts(const LayerExperts& experts, std::uint64_t value = 0);

/// Returns the number of experts by layer of a table. \pre at most 2^32 - 1 per layer
template <class T>
LayerExperts ShapeOf(const PerExpert<T>& table) {
  LayerExperts experts;
  experts.reserve(table.size());
  for (const std::vector<T>& layer : table) {
    experts.push_back(static_cast<std::uint32_t>(layer.size()));
  }
  return experts;
}

/// Checks that a model has layers, that every layer has experts, and that both are within limits.
/// \error kBadInput  names the layer; kLimit
/// Pure.
Status ValidateExperts(const LayerExperts& experts);

/// Checks that a table has the given number of experts in every layer.
/// \param what  name of the table, for messages
/// \error kMismatch  names the layer and both numbers
/// Pure.
Status ValidateShape(const Counts& table, const LayerExperts& experts, const std::string& what);

/// Checks that a selection contains distinct experts that exist.
/// \error kMismatch  wrong number of layers; kBadInput  names layer and expert
/// Pure.
Status Validate(const Selection& selection, const LayerExperts& experts);

/// Returns the number of experts in all layers of a selection.
std::uint64_t SizeOf(const Selection& selection);

}  // namespace shardwright::partial
