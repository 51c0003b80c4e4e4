// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "placement/verify/verify.h"
#include "support/base/result.h"

namespace shardwright::placement {

/// Survival probabilities in a plan record: k = 1 up to the first 0, but at most this many.
inline constexpr std::uint32_t kRecordFailures = 64;

/// Returns a plan record (docs/formats/plan.md) with a line per layer, which ends with a line feed.
/// The same input gives the same bytes, since it contains no time of day and no duration.
/// \pre `loads` and `cluster` are those that the plan was made for
/// Pure.
std::string PlanText(const VerifiedPlan& plan, const TokenCounts& loads, const Cluster& cluster,
                     FailureUnit unit);

/// Formats of plans that programs read.
enum class PlanFormat : std::uint8_t { kPlan, kEplb, kSglang, kVllm, kTensorrt, kAscend };

/// Warnings about data that a format cannot represent, or represents in an unexpected way.
using PlanNotes = std::vector<std::string>;

/// Returns a placement in the format of another program. Its ranks are the live GPUs in order.
/// Fills empty slots with experts that their GPU holds, except for kAscend.
/// \param groups  expert groups of the model's router, for kEplb
/// \param recorded  numbers of all layers of the recording, ascending, not empty; fewer in `loads`
///        mean a partial plan
/// \error kUnsupported  GPUs with different numbers of slots, for kAscend empty slots on some GPUs
///        or an expert twice on one GPU, or for kEplb and kVllm layers with different numbers;
///        kUsage  kPlan
/// Pure.
Result<std::string> ForeignPlanText(PlanFormat format, const Placement& placement,
                                    const TokenCounts& loads, const Cluster& cluster,
                                    std::uint32_t groups, std::span<const std::uint32_t> recorded,
                                    PlanNotes* notes);

/// Returns the JSON description of a cluster, on one line.
/// Pure.
std::string ClusterText(const Cluster& cluster);

}  // namespace shardwright::placement
