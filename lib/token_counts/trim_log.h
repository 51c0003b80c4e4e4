// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "support/base/result.h"

namespace shardwright::token_counts {

/// Checks that each line of a token log is a JSON object with an iteration. The last line may be
/// truncated, as a killed trainer leaves it. A missing file is treated as an empty log.
/// \error kNotFound if it cannot be read; kBadInput names the line; kLimit for a line above
///        limits::kJsonBytes
/// Local.
Status CheckLog(const std::string& path);

/// Removes all lines after the last line of an iteration up to `last`: lines of a discarded
/// run, and a truncated last line. Changes the file in place.
/// \error as CheckLog, without changing the file; kIo
/// Local.
Status TrimLog(const std::string& path, std::uint64_t last);

}  // namespace shardwright::token_counts
