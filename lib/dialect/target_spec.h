#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "dialect/checkpoint.h"

namespace shardwright::dialect {

/// What --target asks for; what is unset keeps the source's value.
struct TargetSpec {
  std::optional<std::uint64_t> zero, dp, tp, pp, ep, sub_group;
  std::optional<DType> dtype;
  std::optional<bool> round_robin;
  /// "uniform", "parameters", or explicit layer ranges "0-3,4-7"; empty means the source's method.
  std::string stages;
};

/// Parses `key=value,...` with keys dp tp pp ep zero dtype sub_group round_robin stages. `stages`
/// comes last when it lists ranges, since they hold commas: "pp=2,stages=0-3,4-7". \error kUsage
/// names the key and what it accepts Pure.
Result<TargetSpec> ParseTargetSpec(std::string_view text);

/// The full topology that a specification asks for, checked against the checkpoint.
/// \error kUnsupported or kInfeasible  names both sides: "ep=3: 8 experts do not divide"
/// Pure.
Result<Topology> ResolveTarget(const TargetSpec& spec, const Checkpoint& source);

}  // namespace shardwright::dialect
