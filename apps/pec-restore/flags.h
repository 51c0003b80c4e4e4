#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "base/result.h"
#include "cli/app.h"
#include "pec/restore.h"

namespace shardwright::apps {

/// The flags of pec-restore.
struct RestoreFlags {
  static constexpr std::uint64_t kUnset = std::numeric_limits<std::uint64_t>::max();

  pec::RestoreOptions options;  ///< without how to write
  std::string output;
  std::string target;
  std::uint64_t at = kUnset;
  std::vector<std::string> agents;
  std::vector<std::string> lost;

  void AddTo(cli::App& app);
  /// Completes `options`; rules that join several flags.
  /// \error kUsage
  Status CheckRules(cli::App& app);
};

}  // namespace shardwright::apps
