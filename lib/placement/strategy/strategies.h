// SPDX-License-Identifier: Apache-2.0
// lib/placement/strategy: the strategies that make placements.
// Each has two halves in strategy_*.cc: a draft, which treats each layer separately, and a finish,
// which considers all layers. strategies.cc lists them by name. lazarus.h, eplb.h and hecate.h
// contain the published algorithms alone; the other headers have code that several strategies
// share. The strategy best is in lib/placement/best.

#pragma once

#include "placement/core/types.h"

namespace shardwright::placement::internal {

// Drafts and finishes of the strategies. types.h documents their contracts.

using Drafting = Result<StrategyResult>(const TokenCounts& loads, const Cluster& cluster,
                                        const Placement* current, const Options& options);

Drafting DraftLazarus;
Drafting DraftEplb;
Drafting DraftEplbPlus;
Drafting DraftSpread;
Drafting DraftCompact;
Drafting DraftVanilla;
Drafting DraftSmartMoe;
Drafting DraftFlexMoe;
Drafting DraftFasterMoe;
Drafting DraftBest;
/// Returns an empty placement. The finish does all the work.
Drafting DraftEmpty;

using Finishing = Result<StrategyResult>(StrategyResult draft, const TokenCounts& loads,
                                         const Cluster& cluster, const Placement* current,
                                         const Options& options);

/// Renames nodes to match the current placement, if there is one, by Options::node_map.
Finishing FinishByNodes;
/// Returns the draft unchanged.
Finishing FinishAsDrafted;
/// Keeps experts on their devices, in the slots that they have in the current placement.
Finishing FinishInSlots;
Finishing FinishEplbPlus;
Finishing FinishHecate;
Finishing FinishBest;

/// Returns the seconds that a device needs for a token, forward and backward.
double FlopSeconds(const Options::Model& model);
/// Returns the bytes of an expert's parameters.
double ExpertBytes(const Options::Model& model);

}  // namespace shardwright::placement::internal
