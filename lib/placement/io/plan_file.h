// SPDX-License-Identifier: Apache-2.0
// lib/placement/io: the files of expert placement.
// plan_file.h reads plans of many programs, told apart by their content; plan_text.h writes ours.
// cluster_text.h reads clusters, and report_page.h makes the page of a comparison. Source:
// docs/formats/plan.md, docs/formats/cluster.md.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "placement/core/types.h"
#include "placement/migration/migration.h"
#include "support/base/result.h"

namespace shardwright::placement {

/// A plan as it was found in a file, ours or another program's.
struct PlanFile {
  std::string format;  ///< "plan", "eplb", "sglang", "vllm", "tensorrt-llm", "vllm-ascend",
                       ///< "slot-map", "expert-map"
  std::uint32_t experts = 0;
  /// By layer: its number in the model, or its position among the MoE layers (`positions`).
  std::vector<std::uint32_t> layer_id;
  bool positions = false;
  /// [layer][slot]: the expert, kNoExpert for an empty slot.
  std::vector<std::vector<std::int32_t>> slots;
  /// Slots of every GPU, where the file tells them; else they are dealt evenly to a cluster's live
  /// GPUs.
  std::vector<std::uint32_t> device_slots;
  std::optional<Cluster> cluster;  ///< where the file tells it
  /// Our record of a strategy that copies experts for an iteration: where state lies, as `slots`
  /// and `device_slots`. Empty for all others.
  std::vector<std::vector<std::int32_t>> owner_slots;
  std::vector<std::uint32_t> owner_device_slots;
  /// Our record of a plan that was made from an old one: transfers, lost experts and rounds, and
  /// nothing else of it. Layers are positions in `layer_id`. Whether it leads from anything to this
  /// plan is not proved: Prove does that.
  std::optional<Migration> migration;
};

/// Reads a plan; its format is told by its content (docs/formats/plan.md).
/// \error kNotFound; kBadInput  names layer and slot; kLimit
/// Local.
Result<PlanFile> ReadPlan(const std::string& path);

/// Same, of a text.
/// \param where  names it in messages
/// Pure.
Result<PlanFile> ParsePlan(std::string_view text, const std::string& where);

/// The plan as it lies on `cluster`, for the layers of `loads`. Nodes are found by name where both
/// sides name them; nodes that the plan lacks are empty, what lay on others is gone.
/// \error kBadInput  another shape: layers that the plan lacks, other experts, other GPUs
/// Pure.
Result<Placement> PlacedOn(const PlanFile& plan, const TokenCounts& loads, const Cluster& cluster);

/// The part of a plan that stays: its owners where it has them, else all of it.
/// Pure.
PlanFile StateOf(PlanFile plan);

/// The cluster that a plan itself tells.
/// \error kUsage  if it tells none
/// Pure.
Result<Cluster> ClusterOf(const PlanFile& plan);

}  // namespace shardwright::placement
