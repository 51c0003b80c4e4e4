// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "checkpoints/model/checkpoint.h"
#include "support/base/result.h"

namespace shardwright::checkpoints {

/// A checkpoint as DeepSpeed's writers take it, and what was lost on the way.
struct Adopted {
  Checkpoint checkpoint;
  std::vector<std::string> not_carried;
};

/// Makes what DeepSpeed's engine keeps anew for a checkpoint whose format keeps something else:
/// model states with iteration, samples and schedule, a configuration of what is known, parameter
/// groups with their hyper-parameters, and one group of all trained parameters where the source has
/// no optimizer. Experts that are not of DeepSpeed's MoE layers become parameters of a dense model,
/// in the group of the dense ones that have their hyper-parameters.
/// \pre EngineStateOf(source) == nullptr
/// \error kUnsupported  a parameter in no group of a source that has groups
/// Pure. Source: docs/formats/deepspeed.md, "Files".
Result<Adopted> Adopt(const Checkpoint& source);

}  // namespace shardwright::checkpoints
