#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/result.h"
#include "moe/plan_text.h"
#include "moe/types.h"

namespace shardwright::moe {

/// What is asked of a plan, and how it is looked at.
struct JudgeOptions {
  FailureUnit unit = FailureUnit::kNode;
  RecoveryOptions recovery;
  bool forward = false;  ///< nodes may send on what they received
};

/// Proves that a plan can be written, and measures it.
/// \param current  what lies on the devices now, or null
/// \error kInternal  names the rule that the plan breaks: no such plan may be written
/// Local; layers in parallel on the caller's task arena.
Result<JudgedPlan> Judge(std::string_view strategy, StrategyResult result, const Loads& loads,
                         const Cluster& cluster, const Placement* current,
                         const JudgeOptions& options);

/// Failures of that many units that some plan could survive with certainty: the most distinct units
/// that every expert can live on, less one; -1 if the experts do not even fit once.
/// Local, pure.
std::int64_t LargestFaults(const Loads& loads, const Cluster& cluster, FailureUnit unit);

/// Refuses a number of failures that no plan survives.
/// \error kInfeasible  says the largest that one does
/// Local, pure.
Status CheckFaults(std::uint64_t faults, const Loads& loads, const Cluster& cluster,
                   FailureUnit unit);

/// Refuses a plan that survives fewer failures than asked.
/// \error kInfeasible  says how many it survives, and how many another plan could
/// Local, pure.
Status CheckSurvives(const JudgedPlan& plan, std::uint64_t faults, const Loads& loads,
                     const Cluster& cluster, FailureUnit unit);

}  // namespace shardwright::moe
