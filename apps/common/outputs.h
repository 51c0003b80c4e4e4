// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "support/base/result.h"
#include "support/cli/app.h"

// Single files that a command writes in addition to its main output.

namespace shardwright::apps {

/// Fails if outputs exist, unless --force is given. Rank 0 checks them before any work is done.
/// \param paths  empty ones are ignored
/// \error kBusy
/// Collective.
Status CheckOutputs(cli::Context& context, const std::vector<std::string>& paths);

/// Writes a file atomically. Replaces an existing file only with --force, and never on error.
/// \error as os::CommitFile
/// Local.
Status WriteText(cli::Context& context, const std::string& path, const std::string& text);

}  // namespace shardwright::apps
