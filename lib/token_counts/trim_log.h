// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "support/base/result.h"

namespace shardwright::token_counts {

/// Checks that each line of a token log is a JSON object with an iteration. The last line may be
/// truncated, as a killed trainer leaves it, and a file that does not exist is an empty log.
/// \error kNotFound if it cannot be read; kBadInput names the line; kLimit for a line above
///        limits::kJsonBytes
/// Local.
Status CheckLog(const std::string& path);

/// Cuts off what follows the last line of an iteration up to `last`: the lines of a run that ended,
/// and a truncated last line. The file is changed in place.
/// \error as CheckLog, with nothing changed; kIo
/// Local.
Status TrimLog(const std::string& path, std::uint64_t last);

}  // namespace shardwright::token_counts
