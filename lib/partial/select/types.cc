// SPDX-License-Identifier: Apache-2.0
#include "partial/select/types.h"

#include <numeric>

#include "support/base/limits.h"

namespace shardwright::partial {

std::string Name(const ModuleId& id) {
  if (!id.is_expert()) return "non-expert module " + std::to_string(id.layer);
  std::string expert =
      "expert " + std::to_string(id.expert) + " of MoE layer " + std::to_string(id.layer);
  switch (id.part) {
    case Part::kKept:
      return "kept part of " + expert;
    case Part::kSelected:
      return "selected part of " + expert;
    case Part::kWhole:
      break;
  }
  return expert;
}

std::string ExpertName(std::size_t layer, std::size_t expert) {
  return Name(ModuleId{static_cast<std::int32_t>(layer), static_cast<std::int32_t>(expert)});
}

Counts MakeCounts(const LayerExperts& experts, std::uint64_t value) {
  Counts counts;
  counts.reserve(experts.size());
  for (std::uint32_t n : experts) counts.emplace_back(n, value);
  return counts;
}

Status ValidateExperts(const LayerExperts& experts) {
  if (experts.empty()) return Fail(Errc::kBadInput, "the model has no MoE layer");
  if (experts.size() > limits::kMoeLayers) {
    return Fail(Errc::kLimit, "expected at most ", limits::kMoeLayers, " MoE layers, found ",
                experts.size());
  }
  for (std::size_t m = 0; m < experts.size(); ++m) {
    if (experts[m] == 0) {
      return Fail(Errc::kBadInput, "MoE layer ", m, " has no experts");
    }
    if (experts[m] > limits::kMoeExperts) {
      return Fail(Errc::kLimit, "MoE layer ", m, ": expected at most ", limits::kMoeExperts,
                  " experts, found ", experts[m]);
    }
  }
  return {};
}

Status ValidateShape(const Counts& table, const LayerExperts& experts, const std::string& what) {
  if (table.size() != experts.size()) {
    return Fail(Errc::kMismatch, what, ": ", table.size(), " MoE layers, expected ",
                experts.size());
  }
  for (std::size_t m = 0; m < experts.size(); ++m) {
    if (table[m].size() != experts[m]) {
      return Fail(Errc::kMismatch, what, ": MoE layer ", m, ": ", table[m].size(),
                  " experts, expected ", experts[m]);
    }
  }
  return {};
}

Status Validate(const Selection& selection, const LayerExperts& experts) {
  if (selection.size() != experts.size()) {
    return Fail(Errc::kMismatch, "selection: ", selection.size(), " MoE layers, expected ",
                experts.size());
  }
  std::vector<bool> seen;
  for (std::size_t m = 0; m < experts.size(); ++m) {
    seen.assign(experts[m], false);
    for (std::uint32_t e : selection[m]) {
      if (e < experts[m] && !seen[e]) {
        seen[e] = true;
        continue;
      }
      return Fail(
          Errc::kBadInput, "selection: MoE layer ", m, ": expert ", e,
          (e < experts[m] ? " is listed twice"
                          : " does not exist, the layer has " + std::to_string(experts[m])));
    }
  }
  return {};
}

std::uint64_t SizeOf(const Selection& selection) {
  return std::accumulate(selection.begin(), selection.end(), std::uint64_t{0},
                         [](std::uint64_t sum, const std::vector<std::uint32_t>& layer) {
                           return sum + layer.size();
                         });
}

}  // namespace shardwright::partial
