// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "placement/verify/verify.h"
#include "support/base/result.h"

namespace shardwright::placement {

/// Survival probabilities that a record lists: k = 1 up to the first 0, but no more than this.
inline constexpr std::uint32_t kRecordFailures = 64;

/// Our plan record (docs/formats/plan.md), a line per layer; ends with a line feed. Same input,
/// same bytes: there is no time of day and no duration in it.
/// \pre loads and cluster are those that the plan was made for
/// Pure.
std::string PlanText(const VerifiedPlan& plan, const TokenCounts& loads, const Cluster& cluster,
                     FailureUnit unit);

/// What other programs read.
enum class PlanFormat : std::uint8_t { kPlan, kEplb, kSglang, kVllm, kTensorrt, kAscend };

/// What a format could not take over, or took over otherwise than a reader may expect.
using PlanNotes = std::vector<std::string>;

/// A placement in the format of another program: its ranks are the live GPUs in their order.
/// \param groups  expert groups of the model's router, for kEplb
/// \param trace_layers  layers that the loads hold; fewer in `loads` are a part of the model
/// \error kUnsupported  GPUs with different numbers of experts, or for kAscend an expert twice on
///        one GPU; kUsage  kPlan
/// Pure.
Result<std::string> ForeignPlanText(PlanFormat format, const Placement& placement,
                                    const TokenCounts& loads, const Cluster& cluster,
                                    std::uint32_t groups, std::size_t trace_layers,
                                    PlanNotes* notes);

/// The same cluster in its JSON description, on one line.
/// Pure.
std::string ClusterText(const Cluster& cluster);

}  // namespace shardwright::placement
