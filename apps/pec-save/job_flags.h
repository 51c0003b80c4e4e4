// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "partial/planner/job.h"
#include "support/base/result.h"
#include "support/cli/app.h"

namespace shardwright::apps {

/// Flags of pec-save plan, tune and simulate that describe a job, by STORE or by sizes.
struct JobFlags {
  std::string nonexpert_params = "52428800,2097152,4202496x24,8393728x12,16384x12,2048";
  std::string param_bytes = "2,4,8";
  std::vector<std::string> keep;

  /// \param shape  also adds --experts and --moe-layers; otherwise a trace defines these numbers
  void AddTo(cli::App& app, partial::JobRequest* job, bool shape);
  /// Parses text values. \error kUsage  sizes together with a store; an invalid value
  Status Complete(const cli::App& app, partial::JobRequest* job) const;
};

/// Adds the durations of a step, which only tune and simulate need.
void AddStepTimes(cli::App& app, partial::JobRequest* job);

/// Parses a list such as "0-3,7". \error kUsage  not such a list; kLimit
Result<std::vector<std::uint32_t>> ParseRanks(const std::string& text);

}  // namespace shardwright::apps
