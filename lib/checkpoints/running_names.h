// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "checkpoints/model/checkpoint.h"
#include "checkpoints/model/format.h"

namespace shardwright::checkpoints {

/// Gives adapters the names that they have in the running model (Checkpoint::running_names).
void NameAsRunning(Checkpoint* checkpoint);

/// Returns true if the files of a format have the names of the running model: those of DeepSpeed.
/// Pure.
bool HasRunningNames(const Format& format);

/// Names adapters as running in a checkpoint that is compared with one of the running model.
void NameAlike(Checkpoint* a, Checkpoint* b);

}  // namespace shardwright::checkpoints
