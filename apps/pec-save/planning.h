#pragma once

#include <cstdint>
#include <string>

#include "base/result.h"
#include "cli/app.h"
#include "pec-save/job.h"
#include "pec-save/modes.h"
#include "pec-save/plan_flags.h"

namespace shardwright::apps {

/// The flags of pec-save's modes that plan and save nothing.
struct PlanningFlags {
  JobFlags job;
  // --simulate
  std::string faults = "0.02";
  double node_share = 1;
  std::uint64_t interval = 0;
  std::string csv;
  std::string page;
  // --auto
  std::uint64_t persist_bandwidth = 512ULL << 20;
  std::string measure;  ///< folder to measure in; empty: the bandwidths are given
  double fault_rate = 1e-4;
  std::uint64_t iterations = 100'000;
  double plt_limit = 0.0375;
  double lost_share = -1;
  PlanFlags plan;

  void AddTo(cli::App& app);
  /// Refuses flags that say what the store of sizes says.
  /// \param store  the store of sizes, of a mode that plans; empty: the flags say them
  /// \error kUsage
  Status CheckRules(const cli::App& app, Mode mode, const std::string& store,
                    const std::vector<std::string>& patterns);
  /// --lost-share; by default what a node's ranks hold.
  double LostShare(const Job& of) const;
};

}  // namespace shardwright::apps
