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

/// One parameter as --list shows it.
struct ListRow {
  std::string name;
  std::string kind;  ///< "trainable", "frozen", "buffer", "tied to NAME", "state entry"
  std::string shape;
  std::string states;       ///< "fp32 exp_avg exp_avg_sq weight"
  std::string split;        ///< how tensor parallelism cuts it
  std::uint64_t bytes = 0;  ///< of all its states, logical
};

std::vector<ListRow> List(const checkpoints::Checkpoint& checkpoint);

/// What --list --json holds: the layout, parameters, states, groups.
nlohmann::json ListJson(const checkpoints::Checkpoint& checkpoint);

/// Which shards and bytes form one parameter's tensors: a few lines for each state.
/// \error kNotFound  no such parameter; names near ones
Result<std::string> ExplainParam(const checkpoints::Checkpoint& checkpoint,
                                 const std::string& name);

/// The same for programs.
Result<nlohmann::ordered_json> ExplainJson(const checkpoints::Checkpoint& checkpoint,
                                           const std::string& name);

/// Maps that a source went through, as a report's `maps`.
/// Pure.
nlohmann::json MapsJson(const std::vector<MapUsed>& maps);

/// The report's `result` of a conversion: layouts, plan, what was read and written.
/// Pure.
nlohmann::json ConversionJson(const ConvertReport& report);

/// The report's `result` of a comparison.
/// Pure.
nlohmann::json CheckJson(const CheckReport& report);

}  // namespace shardwright::convert
