// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "partial/planner/forecast/simulate.h"
#include "support/base/result.h"

namespace shardwright::partial {

/// Faults out of a text: a line each, "ITERATION" or "ITERATION NODE,NODE,..." for those that take
/// the memory of nodes. What follows # and empty lines are left out.
/// \param where  names the text in messages
/// \error kBadInput  names the line: no such numbers, iterations that descend, or a node twice;
///        kLimit  too many faults
/// Pure. Source: docs/pec-planning.md section 12.
Result<std::vector<SimulatedFault>> ParseFaults(std::string_view text, const std::string& where);

/// The same out of a file.
/// \error as ParseFaults; kNotFound
/// Local.
Result<std::vector<SimulatedFault>> ReadFaults(const std::string& path);

}  // namespace shardwright::partial
