// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "placement/core/types.h"
#include "support/base/result.h"
#include "support/comm/comm.h"

namespace shardwright::placement {

/// Plans with the layers drafted on all ranks. Each rank drafts a run of layers, rank 0 finishes,
/// and all ranks get the result, which has the same bytes for every number of ranks.
/// \pre as Strategy::plan; all ranks pass the same arguments (layers with different numbers of
///      experts: call it through PlanEachSize)
/// \error as Strategy::plan, for the first layers that fail
/// Collective.
Result<StrategyResult> PlanOnRanks(comm::Comm& comm, const Strategy& strategy,
                                   const TokenCounts& loads, const Cluster& cluster,
                                   const Placement* current, const Options& options);

/// Converts a result to bytes that are sent to other ranks, and back.
/// \error kInternal  the bytes were not made by Pack
/// Local.
comm::Bytes Pack(const StrategyResult& result);
Result<StrategyResult> UnpackResult(std::span<const std::byte> bytes);

}  // namespace shardwright::placement
