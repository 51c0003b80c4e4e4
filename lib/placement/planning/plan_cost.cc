// SPDX-License-Identifier: Apache-2.0
#include "placement/planning/plan_cost.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "placement/core/layer_groups.h"
#include "support/base/bytes.h"
#include "support/base/text.h"
#include "support/text/table.h"
#include "support/text/text.h"

namespace shardwright::placement {
namespace {

using Column = text::Table::Column;
using Json = nlohmann::json;
using text::kRight;

/// Computes the cost of one placement.
Result<PlacementCost> Compute(const PlanRequest& request, const PlanInput& input,
                              const StrategyResult& result, const StopCheck& stop) {
  PlacementCost cost;
  const Placement* const owners = result.owners ? &*result.owners : nullptr;
  if (input.cluster.param_bytes > 0) {
    SW_TRY_ASSIGN(cost.memory, MemoryOf(result.placement, owners, input.cluster));
  }
  if (!request.cost.given()) return cost;
  CostInputs inputs = request.cost;
  inputs.nonmoe_seconds = request.options.hecate.nonmoe_seconds;
  cost.times = TimesOf(result.placement, owners, input.later ? *input.later : input.loads,
                       input.cluster, inputs, stop);
  SW_TRY(CheckStop(stop));
  return cost;
}

std::string MillisOf(double seconds) { return Fixed(seconds * 1e3, 3); }

/// Adds the times of all layers.
LayerTimes SumOf(const ModelTimes& times) {
  LayerTimes sum;
  for (const LayerTimes& layer : times.layers) {
    sum.experts += layer.experts;
    sum.all_to_all += layer.all_to_all;
    sum.exposed += layer.exposed;
  }
  return sum;
}

std::string TimesText(const PlannedCost& cost) {
  const ModelTimes& times = *cost.times;
  const LayerTimes sum = SumOf(times);
  std::string text = "time      " + MillisOf(times.seconds()) + " ms per iteration, " +
                     MillisOf(times.other) + " of it in other layers\n          experts " +
                     MillisOf(sum.experts) + ", all-to-all " + MillisOf(sum.all_to_all) +
                     ", copies and gradients " + MillisOf(sum.exposed) + "\n";
  if (cost.vanilla.times) {
    const Speedup speedup = SpeedupOf(times, *cost.vanilla.times);
    text += "          " + Fixed(speedup.model, 2) + " times as fast as vanilla; MoE layers " +
            Fixed(speedup.least, 2) + " to " + Fixed(speedup.most, 2) + " times, " +
            Fixed(speedup.mean, 2) + " in the geometric mean\n";
  }
  if (cost.memory && cost.memory->rematerialized) {
    text += "          " + MillisOf(times.rematerialized()) +
            " ms if copies are dropped after each layer\n";
  }
  return text;
}

std::string MemoryText(const PlannedCost& cost) {
  const GpuMemory& gpu = cost.memory->gpu;
  std::string text = "memory    " + FormatBytes(gpu.bytes()) + " on the fullest gpu: weights " +
                     FormatBytes(gpu.weights) + ", gradients " + FormatBytes(gpu.gradients) +
                     ", optimizer " + FormatBytes(gpu.optimizer) + "\n";
  std::string more;
  if (cost.memory->rematerialized) {
    more = FormatBytes(cost.memory->rematerialized->bytes()) +
           " if copies are dropped after each layer";
  }
  if (cost.vanilla.memory) {
    more += (more.empty() ? "" : "; ") + FormatBytes(cost.vanilla.memory->gpu.bytes()) +
            " with vanilla";
  }
  return more.empty() ? text : text + "          " + more + "\n";
}

Json PlanMemoryJson(const PlanMemory& memory) {
  Json json = {{"gpu", MemoryJson(memory.gpu)}};
  if (memory.rematerialized) json["rematerialized_gpu"] = MemoryJson(*memory.rematerialized);
  return json;
}

Json TimesJson(const PlannedCost& cost, const TokenCounts& loads) {
  const ModelTimes& times = *cost.times;
  Json layers = Json::array();
  for (std::size_t l = 0; l < times.layers.size(); ++l) {
    const LayerTimes& layer = times.layers[l];
    layers.push_back({{"layer", loads.layer_id[l]},
                      {"seconds", layer.seconds()},
                      {"rematerialized_seconds", layer.rematerialized()},
                      {"expert_seconds", layer.experts},
                      {"all_to_all_seconds", layer.all_to_all},
                      {"gather_seconds", layer.gather},
                      {"reduce_seconds", layer.reduce},
                      {"exposed_seconds", layer.exposed}});
  }
  Json json = {{"seconds", times.seconds()},
               {"rematerialized_seconds", times.rematerialized()},
               {"other_seconds", times.other}};
  if (cost.vanilla.times) {
    const Speedup speedup = SpeedupOf(times, *cost.vanilla.times);
    for (std::size_t l = 0; l < layers.size(); ++l) {
      if (speedup.layers[l] > 0) layers[l]["speedup"] = speedup.layers[l];
    }
    json["vanilla_seconds"] = cost.vanilla.times->seconds();
    json["speedup"] = speedup.model;
    json["layer_speedup_least"] = speedup.least;
    json["layer_speedup_most"] = speedup.most;
    json["layer_speedup_mean"] = speedup.mean;
  }
  json["layers"] = std::move(layers);
  return json;
}

}  // namespace

Result<PlacementCost> VanillaCost(const PlanRequest& request, const PlanInput& input,
                                  const StopCheck& stop) {
  if (!request.cost.given() && input.cluster.param_bytes == 0) return PlacementCost{};
  SW_TRY_ASSIGN(const Strategy* const vanilla, FindStrategy("vanilla"));
  Options options;
  options.stop = stop;
  const auto base =
      PlanEachSize(input.loads, nullptr, [&](const TokenCounts& loads, const Placement* current) {
        return vanilla->plan(loads, input.cluster, current, options);
      });
  if (!base && base.error().code == Errc::kInfeasible) return PlacementCost{};
  if (!base) return tl::unexpected<Error>(base.error());
  return Compute(request, input, *base, stop);
}

Result<PlannedCost> CostOf(const PlanRequest& request, const PlanInput& input,
                           const StrategyResult& result, const StopCheck& stop) {
  SW_TRY_ASSIGN(PlacementCost cost, Compute(request, input, result, stop));
  return PlannedCost{std::move(cost), input.vanilla};
}

std::string CostText(const PlannedCost& cost) {
  return (cost.times ? TimesText(cost) : "") + (cost.memory ? MemoryText(cost) : "");
}

std::string CostLayersText(const PlannedCost& cost, const TokenCounts& loads) {
  if (!cost.times) return "";
  std::optional<Speedup> speedup;
  if (cost.vanilla.times) speedup = SpeedupOf(*cost.times, *cost.vanilla.times);
  text::Table table({Column{"LAYER", kRight}, Column{"MS", kRight}, Column{"EXPERTS", kRight},
                     Column{"ALL-TO-ALL", kRight}, Column{"GATHER", kRight},
                     Column{"REDUCE", kRight}, Column{"EXPOSED", kRight},
                     Column{"SPEED-UP", kRight}});
  for (std::size_t l = 0; l < cost.times->layers.size(); ++l) {
    const LayerTimes& layer = cost.times->layers[l];
    const double ratio = speedup ? speedup->layers[l] : 0;
    table.AddRow({std::to_string(loads.layer_id[l]), MillisOf(layer.seconds()),
                  MillisOf(layer.experts), MillisOf(layer.all_to_all), MillisOf(layer.gather),
                  MillisOf(layer.reduce), MillisOf(layer.exposed),
                  ratio > 0 ? Fixed(ratio, 2) : "-"});
  }
  return "\n" + table.Render(0) +
         text::Legend(
             "MS: milliseconds of the MoE layer in an iteration, EXPERTS + ALL-TO-ALL + EXPOSED. "
             "GATHER: parameters of copies. REDUCE: gradients. EXPOSED: the part of both that the "
             "other layers do not hide. SPEED-UP: time with vanilla / time.");
}

std::string CostComparisonText(const std::vector<PlannedRow>& rows) {
  text::Table table({Column{"STRATEGY"}, Column{"MS", kRight}, Column{"EXPERTS", kRight},
                     Column{"ALL-TO-ALL", kRight}, Column{"EXPOSED", kRight},
                     Column{"DROPPED", kRight}, Column{"SPEED-UP", kRight},
                     Column{"LAYERS", kRight}, Column{"MEMORY", kRight}});
  bool any = false;
  for (const PlannedRow& row : rows) {
    if (!row.cost.times) continue;
    any = true;
    const LayerTimes sum = SumOf(*row.cost.times);
    std::optional<Speedup> speedup;
    if (row.cost.vanilla.times) speedup = SpeedupOf(*row.cost.times, *row.cost.vanilla.times);
    const bool copies = row.cost.memory && row.cost.memory->rematerialized;
    table.AddRow({row.strategy, MillisOf(row.cost.times->seconds()), MillisOf(sum.experts),
                  MillisOf(sum.all_to_all), MillisOf(sum.exposed),
                  copies ? MillisOf(row.cost.times->rematerialized()) : "-",
                  speedup ? Fixed(speedup->model, 2) : "-", speedup ? Fixed(speedup->mean, 2) : "-",
                  row.cost.memory ? FormatBytes(row.cost.memory->gpu.bytes()) : "-"});
  }
  if (!any) return "";
  return "\n" + table.Render(0) +
         text::Legend(
             "MS: milliseconds of an iteration. EXPERTS, ALL-TO-ALL: of all MoE layers. EXPOSED: "
             "copies and gradients that the other layers do not hide. DROPPED: MS if copies are "
             "dropped after each layer. SPEED-UP: MS with vanilla / MS. LAYERS: the same of MoE "
             "layers alone, geometric mean. MEMORY: of the experts on the fullest gpu.");
}

void AddCostJson(const PlannedCost& cost, const TokenCounts& loads, Json* plan) {
  if (cost.times) (*plan)["times"] = TimesJson(cost, loads);
  if (!cost.memory) return;
  Json memory = PlanMemoryJson(*cost.memory);
  if (cost.vanilla.memory) memory["vanilla_gpu"] = MemoryJson(cost.vanilla.memory->gpu);
  (*plan)["memory"] = std::move(memory);
}

}  // namespace shardwright::placement
