// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "checkpoints/deepspeed/common/topology.h"
#include "checkpoints/model/format.h"
#include "support/base/result.h"

namespace shardwright::checkpoints {

/// Implements TargetKey::check for the keys of native and universal folders, by the key's name.
Status CheckZeroKey(std::string_view key, std::string_view value);

/// Keys of --target for DeepSpeed's layouts.
inline constexpr std::array<TargetKey, 9> kZeroKeys = {{
    {.name = "dp", .help = "data-parallel ranks", .check = CheckZeroKey},
    {.name = "tp", .help = "tensor-parallel ranks", .check = CheckZeroKey},
    {.name = "pp", .help = "pipeline stages", .check = CheckZeroKey},
    {.name = "ep", .help = "expert-parallel ranks", .check = CheckZeroKey},
    {.name = "zero", .help = "ZeRO stage", .check = CheckZeroKey},
    {.name = "dtype", .help = "type of the compute weights", .check = CheckZeroKey},
    {.name = "sub_group", .help = "elements of a ZeRO-3 sub-group", .check = CheckZeroKey},
    {.name = "round_robin", .help = "order of round_robin_gradients", .check = CheckZeroKey},
    {.name = "stages", .help = "layers of each stage", .check = CheckZeroKey, .lists = true},
}};

/// Topology values that a specification sets. Unset values keep the source's value.
struct ZeroSpec {
  std::optional<std::uint64_t> zero, dp, tp, pp, ep, sub_group;
  std::optional<DType> dtype;
  std::optional<bool> round_robin;
  /// "uniform", "parameters", or explicit layer ranges "0-3,4-7"; empty means the source's method.
  std::string stages;
};

/// \error kUsage names the key and the values that it accepts
/// Pure.
Result<ZeroSpec> ReadZeroSpec(const TargetSpec& spec);

/// Returns the full topology for a specification, after checking it against the checkpoint.
/// \error kUnsupported or kInfeasible names both values: "ep=3: 8 experts do not divide"
/// Pure.
Result<Topology> ResolveTopology(const ZeroSpec& spec, const Checkpoint& source);

}  // namespace shardwright::checkpoints
