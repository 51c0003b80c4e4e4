// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "support/base/result.h"
#include "support/cli/app.h"

// Single files that a command writes beside its answer.

namespace shardwright::apps {

/// Refuses outputs that exist without --force, before any work is done. Rank 0 looks.
/// \param paths  empty ones stand for nothing
/// \error kBusy
/// Collective.
Status CheckOutputs(cli::Context& context, const std::vector<std::string>& paths);

/// Writes one whole, or leaves what was there.
/// \error as os::CommitFile
/// Local.
Status WriteText(cli::Context& context, const std::string& path, const std::string& text);

}  // namespace shardwright::apps
