// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>
#include <utility>
#include <vector>

#include "support/base/result.h"

namespace shardwright::cli {

/// Returns the exit code for `status`: 0 for success, otherwise the value of its Errc.
/// Local.
int ExitCode(const Status& status);

/// Returns the name of an error code in reports: "bad_input". Names never change after a release.
/// Local.
std::string_view ErrcName(Errc code);

/// Returns the exit codes with their meanings, 0 first, without the codes of signals.
/// Local.
std::vector<std::pair<int, std::string_view>> ExitMeanings();

/// Returns the outcome of a whole run as one word for reports: "done", "stopped" or "failed".
/// Local.
std::string_view RunState(const Status& status);

}  // namespace shardwright::cli
