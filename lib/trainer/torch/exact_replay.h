// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace shardwright::trainer_torch {

/// Implements the operator `check_step`: verifies that an optimizer's steps can be replayed.
/// \param request  {"optimizer": name of the class, "options": {name: number}}, as in
///        optimizer_steps::StepOf
/// \returns  {"result": {}} or {"error": ...}. Local, nothing is thrown.
std::string CheckStepRequest(const std::string& request);

}  // namespace shardwright::trainer_torch
