// SPDX-License-Identifier: Apache-2.0
// lib/placement/io: the files of expert placement.
// plan_file.h reads plans of many programs and detects their format by content. plan_text.h
// writes plan records. cluster_text.h reads clusters, and report_page.h makes the HTML report of
// a comparison. Source: docs/formats/plan.md, docs/formats/cluster.md.

#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "placement/core/types.h"
#include "placement/migration/migration.h"
#include "support/base/result.h"

namespace shardwright::placement {

/// A plan from a file, in the format of Shardwright or of another program.
struct PlanFile {
  std::string format;         ///< "plan", "eplb", "sglang", "vllm", "tensorrt-llm", "vllm-ascend",
                              ///< "slot-map", "expert-map"
  std::uint32_t experts = 0;  ///< the largest number in a layer
  std::vector<std::uint32_t> layer_experts;  ///< by layer; empty: all have `experts`
  /// By layer: its number in the model, or its position among the MoE layers (`positions`).
  std::vector<std::uint32_t> layer_id;
  bool positions = false;
  /// [layer][slot]: the expert, kNoExpert for an empty slot.
  std::vector<std::vector<std::int32_t>> slots;
  /// Slots of every GPU. Empty if the file does not specify them: then they are dealt evenly
  /// to a cluster's live GPUs.
  std::vector<std::uint32_t> device_slots;
  std::optional<Cluster> cluster;  ///< set if the file specifies it
  /// For plan records of a strategy that copies experts for an iteration: slots with the state,
  /// in the form of `slots` and `device_slots`. Empty for all others.
  std::vector<std::vector<std::int32_t>> owner_slots;
  std::vector<std::uint32_t> owner_device_slots;
  /// For plan records made from an old plan: its transfers, lost experts and rounds only.
  /// Layers are positions in `layer_id`. The reader does not verify that the migration leads
  /// to this plan; Prove does that.
  std::optional<Migration> migration;

  /// Returns the number of experts of a layer, given by its position.
  std::uint32_t ExpertsOf(std::size_t layer) const {
    return layer_experts.empty() ? experts : layer_experts[layer];
  }
};

/// Reads a plan and detects its format by content (docs/formats/plan.md).
/// \error kNotFound; kBadInput  names layer and slot; kLimit
/// Local.
Result<PlanFile> ReadPlan(const std::string& path);

/// Parses a plan from text.
/// \param where  name of the text in messages
/// Pure.
Result<PlanFile> ParsePlan(std::string_view text, const std::string& where);

/// Returns the plan on `cluster`, for the layers of `loads`. Matches nodes by name if both have
/// names. Nodes that the plan lacks are empty, and replicas on other nodes are dropped.
/// \param recorded  numbers of all layers of the recording, ascending, of which `loads` may have a
///        part. Rows of a plan with `positions` are these layers, or those of `loads` if there are
///        as many. Empty: the layers of `loads`.
/// \error kBadInput  another shape: layers that the plan lacks, other experts, other GPUs, or with
///        `positions` another number of layers
/// Pure.
Result<Placement> PlacedOn(const PlanFile& plan, const TokenCounts& loads, const Cluster& cluster,
                           std::span<const std::uint32_t> recorded = {});

/// Returns the part of a plan with state: its owners if it has them, otherwise all of it.
/// Pure.
PlanFile StateOf(PlanFile plan);

/// Returns the cluster that the plan's file specifies.
/// \error kUsage  the file does not specify a cluster
/// Pure.
Result<Cluster> ClusterOf(const PlanFile& plan);

}  // namespace shardwright::placement
