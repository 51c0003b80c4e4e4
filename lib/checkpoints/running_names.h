// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "checkpoints/model/checkpoint.h"

namespace shardwright::checkpoints {

/// Gives adapters the names that they have in the running model (Checkpoint::running_names).
void NameAsRunning(Checkpoint* checkpoint);

/// Names adapters as running in a checkpoint that is compared with one of the running model.
void NameAlike(Checkpoint* a, Checkpoint* b);

}  // namespace shardwright::checkpoints
