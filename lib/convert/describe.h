// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "checkpoints/model/checkpoint.h"
#include "convert/check.h"
#include "convert/convert.h"
#include "support/base/result.h"

namespace shardwright::convert {

/// One parameter as a row of --list.
struct ListRow {
  std::string name;
  std::string kind;  ///< "trainable", "frozen", "buffer", "tied to NAME", "state entry"
  std::string shape;
  std::string states;       ///< "fp32 exp_avg exp_avg_sq weight"
  std::string split;        ///< its sharding by tensor parallelism
  std::uint64_t bytes = 0;  ///< of all its states, each element counted once
};

std::vector<ListRow> List(const checkpoints::Checkpoint& checkpoint);

/// Returns the JSON of --list --json: the layout, parameters, states and groups.
nlohmann::json ListJson(const checkpoints::Checkpoint& checkpoint);

/// Describes the shards and bytes of one parameter's tensors in a few lines for each state.
/// \error kNotFound  no such parameter; the message suggests similar names
Result<std::string> ExplainParam(const checkpoints::Checkpoint& checkpoint,
                                 const std::string& name);

/// Returns the same description as JSON.
Result<nlohmann::ordered_json> ExplainJson(const checkpoints::Checkpoint& checkpoint,
                                           const std::string& name);

/// Returns the maps that were applied to a source, as `maps` of a report.
/// Pure.
nlohmann::json MapsJson(const std::vector<MapUsed>& maps);

/// Returns `result` of a conversion's report: layouts, plan, bytes read and written.
/// Pure.
nlohmann::json ConversionJson(const ConvertReport& report);

/// Returns `result` of a comparison's report.
/// Pure.
nlohmann::json CheckJson(const CheckReport& report);

}  // namespace shardwright::convert
