// SPDX-License-Identifier: Apache-2.0
// lib/placement/strategy: the strategies that make placements.
// Each has two halves (strategy_*.cc): a draft, which looks at some layers alone, and a finish,
// which looks at all of them. strategies.cc lists them under their names. lazarus.h, eplb.h and
// hecate.h are the published algorithms by themselves; the other headers are what several
// strategies use. The strategy best is in lib/placement/best.

#pragma once

#include "placement/core/types.h"

namespace shardwright::placement::internal {

// The drafts and finishes of the strategies; contracts as in types.h.

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
/// An empty placement: all the work is in the finish.
Drafting DraftEmpty;

using Finishing = Result<StrategyResult>(StrategyResult draft, const TokenCounts& loads,
                                         const Cluster& cluster, const Placement* current,
                                         const Options& options);

/// Renames nodes after the current placement, if there is one, as Options::node_map says.
Finishing FinishByNodes;
/// Leaves the draft as it is.
Finishing FinishAsDrafted;
/// Leaves experts on their devices, in the slots that they have there now.
Finishing FinishInSlots;
Finishing FinishEplbPlus;
Finishing FinishHecate;
Finishing FinishBest;

/// Seconds that a device needs for a token, forward and backward.
double FlopSeconds(const Options::Model& model);
/// Bytes of an expert's parameters.
double ExpertBytes(const Options::Model& model);

}  // namespace shardwright::placement::internal
