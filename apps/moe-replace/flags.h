// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "placement/planning/simulate_events.h"
#include "support/base/result.h"
#include "support/cli/app.h"

namespace shardwright::apps {

/// The flags of moe-replace and its subcommands. Each subcommand adds the flags that it supports.
struct MoeFlags {
  placement::PlanRequest request;
  std::string report;

  /// Adds the positional LOADS, a source of token counts.
  void AddLoadsTo(cli::App& app);
  /// Adds the flags for the cluster and for selecting token counts.
  /// \param at  also adds --at, the planned iteration, and --measured-at
  void AddInputTo(cli::App& app, bool at);
  /// Adds the options of strategies.
  /// \param moves  also adds --old and --forward; otherwise --nonmoe-seconds, which AddTimesTo has
  void AddStrategyOptionsTo(cli::App& app, bool moves);
  /// Adds --faults and --unit.
  void AddFaultsTo(cli::App& app);
  /// Adds the inputs of the times of a plan.
  void AddTimesTo(cli::App& app);
  /// Adds the flags for reports about a plan.
  void AddReportTo(cli::App& app);

  /// Completes `request`, and checks rules that combine several of the flags above.
  /// \param cluster_needed  false if a plan may describe its own cluster
  /// \error kUsage
  Status CheckRules(const cli::App& app, bool cluster_needed);
  /// Copies the values of the shared flags.
  void AddShared(const cli::CommonFlags& common);
  /// Fails if a flag has no effect on the strategy.
  /// \param simulated  also checks flags with an effect on a single plan that is checked later
  /// \param writes_eplb  the format of the plan supports --groups
  /// \error kUsage
  Status CheckKnown(const cli::App& app, const std::string& strategy, bool simulated,
                    bool writes_eplb) const;

 private:
  void AddNonmoeTo(cli::App& app);
  Status CheckCluster(const cli::App& app, bool needed) const;
  Status CheckTimes(const cli::App& app) const;

  std::optional<std::uint64_t> slots_;
  std::string layers_;
  std::string windows_;
  std::string max_moves_;
  std::string everywhere_;
  std::vector<std::string> pins_;
  std::vector<std::string> joined_;
  std::string objective_;
  // The library stores these numbers in smaller types.
  std::uint64_t groups_ = 1;
  std::string effort_ = "4";
  std::optional<std::uint64_t> overlap_;
  std::optional<std::uint64_t> spare_;
};

/// Adds --strategy.
void AddStrategy(cli::App& app, std::string* strategy);

/// Adds the flags about the throughput of a simulated run.
void AddThroughput(cli::App& app, placement::EventsRequest* events);
/// Checks rules that combine several flags about throughput.
/// \error kUsage
Status CheckThroughput(const cli::App& app, const placement::EventsRequest& events);

// The subcommands. Each takes all arguments and returns the exit code.
int CompareMain(int argc, const char* const* argv);
int SimulateFailuresMain(int argc, const char* const* argv);
int EvaluateMain(int argc, const char* const* argv);

}  // namespace shardwright::apps
