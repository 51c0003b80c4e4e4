// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "partial/planner/forecast/simulate.h"
#include "support/base/result.h"

namespace shardwright::partial {

/// Parses faults, one per line: "ITERATION", or "ITERATION NODE,NODE,..." for
/// faults that destroy the memory of nodes. Ignores text after # and empty lines.
/// \param where  name of the text, for messages
/// \error kBadInput  invalid numbers, descending iterations or a
///        repeated node (names the line); kLimit  too many faults
/// Pure. Source: docs/pec-planning.md section 12.
Result<std::vector<SimulatedFault>> ParseFaults(std::string_view text, const std::string& where);

/// Reads and parses a file of faults.
/// \error as ParseFaults; kNotFound
/// Local.
Result<std::vector<SimulatedFault>> ReadFaults(const std::string& path);

}  // namespace shardwright::partial
