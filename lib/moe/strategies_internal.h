#pragma once

#include "moe/types.h"

namespace shardwright::moe::internal {

// The drafts and finishes of the strategies; contracts as in types.h.

using Drafting = Result<StrategyResult>(const Loads& loads, const Cluster& cluster,
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

using Finishing = Result<StrategyResult>(StrategyResult draft, const Loads& loads,
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

/// Orders the slots of every device so that what stays is where it was.
void KeepSlots(const Placement& current, const Cluster& cluster, Placement* plan);

/// Seconds that a device needs for a token, forward and backward.
double FlopSeconds(const Options::Model& model);
/// Bytes of an expert's parameters.
double ExpertBytes(const Options::Model& model);

}  // namespace shardwright::moe::internal
