#pragma once

#include <string>

namespace shardwright::live_torch {

/// The operator `check_step`: whether steps of an optimizer with these options can be made again.
/// \param request  {"optimizer": name of the class, "options": {name: number}}, as replay::StepOf
/// \returns  {"result": {}} or {"error": ...}. Local, nothing is thrown.
std::string CheckStepRequest(const std::string& request);

}  // namespace shardwright::live_torch
