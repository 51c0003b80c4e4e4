// SPDX-License-Identifier: Apache-2.0
#include "placement/io/plan_file.h"

#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <span>
#include <string>
#include <utility>

#include "engine/exec/manifest.h"
#include "placement/io/cluster_text.h"
#include "placement/io/plan_file_internal.h"
#include "support/base/limits.h"
#include "support/base/text.h"
#include "support/os/dir.h"

namespace shardwright::placement {
namespace {

/// Reads the slots of a list of GPUs or nodes, which must have equal sizes in all layers.
Result<std::vector<std::int32_t>> ListedSlots(const Json& devices, const std::string& where,
                                              bool first, std::vector<std::uint32_t>* sizes) {
  if (!devices.is_array()) return Fail(Errc::kBadInput, where, ": a list of gpus expected");
  std::vector<std::int32_t> slots;
  std::vector<std::uint32_t> found;
  for (const Json& device : devices) {
    SW_TRY_ASSIGN(const auto held, SlotsOf(device, where));
    slots.insert(slots.end(), held.begin(), held.end());
    found.push_back(static_cast<std::uint32_t>(held.size()));
  }
  if (first) *sizes = found;
  if (found != *sizes) {
    return Fail(Errc::kBadInput, where, ": slots per gpu differ from the first layer");
  }
  return slots;
}

/// Adds a layer of a plan record, by GPU if the record has GPUs, otherwise by node.
Status AddRecordLayer(const Json& layer, const std::string& where, PlanFile* plan) {
  const Json* number = json::Find(layer, "layer");
  const Json* devices = json::Find(layer, "devices");
  if (devices == nullptr) devices = json::Find(layer, "placement");
  if (number == nullptr || devices == nullptr) {
    return Fail(Errc::kBadInput, where, ": objects with layer and placement expected");
  }
  SW_TRY_ASSIGN(const std::uint64_t id,
                json::WholeOf(*number, 0, limits::kMoeLayers - 1, where + ": layer"));
  const std::string place = where + ": layer " + std::to_string(id);
  const Json* owners = json::Find(layer, "owners");
  const bool first = plan->layer_id.empty();
  if (!first && (owners != nullptr) != !plan->owner_slots.empty()) {
    return Fail(Errc::kBadInput, place, ": either all layers or none must have owners");
  }
  SW_TRY_ASSIGN(auto slots, ListedSlots(*devices, place, first, &plan->device_slots));
  const Json* experts = json::Find(layer, "experts");
  if (!first && (experts != nullptr) != !plan->layer_experts.empty()) {
    return Fail(Errc::kBadInput, place, ": either all layers or none must have experts");
  }
  SW_TRY(AddLayer(plan, id, std::move(slots), place));
  const auto at =
      std::lower_bound(plan->layer_id.begin(), plan->layer_id.end(), id) - plan->layer_id.begin();
  if (experts != nullptr) {
    SW_TRY_ASSIGN(const std::uint64_t count,
                  json::WholeOf(*experts, 1, limits::kMoeExperts, place + ": experts"));
    plan->layer_experts.insert(plan->layer_experts.begin() + at, static_cast<std::uint32_t>(count));
  }
  if (owners == nullptr) return {};
  SW_TRY_ASSIGN(auto owned,
                ListedSlots(*owners, place + ": owners", first, &plan->owner_device_slots));
  plan->owner_slots.insert(plan->owner_slots.begin() + at, std::move(owned));
  return {};
}

/// Verifies the experts of layers with numbers of their own. Removes these numbers if all are
/// equal.
Status CheckLayerExperts(const std::string& where, PlanFile* plan) {
  if (plan->layer_experts.empty()) return {};
  const auto most = std::max_element(plan->layer_experts.begin(), plan->layer_experts.end());
  if (plan->experts != 0 && plan->experts != *most) {
    return Fail(Errc::kBadInput, where, ": experts is ", plan->experts,
                ", but the largest number in a layer is ", *most);
  }
  plan->experts = *most;
  for (const auto* const layers : {&plan->slots, &plan->owner_slots}) {
    for (std::size_t l = 0; l < layers->size(); ++l) {
      for (const std::int32_t expert : (*layers)[l]) {
        if (expert < static_cast<std::int32_t>(plan->layer_experts[l])) continue;
        return Fail(Errc::kBadInput, where, ": layer ", plan->layer_id[l], ": expert ", expert,
                    " does not exist, there are ", plan->layer_experts[l]);
      }
    }
  }
  const auto differs = [&](std::uint32_t count) { return count != plan->experts; };
  if (std::none_of(plan->layer_experts.begin(), plan->layer_experts.end(), differs)) {
    plan->layer_experts.clear();
  }
  return {};
}

/// Reads a row of numbers of a migration, each of which must be below its limit. Replaces the
/// number of the layer by its position in the plan.
Result<std::vector<std::uint32_t>> MigrationRow(const Json& row, const PlanFile& plan,
                                                std::span<const std::uint64_t> limits,
                                                const std::string& where) {
  if (!row.is_array() || row.size() != limits.size()) {
    return Fail(Errc::kBadInput, where, ": a list of ", limits.size(), " numbers expected, found ",
                json::KindOf(row));
  }
  std::vector<std::uint32_t> numbers;
  for (std::size_t i = 0; i < limits.size(); ++i) {
    SW_TRY_ASSIGN(const std::uint64_t number, json::WholeOf(row[i], 0, limits[i] - 1, where));
    numbers.push_back(static_cast<std::uint32_t>(number));
  }
  const auto at = std::lower_bound(plan.layer_id.begin(), plan.layer_id.end(), numbers[0]);
  if (at == plan.layer_id.end() || *at != numbers[0]) {
    return Fail(Errc::kBadInput, where, ": layer ", numbers[0], " is not in the plan");
  }
  const std::uint32_t layer =
      std::exchange(numbers[0], static_cast<std::uint32_t>(at - plan.layer_id.begin()));
  if (numbers[1] < plan.ExpertsOf(numbers[0])) return numbers;
  return Fail(Errc::kBadInput, where, ": layer ", layer, " has no expert ", numbers[1]);
}

Status ParseMigration(const Json& record, const std::string& where, PlanFile* plan) {
  const Json* transfers = json::Find(record, "transfers");
  const Json* lost = json::Find(record, "lost");
  if (transfers == nullptr || lost == nullptr || !transfers->is_array() || !lost->is_array()) {
    return Fail(Errc::kBadInput, where, ": an object with lists transfers and lost expected");
  }
  const std::uint64_t gpus = plan->device_slots.size();
  const std::uint64_t rounds = std::max<std::uint64_t>(transfers->size(), 1);
  Migration found;
  for (const Json& row : *transfers) {
    const std::string place = where + ": transfer " + std::to_string(found.transfers.size());
    SW_TRY_ASSIGN(const auto n,
                  MigrationRow(row, *plan,
                               std::array{limits::kMoeLayers, std::uint64_t{plan->experts}, gpus,
                                          gpus, rounds},
                               place));
    if (!found.transfers.empty() && n[4] < found.transfers.back().round) {
      return Fail(Errc::kBadInput, place, ": round ", n[4], " after round ",
                  found.transfers.back().round);
    }
    found.transfers.push_back({n[0], n[1], n[2], n[3], n[4], Reach::kNode});
    found.rounds = n[4] + 1;
  }
  for (const Json& row : *lost) {
    SW_TRY_ASSIGN(
        const auto n,
        MigrationRow(row, *plan, std::array{limits::kMoeLayers, std::uint64_t{plan->experts}},
                     where + ": lost"));
    found.lost.push_back({n[0], n[1]});
  }
  plan->migration = std::move(found);
  return {};
}

Result<PlanFile> ParseRecord(const Json& root, const std::string& where) {
  PlanFile plan;
  plan.format = "plan";
  const Json& layers = root["layers"];
  if (!layers.is_array() || layers.size() > limits::kMoeLayers) {
    return Fail(Errc::kBadInput, where, ": layers: a list expected");
  }
  if (const Json* experts = json::Find(root, "experts")) {
    SW_TRY_ASSIGN(const std::uint64_t count,
                  json::WholeOf(*experts, 1, limits::kMoeExperts, where + ": experts"));
    plan.experts = static_cast<std::uint32_t>(count);
  }
  for (const Json& layer : layers) SW_TRY(AddRecordLayer(layer, where, &plan));
  SW_TRY(CheckLayerExperts(where, &plan));
  SW_TRY(Finish(&plan, where));
  if (const Json* cluster = json::Find(root, "cluster")) {
    SW_TRY_ASSIGN(plan.cluster,
                  ParseCluster(cluster->dump(), static_cast<std::uint32_t>(plan.layer_id.size()),
                               where + ": cluster"));
  } else if (const Json* nodes = json::Find(root, "nodes")) {
    // In a record without GPUs every node counts as one GPU.
    SW_TRY_ASSIGN(const std::uint64_t count,
                  json::WholeOf(*nodes, 1, limits::kMoeNodes, where + ": nodes"));
    if (count != plan.device_slots.size()) {
      return Fail(Errc::kBadInput, where, ": ", count, " nodes, but layer ", plan.layer_id.front(),
                  " lists ", plan.device_slots.size());
    }
    plan.cluster = UniformCluster(static_cast<std::uint32_t>(count), 1, 0);
    for (std::size_t d = 0; d < plan.device_slots.size(); ++d) {
      plan.cluster->devices[d].slots = plan.device_slots[d];
    }
  }
  if (const Json* migration = json::Find(root, "migration")) {
    SW_TRY(ParseMigration(*migration, where + ": migration", &plan));
  }
  return plan;
}

Result<PlanFile> FromJson(const Json& root, const std::string& where) {
  if (root.is_array()) return ParseMatrixPlan(root, where);
  if (root.contains("record_type")) return ParseVllmPlan(root, where);
  if (root.contains("layer_list")) return ParseAscendPlan(root, where);
  if (root.contains("physical_to_logical_map")) return ParseSglangPlan(root, where);
  if (root.contains("physical_to_logical")) return ParseEplbPlan(root, where);
  if (root.contains("layers")) return ParseRecord(root, where);
  return Fail(Errc::kBadInput, where,
              ": not a plan: expected one of layers, physical_to_logical, physical_to_logical_map, "
              "layer_list, record_type and initial_global_assignments");
}

/// Slots of a cluster's device in the plan: first slot and number of slots.
struct Source {
  std::uint32_t first = 0;
  std::uint32_t count = 0;
};

tl::unexpected<Error> Differs(std::string_view what, std::uint64_t plan, std::uint64_t cluster) {
  return Fail(Errc::kBadInput, "plan: ", plan, " ", what, ", the cluster has ", cluster);
}

/// Matches GPUs of equal nodes by the names of their nodes.
Result<std::vector<Source>> ByName(const PlanFile& plan, const Cluster& cluster,
                                   const std::vector<Source>& of_plan) {
  std::map<std::string, std::uint32_t> found;
  for (std::uint32_t n = 0; n < plan.cluster->node_count(); ++n) {
    found.emplace(plan.cluster->nodes[n].name, n);
  }
  std::vector<Source> sources(cluster.device_count());
  for (std::uint32_t n = 0; n < cluster.node_count(); ++n) {
    const auto at = found.find(cluster.nodes[n].name);
    if (at == found.end()) continue;
    const std::uint32_t from = plan.cluster->device_first(at->second);
    const std::uint32_t plan_gpus = plan.cluster->device_first(at->second + 1) - from;
    const std::uint32_t to = cluster.device_first(n);
    const std::uint32_t gpus = cluster.device_first(n + 1) - to;
    if (plan_gpus != gpus) {
      return Differs("gpus on node \"" + cluster.nodes[n].name + "\"", plan_gpus, gpus);
    }
    for (std::uint32_t g = 0; g < gpus; ++g) sources[to + g] = of_plan[from + g];
  }
  return sources;
}

Result<std::vector<Source>> SourcesOf(const PlanFile& plan, const Cluster& cluster) {
  std::vector<Source> sources;
  std::uint32_t first = 0;
  for (const std::uint32_t count : plan.device_slots) {
    sources.push_back({first, count});
    first += count;
  }
  if (plan.cluster && plan.cluster->device_count() == sources.size()) {
    const bool named =
        std::any_of(cluster.nodes.begin(), cluster.nodes.end(), [&](const Node& node) {
          return std::any_of(plan.cluster->nodes.begin(), plan.cluster->nodes.end(),
                             [&](const Node& other) { return other.name == node.name; });
        });
    if (named) return ByName(plan, cluster, sources);
  }
  const auto slot_count = static_cast<std::uint32_t>(plan.slots.front().size());
  const std::uint32_t live = cluster.live_devices();
  const std::uint32_t all = cluster.device_count();
  if (plan.device_slots.empty() && live < all && live > 0 && slot_count % live != 0 &&
      slot_count % all == 0) {
    // The plan also counts ranks of GPUs without experts.
    std::vector<Source> ranks(all);
    for (std::uint32_t d = 0; d < all; ++d) {
      if (cluster.holds(d)) ranks[d] = {d * (slot_count / all), slot_count / all};
    }
    return ranks;
  }
  if (plan.device_slots.empty()) {
    // Ranks of other programs are the live GPUs in order.
    if (live == 0 || slot_count % live != 0) {
      return Fail(Errc::kBadInput, "plan: ", slot_count, " slots do not divide among ", live,
                  " live gpus");
    }
    for (std::uint32_t rank = 0; rank < live; ++rank) {
      sources.push_back({rank * (slot_count / live), slot_count / live});
    }
  }
  if (sources.size() == cluster.device_count()) return sources;
  if (sources.size() != live) return Differs("gpus", sources.size(), cluster.device_count());
  std::vector<Source> spread(cluster.device_count());
  std::size_t rank = 0;
  for (std::uint32_t d = 0; d < cluster.device_count(); ++d) {
    if (cluster.holds(d)) spread[d] = sources[rank++];
  }
  return spread;
}

/// Verifies that a layer of a plan has the experts of the token counts.
/// \param row  of the plan
/// \param layer  of the token counts
Status CheckExperts(const PlanFile& plan, std::size_t row, const TokenCounts& loads,
                    std::uint32_t layer) {
  // Other formats have no number of experts, or one for all layers. They contain only the ids in
  // use, so a number found from them may be too low.
  if (plan.format != "plan" && plan.experts <= loads.experts) return {};
  const std::uint32_t found = plan.ExpertsOf(row);
  if (found == loads.ExpertsOf(layer)) return {};
  const bool equal = plan.layer_experts.empty() && loads.layer_experts.empty();
  const std::string place =
      equal ? std::string() : StrCat("layer ", loads.layer_id[layer], " has ");
  return Fail(Errc::kBadInput, "plan: ", place, found, " experts, the token counts have ",
              loads.ExpertsOf(layer));
}

/// Returns the numbers that a plan without layer numbers gives to the layers of the token counts:
/// their positions among all layers of the recording, or among the picked ones if the plan has
/// only these. A plan with a row for each layer of the model, also for dense ones, has their
/// numbers.
/// \error kBadInput  the plan has another number of layers
Result<std::vector<std::uint32_t>> PositionsOf(const PlanFile& plan, const TokenCounts& loads,
                                               std::span<const std::uint32_t> recorded) {
  const std::size_t rows = plan.layer_id.size();
  std::vector<std::uint32_t> positions(loads.layers);
  std::iota(positions.begin(), positions.end(), 0U);
  if (recorded.empty() || rows != recorded.size()) {
    if (rows == loads.layers) return positions;
    const std::uint64_t last = recorded.empty() ? loads.layer_id.back() : recorded.back();
    if (rows == last + 1) return std::vector<std::uint32_t>(loads.layer_id);
    const std::string picked = recorded.size() > loads.layers
                                   ? StrCat(" (of these, --layers picks ", loads.layers, ")")
                                   : "";
    return Fail(Errc::kBadInput, "plan: ", Plural(rows, "layer"),
                " without layer numbers, the token counts have ",
                std::max<std::size_t>(recorded.size(), loads.layers), picked);
  }
  for (std::uint32_t l = 0; l < loads.layers; ++l) {
    const auto at = std::ranges::lower_bound(recorded, loads.layer_id[l]);
    positions[l] = static_cast<std::uint32_t>(at - recorded.begin());
  }
  return positions;
}

/// Returns the row of the plan for every layer of the token counts.
/// \error kBadInput  the plan lacks a layer, or has other experts in it
Result<std::vector<std::size_t>> RowsOf(const PlanFile& plan, const TokenCounts& loads,
                                        std::span<const std::uint32_t> recorded) {
  std::vector<std::uint32_t> numbers = loads.layer_id;
  if (plan.positions) {
    SW_TRY_ASSIGN(numbers, PositionsOf(plan, loads, recorded));
  }
  std::vector<std::size_t> rows;
  for (std::uint32_t l = 0; l < loads.layers; ++l) {
    const auto at = std::lower_bound(plan.layer_id.begin(), plan.layer_id.end(), numbers[l]);
    if (at == plan.layer_id.end() || *at != numbers[l]) {
      return Fail(Errc::kBadInput, "plan: layer ", numbers[l], " is missing: the plan has ",
                  plan.layer_id.size(), " layers, ", plan.layer_id.front(), " to ",
                  plan.layer_id.back(), "; the token counts have ", loads.layers);
    }
    rows.push_back(static_cast<std::size_t>(at - plan.layer_id.begin()));
    SW_TRY(CheckExperts(plan, rows.back(), loads, l));
  }
  return rows;
}

}  // namespace

Result<std::int32_t> SlotOf(const Json& value, const std::string& where) {
  if (value.is_number_integer() && value.get<std::int64_t>() == kNoExpert) return kNoExpert;
  SW_TRY_ASSIGN(const std::uint64_t expert,
                json::WholeOf(value, 0, limits::kMoeExperts - 1, where));
  return static_cast<std::int32_t>(expert);
}

Result<std::vector<std::int32_t>> SlotsOf(const Json& list, const std::string& where) {
  if (!list.is_array()) {
    return Fail(Errc::kBadInput, where, ": a list of experts expected, found ", json::KindOf(list));
  }
  std::vector<std::int32_t> slots;
  slots.reserve(list.size());
  for (const Json& value : list) {
    SW_TRY_ASSIGN(const std::int32_t slot,
                  SlotOf(value, where + " slot " + std::to_string(slots.size())));
    slots.push_back(slot);
  }
  return slots;
}

Status AddLayer(PlanFile* plan, std::uint64_t layer, std::vector<std::int32_t> slots,
                const std::string& where) {
  if (layer >= limits::kMoeLayers || slots.size() > limits::kMoeSlots) {
    return Fail(Errc::kLimit, where, ": layer ", layer, " of ", slots.size(), " slots: at most ",
                limits::kMoeLayers, " layers of ", limits::kMoeSlots);
  }
  if (!plan->slots.empty() && plan->slots.front().size() != slots.size()) {
    return Fail(Errc::kBadInput, where, ": ", slots.size(), " slots, layer ",
                plan->layer_id.front(), " has ", plan->slots.front().size());
  }
  if (std::find(plan->layer_id.begin(), plan->layer_id.end(), layer) != plan->layer_id.end()) {
    return Fail(Errc::kBadInput, where, ": layer ", layer, " occurs twice");
  }
  const auto at = std::lower_bound(plan->layer_id.begin(), plan->layer_id.end(), layer);
  const auto index = at - plan->layer_id.begin();
  plan->layer_id.insert(at, static_cast<std::uint32_t>(layer));
  plan->slots.insert(plan->slots.begin() + index, std::move(slots));
  return {};
}

Status Finish(PlanFile* plan, const std::string& where) {
  if (plan->slots.empty() || plan->slots.front().empty()) {
    return Fail(Errc::kBadInput, where, ": a plan without ",
                plan->slots.empty() ? "layers" : "slots");
  }
  std::int32_t largest = kNoExpert;
  for (const auto* const layers : {&plan->slots, &plan->owner_slots}) {
    for (const auto& layer : *layers) {
      for (const std::int32_t expert : layer) largest = std::max(largest, expert);
    }
  }
  if (plan->experts == 0) plan->experts = static_cast<std::uint32_t>(largest + 1);
  if (largest >= static_cast<std::int32_t>(plan->experts) || plan->experts == 0) {
    return Fail(Errc::kBadInput, where, ": expert ", largest, " does not exist, there are ",
                plan->experts);
  }
  return {};
}

Result<PlanFile> ParsePlan(std::string_view text, const std::string& where) {
  const std::size_t first = text.find_first_not_of(" \t\r\n");
  if (first == std::string_view::npos) return Fail(Errc::kBadInput, where, ": is empty");
  if (text.find('\0') != std::string_view::npos) {
    return Fail(
        Errc::kBadInput, where,
        ": a binary file that is not a plan: plans are JSON, YAML, or tensors in .pt and .pth "
        "files");
  }
  if (text[first] != '{' && text[first] != '[') return ParseTensorrtPlan(text, where);
  SW_TRY_ASSIGN(const Json root, json::Parse(text, where));
  SW_TRY(exec::CheckTextSum(text, where));
  return FromJson(root, where);
}

Result<PlanFile> ReadPlan(const std::string& path) {
  if (path.ends_with(".pt") || path.ends_with(".pth")) return ReadTensorPlan(path);
  SW_TRY_ASSIGN(const std::string text, os::ReadWholeText(path, limits::kJsonBytes));
  return ParsePlan(text, path);
}

Result<Placement> PlacedOn(const PlanFile& plan, const TokenCounts& loads, const Cluster& cluster,
                           std::span<const std::uint32_t> recorded) {
  SW_TRY_ASSIGN(const auto rows, RowsOf(plan, loads, recorded));
  SW_TRY_ASSIGN(const auto sources, SourcesOf(plan, cluster));
  Placement placement;
  placement.layers = loads.layers;
  placement.experts = loads.experts;
  placement.layer_experts = loads.layer_experts;
  placement.slot_begin.push_back(0);
  for (std::uint32_t d = 0; d < cluster.device_count(); ++d) {
    const std::uint32_t slots = std::max(sources[d].count, cluster.devices[d].slots);
    placement.slot_begin.push_back(placement.slot_begin.back() + slots);
  }
  const std::uint64_t cells = std::uint64_t{placement.slot_count()} * loads.layers;
  if (cells > limits::kMoeCells) {
    return Fail(Errc::kLimit, "plan: ", cells, " slots over all layers, at most ",
                limits::kMoeCells);
  }
  placement.slot_expert.assign(cells, kNoExpert);
  for (std::uint32_t l = 0; l < loads.layers; ++l) {
    const std::vector<std::int32_t>& from = plan.slots[rows[l]];
    for (std::uint32_t d = 0; d < cluster.device_count(); ++d) {
      const auto to = placement.slots(l, d);
      std::copy_n(from.begin() + sources[d].first, sources[d].count, to.begin());
    }
  }
  return placement;
}

PlanFile StateOf(PlanFile plan) {
  if (plan.owner_slots.empty()) return plan;
  plan.slots = std::exchange(plan.owner_slots, {});
  plan.device_slots = std::exchange(plan.owner_device_slots, {});
  return plan;
}

Result<Cluster> ClusterOf(const PlanFile& plan) {
  if (plan.cluster) return *plan.cluster;
  return Fail(Errc::kUsage, "a plan in the format ", plan.format,
              " does not describe its cluster: pass --cluster, or --nodes, --gpus and --slots");
}

}  // namespace shardwright::placement
