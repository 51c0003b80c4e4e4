// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <set>
#include <span>
#include <string>
#include <vector>

#include "checkpoints/model/checkpoint.h"
#include "files/pickle/node.h"
#include "support/base/result.h"

namespace shardwright::checkpoints {

/// Decides whether parameters without optimizer state are frozen, if others in the groups have
/// state. Such a parameter is frozen, or has not had a gradient yet, and the files do not record
/// which. Returns true if all parameters with states, and none without, belong to adapters.
/// \param with     names of parameters with states
/// \param without  names of parameters without states
/// Pure.
bool AreFrozen(std::span<const std::string> with, std::span<const std::string> without);

/// Returns the warning for parameters without state that count as trained.
std::string StatelessWarning(const std::vector<std::string>& names);

/// Returns the names of trained parameters that have no state although others of their group do.
std::vector<std::string> StatelessNames(const Checkpoint& source);

/// Returns the `not_carried` sentences of formats that store a state for every trained parameter,
/// so they cannot record which parameters have none. Empty if all have states.
std::vector<std::string> StatelessLosses(const Checkpoint& source);

/// Returns the `not_carried` sentences of folders for DeepSpeed's universal loader, which knows one
/// step for many parameters. Empty if all parameters that have a step have the same.
std::vector<std::string> StepLosses(const Checkpoint& source);

/// Returns the step count of a parameter as PyTorch optimizers store it, as one 32-bit
/// float. Uses the parameter's scalars, or its group, or the iteration, in this order.
/// \error kUnsupported  none of them has a step count
/// Pure.
Result<float> TorchStep(const Checkpoint& source, const Param& param);

/// Returns a parameter group as PyTorch optimizers save it, without "params": the source's
/// options plus the defaults that loading requires. Keeps options that the optimizer does
/// not know, so that a conversion back to the source format preserves them.
/// \param made  owns the new nodes
/// \param left  receives the names of options that are omitted because they are not plain values
/// Pure.
const pickle::Node* TorchOptions(const Checkpoint& source, const Group& group, pickle::Arena* made,
                                 std::set<std::string>* left);

}  // namespace shardwright::checkpoints
