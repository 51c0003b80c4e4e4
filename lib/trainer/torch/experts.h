// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace shardwright::trainer_torch {

// Operators for replicated experts that need no tensors. A request and its answer are JSON:
// {"result": ...} or {"error": {"code", "message", "rank"}}. Local, nothing is thrown.

/// Implements the operator `read_plan`: reads a plan of any format for the ranks
/// of a group. Ranks are the live GPUs in ascending order.
/// \param request  {"plan": PATH, "ranks": N}
/// \returns  {"experts", "layers": [number], "device", "node": by rank, "slots":
///        [layer][rank] [expert], "owners": the same or null, "digest"}
std::string ReadPlanRequest(const std::string& request);

/// Implements the operator `plan_moves`: finds the transfers from one plan to another. Uses
/// the record in the new plan if it has one, and verifies the transfers.
/// \param request  {"old", "new": PATH, "old_ranks", "ranks": N, "old_digest", "digest"}
/// \returns  {"transfers": [layer number, expert, from, to, round] between ranks of the new
///        plan, "rounds", "held": [layer][rank][expert] before, for the ranks of the new plan}
std::string PlanMovesRequest(const std::string& request);

/// Implements the operator `calibrate`: adapts a layer's replicas to known token counts.
/// \param request  {"owner": by expert, "planned": [expert][rank], "tokens": by expert,
///        "node": by rank, "overlap", "spare": by rank, "cost": {"seconds_per_token",
///        "bytes_per_token", "bytes_per_s", "expert_bytes"}}
/// \returns  {"holders": [expert][rank], "changed"}
std::string CalibrateRequest(const std::string& request);

}  // namespace shardwright::trainer_torch
