// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "placement/planning/planning.h"
#include "support/base/result.h"
#include "support/cli/app.h"

namespace shardwright::apps {

/// The flags of moe-replace and its subcommands; each adds those that it knows.
struct MoeFlags {
  placement::PlanRequest request;
  std::string report;

  /// The positional LOADS.
  void AddLoadsTo(cli::App& app);
  /// The cluster and what is read of the loads.
  /// \param at  also the iteration that is planned for, and that of measuring
  void AddInputTo(cli::App& app, bool at);
  /// What strategies are asked for. \param moves  also --old and --forward
  void AddStrategyOptionsTo(cli::App& app, bool moves);
  /// --faults and --unit.
  void AddFaultsTo(cli::App& app);
  /// How a plan is looked at.
  void AddReportTo(cli::App& app);

  /// Completes `request`; rules of the flags above that join several.
  /// \param cluster_needed  false where a plan may tell its own
  /// \error kUsage
  Status CheckRules(const cli::App& app, bool cluster_needed);
  /// Takes over what the shared flags say.
  void AddShared(const cli::CommonFlags& common);
  /// Refuses flags that the strategy does not know.
  /// \param replayed  also those whose effect on a single plan is checked afterwards
  /// \param writes_eplb  the format of the plan knows --groups
  /// \error kUsage
  Status CheckKnown(const cli::App& app, const std::string& strategy, bool replayed,
                    bool writes_eplb) const;

 private:
  Status CheckCluster(const cli::App& app, bool needed) const;

  std::optional<std::uint64_t> slots_;
  std::string layers_;
  std::string windows_;
  std::string max_moves_;
  std::string everywhere_;
  std::vector<std::string> joined_;
  std::string objective_;
  // Numbers that the library keeps in smaller types.
  std::uint64_t groups_ = 1;
  std::string effort_ = "4";
  std::optional<std::uint64_t> overlap_;
  std::optional<std::uint64_t> spare_;
};

/// --strategy.
void AddStrategy(cli::App& app, std::string* strategy);

// The subcommands: each takes all arguments and returns the exit code.
int CompareMain(int argc, const char* const* argv);
int ReplayMain(int argc, const char* const* argv);
int EvaluateMain(int argc, const char* const* argv);

}  // namespace shardwright::apps
