// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>

#include "checkpoints/model/format.h"
#include "support/base/result.h"

// Error messages for unreadable sources: they describe the source and state the next step.

namespace shardwright::checkpoints {

/// Returns an error if the name is one of pickled weights (such as pytorch_model.bin).
/// \param folder  the folder that contains the file
/// Pure.
std::optional<Error> PickledWeights(const std::string& folder, const std::string& name);

/// Adds the newest complete sibling steps to the error of an incomplete step.
/// \param folder  the folder of the step, or empty if the step's files are in several folders
/// \param name    the name of that folder
/// Local; scans up to three folders.
Error WithOtherSteps(Error error, const Format& format, const std::string& folder,
                     const std::string& name);

}  // namespace shardwright::checkpoints
