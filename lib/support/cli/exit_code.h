// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>
#include <utility>
#include <vector>

#include "support/base/result.h"

namespace shardwright::cli {

/// The exit code that says `status`: 0 for success, otherwise the value of its Errc.
/// Local.
int ExitCode(const Status& status);

/// Name of a code in reports: "bad_input". Never changes once released.
/// Local.
std::string_view ErrcName(Errc code);

/// What all exit codes mean but those of signals, 0 first.
/// Local.
std::vector<std::pair<int, std::string_view>> ExitMeanings();

/// One word for a whole run in reports: "done", "stopped" or "failed".
/// Local.
std::string_view RunState(const Status& status);

}  // namespace shardwright::cli
