// SPDX-License-Identifier: Apache-2.0
#include "trainer/torch/exact_replay.h"

#include <vector>

#include <nlohmann/json.hpp>

#include "partial/optimizer_steps/step.h"
#include "support/base/result.h"
#include "trainer/torch/answer.h"

namespace shardwright::trainer_torch {
namespace {

using nlohmann::json;

Result<json> CheckStep(const json& request) {
  std::vector<optimizer_steps::Option> options;
  for (const auto& [name, value] : request.at("options").items()) {
    options.push_back({name, value.get<double>()});
  }
  SW_TRY(optimizer_steps::StepOf(request.at("optimizer").get<std::string>(), options));
  return json::object();
}

}  // namespace

std::string CheckStepRequest(const std::string& request) { return Answer(request, CheckStep); }

}  // namespace shardwright::trainer_torch
