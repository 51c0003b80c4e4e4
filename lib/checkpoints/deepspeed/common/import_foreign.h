// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "checkpoints/model/checkpoint.h"
#include "support/base/result.h"

namespace shardwright::checkpoints {

/// A checkpoint in the form that DeepSpeed's writers expect, and the contents that were lost.
struct Adopted {
  Checkpoint checkpoint;
  std::vector<std::string> not_carried;
};

/// Creates the state of DeepSpeed's engine for a checkpoint of another format: model
/// states with iteration, samples and schedule, a configuration from the known values, and
/// parameter groups with their hyper-parameters. A source without an optimizer gets one
/// group of all trained parameters. Experts that are not in DeepSpeed's MoE layers become
/// parameters of a dense model, in the dense group that has the same hyper-parameters.
/// \pre EngineStateOf(source) == nullptr
/// \error kUnsupported  the source has groups, and a parameter is in none of them
/// Pure. Source: docs/formats/deepspeed.md, "Files".
Result<Adopted> Adopt(const Checkpoint& source);

}  // namespace shardwright::checkpoints
