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

/// The number of steps of a parameter as optimizers of PyTorch have it, one 32-bit float: what its
/// scalars say, else its group, else the iteration.
/// \error kUnsupported  nobody tells
/// Pure.
Result<float> TorchStep(const Checkpoint& source, const Param& param);

/// A parameter group as an optimizer of PyTorch saves it, without "params": what the source says,
/// and what loading needs. Options that
/// the optimizer does not know stay, for the way back.
/// \param made  owns what is made
/// \param left  gets the names of options that are more than plain values, and are left out
/// Pure.
const pickle::Node* TorchOptions(const Checkpoint& source, const Group& group, pickle::Arena* made,
                                 std::set<std::string>* left);

}  // namespace shardwright::checkpoints
