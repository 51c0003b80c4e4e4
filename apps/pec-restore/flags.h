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
  partial::RestoreOptions options;  ///< without the options for writing
  std::string output;
  FormatFlags format;
  std::vector<std::string> agents;
  std::vector<std::string> lost;
  KeyFlags key;
  std::string token_log;  ///< token log to trim; empty: none

  void AddTo(cli::App& app);
  /// Completes `options`, and checks rules that combine several flags.
  /// \error kUsage
  Status CheckRules(cli::App& app);
};

}  // namespace shardwright::apps
