#include "torch/lossless.h"

#include <vector>

#include <nlohmann/json.hpp>

#include "base/result.h"
#include "replay/step.h"
#include "torch/answer.h"

namespace shardwright::live_torch {
namespace {

using nlohmann::json;

Result<json> CheckStep(const json& request) {
  std::vector<replay::Option> options;
  for (const auto& [name, value] : request.at("options").items()) {
    options.push_back({name, value.get<double>()});
  }
  SW_TRY(replay::StepOf(request.at("optimizer").get<std::string>(), options));
  return json::object();
}

}  // namespace

std::string CheckStepRequest(const std::string& request) { return Answer(request, CheckStep); }

}  // namespace shardwright::live_torch
