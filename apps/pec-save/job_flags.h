// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "partial/planner/job.h"
#include "support/base/result.h"
#include "support/cli/app.h"

namespace shardwright::apps {

/// The flags of pec-save plan, tune and simulate that describe a job: STORE, or sizes.
struct JobFlags {
  std::string nonexpert_params = "52428800,2097152,4202496x24,8393728x12,16384x12,2048";
  std::string param_bytes = "2,4,8";
  std::vector<std::string> keep;

  /// \param shape  also --experts and --moe-layers; without it a trace says them
  void AddTo(cli::App& app, partial::JobRequest* job, bool shape);
  /// Parses what is text. \error kUsage  sizes beside a store; a text that is none
  Status Complete(const cli::App& app, partial::JobRequest* job) const;
};

/// The times of a step, which tune and simulate know besides.
void AddStepTimes(cli::App& app, partial::JobRequest* job);

/// "0-3,7" as numbers. \error kUsage  not such a list; kLimit
Result<std::vector<std::uint32_t>> ParseRanks(const std::string& text);

}  // namespace shardwright::apps
