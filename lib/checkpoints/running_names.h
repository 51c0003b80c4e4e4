// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "checkpoints/model/checkpoint.h"
#include "checkpoints/model/format.h"

namespace shardwright::checkpoints {

/// Gives adapters the names that they have in the running model (Checkpoint::running_names), if the
/// target has these (Format::running_names).
void NameForTarget(const Format& format, const TargetSpec& spec, Checkpoint* checkpoint);

/// Names adapters as running in a checkpoint that is compared with one of the running model.
void NameAlike(Checkpoint* a, Checkpoint* b);

}  // namespace shardwright::checkpoints
