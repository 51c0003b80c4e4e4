// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <charconv>
#include <map>
#include <optional>
#include <set>
#include <string>

#include "checkpoints/deepspeed/common/engine_state.h"
#include "checkpoints/deepspeed/common/flat.h"
#include "checkpoints/deepspeed/common/pipeline_stages.h"
#include "engine/layout/rule.h"
#include "engine/tensor/shape.h"
#include "support/base/limits.h"

namespace shardwright::checkpoints {

namespace {

using Stages = std::vector<std::vector<std::uint32_t>>;

// Maximum number of layers. Balancing compares every pair of layers for every stage.
constexpr std::uint64_t kLayers = 4096;
// Maximum number of layers without state after the last one with state. The
// files do not show them; a model rarely has more of them than a loss and logits.
constexpr std::uint64_t kHiddenLayers = 4;

std::vector<std::uint32_t> LayersWithState(const Topology& from) {
  std::set<std::uint32_t> layers;
  for (const auto& stage : from.stages) layers.insert(stage.begin(), stage.end());
  return {layers.begin(), layers.end()};
}

Stages ByBounds(const std::vector<std::uint32_t>& layers,
                const std::vector<std::uint64_t>& bounds) {
  Stages stages(bounds.size() - 1);
  for (std::uint32_t layer : layers) {
    const auto at = std::upper_bound(bounds.begin(), bounds.end(), std::uint64_t{layer});
    const auto stage = static_cast<std::size_t>(at - bounds.begin()) - 1;
    stages[std::min(stage, stages.size() - 1)].push_back(layer);
  }
  return stages;
}

/// Returns the trained elements of every layer on one of `tp` tensor-parallel ranks.
Result<std::vector<std::uint64_t>> LayerElems(const Checkpoint& source, std::uint64_t layers,
                                              std::uint64_t tp) {
  std::vector<std::uint64_t> elems(layers, 0);
  for (const Param& param : source.params) {
    if (param.kind != ParamKind::kTrainable || !param.alias_of.empty()) continue;
    std::uint64_t count = Elems(param.shape);
    if (tp > 1) {
      SW_TRY_ASSIGN(const auto cut, layout::MakeCut(param.rule, param.shape, tp, 0));
      count = cut.shard_elems();
    }
    for (std::uint32_t layer : param.tied_layers) {
      if (layer < layers) elems[layer] += count;
    }
    if (param.tied_layers.empty() && param.layer && *param.layer < layers) {
      elems[*param.layer] += count;
    }
  }
  return elems;
}

/// Returns the number of layers of the module, if uniform stages of that many equal the source's.
std::optional<std::uint64_t> UniformLayers(const Topology& from,
                                           const std::vector<std::uint32_t>& layers) {
  const std::uint64_t known = std::uint64_t{layers.back()} + 1;
  for (std::uint64_t count = known; count <= known + kHiddenLayers; ++count) {
    if (ByBounds(layers, PartitionUniform(count, from.pp)) == from.stages) return count;
  }
  return std::nullopt;
}

Result<Stages> ByRanges(std::string_view method, const std::vector<std::uint32_t>& layers,
                        std::uint64_t pp) {
  SW_TRY_ASSIGN(const auto ranges, ParseStageRanges(method));
  if (ranges.size() != pp) {
    return Fail(Errc::kUsage, "stages=", method, ": ", ranges.size(), " ranges for pp=", pp);
  }
  std::vector<std::uint64_t> bounds = {ranges.front().first};
  for (const StageRange& range : ranges) bounds.push_back(range.second);
  if (layers.front() < bounds.front() || layers.back() >= bounds.back()) {
    return Fail(Errc::kUsage, "stages=", method, ": layers ", layers.front(), " to ", layers.back(),
                " have state, and the ranges do not cover them");
  }
  return ByBounds(layers, bounds);
}

/// A partition method of DeepSpeed, and the target's stages by it.
struct Choice {
  std::string_view method;
  Stages stages;
};

/// Returns a weight for every layer: 1 for the model's blocks and 0 for other layers. Blocks are
/// the largest set of layers with trained parameters of the same names and shapes. Returns nothing
/// if fewer than two layers, or several sets, are the largest ones, or if a block has fewer than
/// two parameters.
std::optional<std::vector<std::uint64_t>> BlockWeights(const Checkpoint& source,
                                                       std::uint64_t layers) {
  std::map<std::uint32_t, std::map<std::string, Shape>> by_layer;
  for (const Param& param : source.params) {
    const bool trained = param.kind == ParamKind::kTrainable && param.alias_of.empty();
    if (!trained || !param.tied_layers.empty() || !param.layer || *param.layer >= layers) continue;
    by_layer[*param.layer][param.name.substr(param.name.find('.') + 1)] = param.shape;
  }
  std::map<std::map<std::string, Shape>, std::vector<std::uint32_t>> sets;
  for (const auto& [layer, names] : by_layer) {
    if (names.size() > 1) sets[names].push_back(layer);
  }
  std::size_t largest = 1;
  std::vector<std::uint32_t> blocks;
  for (const auto& [names, members] : sets) {
    if (members.size() == largest) blocks.clear();
    if (members.size() <= largest) continue;
    largest = members.size();
    blocks = members;
  }
  if (blocks.empty()) return std::nullopt;
  std::vector<std::uint64_t> weights(layers, 0);
  for (const std::uint32_t block : blocks) weights[block] = 1;
  return weights;
}

/// Returns the stages that DeepSpeed's method "type:REGEX" makes of the blocks, or nothing if the
/// blocks are unknown or a stage would have none.
std::optional<Stages> ByBlocks(const Checkpoint& source, const std::vector<std::uint32_t>& layers,
                               std::uint64_t pp) {
  const auto weights = BlockWeights(source, std::uint64_t{layers.back()} + 1);
  if (!weights) return std::nullopt;
  Stages stages = ByBounds(layers, PartitionBalanced(*weights, pp));
  const bool complete = std::all_of(stages.begin(), stages.end(), [&](const auto& stage) {
    return std::any_of(stage.begin(), stage.end(),
                       [&](std::uint32_t layer) { return (*weights)[layer] == 1; });
  });
  if (!complete) return std::nullopt;
  return stages;
}

/// Returns the target's stages by each partition method that yields the source's stages.
Result<std::vector<Choice>> ChoicesLike(const Topology& to, const Checkpoint& source,
                                        const std::vector<std::uint32_t>& layers) {
  const Topology from = TopologyOf(source.layout);
  const std::uint64_t count = std::uint64_t{layers.back()} + 1;
  std::vector<Choice> choices;
  if (const auto uniform = UniformLayers(from, layers)) {
    choices.push_back({"uniform", ByBounds(layers, PartitionUniform(*uniform, to.pp))});
  }
  SW_TRY_ASSIGN(const auto before, LayerElems(source, count, from.tp));
  if (ByBounds(layers, PartitionBalanced(before, from.pp)) == from.stages) {
    SW_TRY_ASSIGN(const auto after, LayerElems(source, count, to.tp));
    choices.push_back({"parameters", ByBounds(layers, PartitionBalanced(after, to.pp))});
  }
  if (ByBlocks(source, layers, from.pp) == from.stages) {
    if (auto blocks = ByBlocks(source, layers, to.pp)) {
      choices.push_back({"type", *std::move(blocks)});
    }
  }
  return choices;
}

Result<Stages> LikeSource(const Topology& to, const Checkpoint& source,
                          const std::vector<std::uint32_t>& layers) {
  const Topology from = TopologyOf(source.layout);
  if (to.pp == from.pp) return from.stages;
  if (to.pp == 1) return Stages{layers};
  SW_TRY_ASSIGN(const std::vector<Choice> choices, ChoicesLike(to, source, layers));
  if (choices.empty()) {
    return Fail(Errc::kUsage, "pp=", to.pp,
                ": the source's stages fit no known partition method: add stages=uniform, "
                "stages=parameters, stages=type or layer ranges");
  }
  // Megatron-DeepSpeed always uses "type:transformer".
  const EngineState* state = EngineStateOf(source);
  const bool megatron = state != nullptr && !state->model_states.empty() &&
                        MegatronArgs(state->model_states.front().document.root) != nullptr;
  if (megatron && choices.back().method == "type") return choices.back().stages;
  for (const Choice& choice : choices) {
    const Choice& first = choices.front();
    if (choice.stages == first.stages) continue;
    return Fail(Errc::kUsage, "pp=", to.pp, ": the source's stages fit partition methods \"",
                first.method, "\" and \"", choice.method,
                "\", which differ for this target: add stages=", first.method,
                ", stages=", choice.method, " or layer ranges");
  }
  return choices.front().stages;
}

Result<Stages> Choose(std::string_view method, const Topology& to, const Checkpoint& source,
                      const std::vector<std::uint32_t>& layers) {
  if (method.empty()) return LikeSource(to, source, layers);
  const std::uint64_t count = std::uint64_t{layers.back()} + 1;
  if (method == "uniform") {
    const Topology from = TopologyOf(source.layout);
    return ByBounds(layers, PartitionUniform(UniformLayers(from, layers).value_or(count), to.pp));
  }
  if (method == "parameters") {
    SW_TRY_ASSIGN(const auto elems, LayerElems(source, count, to.tp));
    return ByBounds(layers, PartitionBalanced(elems, to.pp));
  }
  if (method == "type") {
    if (auto blocks = ByBlocks(source, layers, to.pp)) return *std::move(blocks);
    return Fail(Errc::kInfeasible, "pp=", to.pp,
                ",stages=type: one block in every stage expected, where blocks are layers with the "
                "same parameters; add layer ranges");
  }
  return ByRanges(method, layers, to.pp);
}

}  // namespace

Result<std::vector<StageRange>> ParseStageRanges(std::string_view text) {
  const auto bad = [&] {
    return Fail(Errc::kUsage, "target stages=", text,
                ": uniform, parameters, type or ranges of layers such as 0-3,4-7 expected");
  };
  std::vector<StageRange> ranges;
  const char* at = text.data();
  const char* const end = text.data() + text.size();
  while (true) {
    std::uint32_t first = 0;
    std::uint32_t last = 0;
    auto parsed = std::from_chars(at, end, first);
    if (parsed.ec != std::errc()) return bad();
    last = first;
    if (parsed.ptr != end && *parsed.ptr == '-') {
      parsed = std::from_chars(parsed.ptr + 1, end, last);
      if (parsed.ec != std::errc()) return bad();
    }
    if (last < first || (!ranges.empty() && ranges.back().second != first)) return bad();
    ranges.emplace_back(first, std::uint64_t{last} + 1);
    if (parsed.ptr == end) return ranges;
    if (*parsed.ptr != ',') return bad();
    at = parsed.ptr + 1;
  }
}

Result<Stages> ChooseStages(std::string_view method, const Topology& target,
                            const Checkpoint& source) {
  const std::vector<std::uint32_t> layers = LayersWithState(TopologyOf(source.layout));
  if (layers.empty()) return Fail(Errc::kBadInput, "the pipeline module has no layer with state");
  if (layers.back() >= kLayers) {
    return Fail(Errc::kLimit, "layer ", layers.back(), ": at most ", kLayers, " layers");
  }
  SW_TRY_ASSIGN(Stages stages, Choose(method, target, source, layers));
  for (std::size_t stage = 0; stage < stages.size(); ++stage) {
    if (!stages[stage].empty()) continue;
    return Fail(Errc::kInfeasible, "pp=", target.pp, ": stage ", stage,
                " would hold no layer with state");
  }
  return stages;
}

}  // namespace shardwright::checkpoints
