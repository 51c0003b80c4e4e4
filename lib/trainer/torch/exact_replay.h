// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace shardwright::trainer_torch {

/// The operator `check_step`: whether steps of an optimizer with these options can be made again.
/// \param request  {"optimizer": name of the class, "options": {name: number}}, as
///       optimizer_steps::StepOf
/// \returns  {"result": {}} or {"error": ...}. Local, nothing is thrown.
std::string CheckStepRequest(const std::string& request);

}  // namespace shardwright::trainer_torch
