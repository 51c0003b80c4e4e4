// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <set>

#include "checkpoints/deepspeed/native/deepspeed.h"
#include "checkpoints/deepspeed/native/read/read_internal.h"
#include "engine/layout/states.h"

namespace shardwright::checkpoints {

namespace reader {
namespace {

std::vector<std::string> OptimizerStates(const Reading& reading) {
  std::set<std::string> states;
  for (const ParamInfo& info : reading.params) {
    for (const auto& [state, tensor] : info.tensors) {
      if (!layout::IsModelState(state)) states.insert(state);
    }
  }
  return {states.begin(), states.end()};
}

Status Run(Reading* reading) {
  reading->out.origin = "deepspeed";
  reading->out.tag = reading->source.tag;
  reading->out.arena = std::make_shared<pickle::Arena>();
  reading->out.warnings = reading->source.warnings;
  SW_TRY(FindFiles(reading));
  SW_TRY(CheckComplete(reading));
  SW_TRY(ReadModels(reading));
  SW_TRY(ReadShards(reading));
  ReadConfig(reading);
  SW_TRY(ReadTopology(reading));
  SW_TRY(ReadParams(reading));
  SW_TRY(DecideRules(reading));
  if (reading->only_weights) {
    MapNoOptimizer(reading);
  } else if (reading->shards.empty()) {
    SW_TRY(MapWithoutZero(reading));
  } else if (reading->grid.zero3()) {
    SW_TRY(MapSubGroups(reading));
  } else {
    SW_TRY(MapFlatGroups(reading));
  }
  SW_TRY(MapWeights(reading));
  for (Param& param : reading->out.params) {
    if (!param.alias_of.empty()) {
      param.group = reading->out.params[reading->by_name.at(param.alias_of)].group;
    }
  }
  reading->out.states = OptimizerStates(*reading);
  reading->out.save = EvidenceOf(*reading);
  reading->state.entries = std::move(reading->opaque.entries);
  TakeEngineState(reading->topology, std::move(reading->state), &reading->out);
  SW_TRY(layout::Validate(reading->out.map));
  reading->out.proved = true;
  return {};
}

}  // namespace

Status CheckStateName(const Reading& reading, std::uint32_t file, const std::string& state) {
  if (!layout::IsModelState(state)) return {};
  return Fail(Errc::kUnsupported, reading.file_name(file), ": optimizer state \"", state,
              "\": this name is reserved for tensors of the model");
}

}  // namespace reader

Result<Checkpoint> ReadDeepSpeed(const SourceSet& source, const Patterns& patterns) {
  reader::Reading reading(source, patterns);
  SW_TRY(reader::Run(&reading));
  return std::move(reading.out);
}

Result<Checkpoint> ReadDeepSpeedWeights(const SourceSet& source, const Patterns& patterns) {
  reader::Reading reading(source, patterns);
  reading.only_weights = true;
  SW_TRY(reader::Run(&reading));
  reading.out.only_weights = OnlyWeights{{}, !reading.plain_weights};
  return std::move(reading.out);
}

}  // namespace shardwright::checkpoints
