// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "common/pec.h"
#include "common/ucp.h"
#include "partial/restore/restore.h"
#include "support/base/result.h"
#include "support/cli/app.h"

namespace shardwright::apps {

/// The flags of pec-restore.
struct RestoreFlags {
  partial::RestoreOptions options;  ///< without how to write
  std::string output;
  FormatFlags format;
  std::vector<std::string> agents;
  std::vector<std::string> lost;
  KeyFlags key;
  std::string token_log;  ///< to be trimmed; empty: none

  void AddTo(cli::App& app);
  /// Completes `options`; rules that join several flags.
  /// \error kUsage
  Status CheckRules(cli::App& app);
};

}  // namespace shardwright::apps
