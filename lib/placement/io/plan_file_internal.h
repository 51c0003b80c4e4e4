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

/// Returns one expert or an empty slot (-1). \error kBadInput
Result<std::int32_t> SlotOf(const Json& value, const std::string& where);

/// Returns a list of slots. \error kBadInput; kLimit
Result<std::vector<std::int32_t>> SlotsOf(const Json& list, const std::string& where);

/// Adds a layer. \error kBadInput  a repeated layer, or other slots than in the first layer
Status AddLayer(PlanFile* plan, std::uint64_t layer, std::vector<std::int32_t> slots,
                const std::string& where);

/// Validates the plan and computes the number of experts if the file does not specify it.
Status Finish(PlanFile* plan, const std::string& where);

Result<PlanFile> ParseEplbPlan(const Json& root, const std::string& where);
Result<PlanFile> ParseSglangPlan(const Json& root, const std::string& where);
Result<PlanFile> ParseVllmPlan(const Json& root, const std::string& where);
Result<PlanFile> ParseAscendPlan(const Json& root, const std::string& where);
/// Parses a matrix [layer][slot] alone.
Result<PlanFile> ParseMatrixPlan(const Json& root, const std::string& where);
/// Parses the YAML of TensorRT-LLM's load balancer.
Result<PlanFile> ParseTensorrtPlan(std::string_view text, const std::string& where);
/// Reads a `.pt` file: a tensor [layers, slots] of experts, alone or under SGLang's
/// physical_to_logical_map, or an expert map [layers, ranks, experts].
Result<PlanFile> ReadTensorPlan(const std::string& path);

}  // namespace shardwright::placement
