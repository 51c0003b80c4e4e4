// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "placement/io/plan_file.h"
#include "support/base/result.h"
#include "support/json/json.h"

namespace shardwright::placement {

using json::Json;

/// One expert or an empty slot (-1). \error kBadInput
Result<std::int32_t> SlotOf(const Json& value, const std::string& where);

/// A list of slots. \error kBadInput; kLimit
Result<std::vector<std::int32_t>> SlotsOf(const Json& list, const std::string& where);

/// Adds a layer. \error kBadInput  a layer twice, or other slots than the first layer's
Status AddLayer(PlanFile* plan, std::uint64_t layer, std::vector<std::int32_t> slots,
                const std::string& where);

/// Proves the plan and finds the number of experts where the file does not tell it.
Status Finish(PlanFile* plan, const std::string& where);

Result<PlanFile> ParseEplbPlan(const Json& root, const std::string& where);
Result<PlanFile> ParseSglangPlan(const Json& root, const std::string& where);
Result<PlanFile> ParseVllmPlan(const Json& root, const std::string& where);
Result<PlanFile> ParseAscendPlan(const Json& root, const std::string& where);
/// A matrix [layer][slot] alone.
Result<PlanFile> ParseMatrixPlan(const Json& root, const std::string& where);
/// The YAML of TensorRT-LLM's load balancer.
Result<PlanFile> ParseTensorrtPlan(std::string_view text, const std::string& where);
/// A `.pt` file: a tensor [layers, slots] of experts, alone or under SGLang's
/// physical_to_logical_map, or an expert map [layers, ranks, experts].
Result<PlanFile> ReadTensorPlan(const std::string& path);

}  // namespace shardwright::placement
