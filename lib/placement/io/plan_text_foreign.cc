// SPDX-License-Identifier: Apache-2.0
// Writes plans for other programs (docs/formats/plan.md, "Other programs").

#include <algorithm>
#include <iterator>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <utility>

#include "placement/io/plan_text.h"
#include "support/base/text.h"
#include "support/json/json.h"

namespace shardwright::placement {
namespace {

/// A placement in the model of other programs: every rank has the same number of slots, none
/// empty. All slots of an idle rank contain expert 0.
struct Flat {
  std::uint32_t ranks = 0;
  std::uint32_t per_rank = 0;
  std::uint64_t repeated = 0;  ///< slots filled with an expert that their rank holds already
  std::vector<std::vector<std::int32_t>> slots;  ///< by layer, rank after rank
  std::vector<std::uint32_t> idle;  ///< GPUs of live nodes that are dead or have no slots

  std::uint32_t slot_count() const { return ranks * per_rank; }
  std::span<const std::int32_t> of_rank(std::size_t layer, std::uint32_t rank) const {
    return std::span(slots[layer]).subspan(std::size_t{rank} * per_rank, per_rank);
  }
};

/// Returns the experts of a GPU's slots, without empty slots.
std::vector<std::int32_t> HeldBy(const Placement& placement, std::uint32_t layer,
                                 std::uint32_t device) {
  std::vector<std::int32_t> held;
  std::ranges::copy_if(placement.slots(layer, device), std::back_inserter(held),
                       [](std::int32_t expert) { return expert != kNoExpert; });
  return held;
}

/// Returns the number of slots of all GPUs that can store experts, or 0 if it differs.
std::uint32_t EqualSlots(const Cluster& cluster) {
  std::uint32_t slots = 0;
  for (std::uint32_t d = 0; d < cluster.device_count(); ++d) {
    if (!cluster.holds(d)) continue;
    if (slots != 0 && cluster.devices[d].slots != slots) return 0;
    slots = cluster.devices[d].slots;
  }
  return slots;
}

/// Fills the rest of a GPU's slots with experts that it holds. First takes those with the fewest
/// replicas on other GPUs, because their tokens stay in place, and of these the ones with the
/// fewest tokens.
void Repeat(const Placement& placement, const TokenCounts& loads, std::uint32_t layer,
            std::uint32_t per_rank, std::vector<std::int32_t>* held) {
  const auto all = placement.layer(layer);
  const auto tokens = loads.layer(layer);
  std::vector<std::tuple<std::ptrdiff_t, std::uint64_t, std::int32_t>> order;
  for (const std::int32_t expert : *held) {
    order.emplace_back(std::ranges::count(all, expert) - std::ranges::count(*held, expert),
                       tokens[static_cast<std::size_t>(expert)], expert);
  }
  std::sort(order.begin(), order.end());
  for (std::size_t i = 0; held->size() < per_rank; ++i) {
    held->push_back(std::get<2>(order[i % order.size()]));
  }
}

/// Gives all ranks the same number of slots. If `repeats`, this is the number of slots of the
/// cluster, and slots are filled with experts that their GPU holds; otherwise it is the number of
/// experts of a GPU.
/// \error kUnsupported  another number of experts on a GPU
Result<Flat> Flatten(const Placement& placement, const TokenCounts& loads, const Cluster& cluster,
                     bool repeats) {
  Flat flat;
  flat.slots.resize(placement.layers);
  flat.per_rank = repeats ? EqualSlots(cluster) : 0;
  for (std::uint32_t l = 0; l < placement.layers; ++l) {
    for (std::uint32_t d = 0; d < placement.device_count(); ++d) {
      if (!cluster.holds(d)) continue;
      const auto held = static_cast<std::uint32_t>(HeldBy(placement, l, d).size());
      flat.per_rank = std::max(flat.per_rank, held);
    }
  }
  for (std::uint32_t l = 0; l < placement.layers; ++l) {
    for (std::uint32_t d = 0; d < placement.device_count(); ++d) {
      if (!cluster.nodes[cluster.devices[d].node].alive) continue;
      if (l == 0) ++flat.ranks;
      if (!cluster.holds(d)) {
        if (l == 0) flat.idle.push_back(d);
        flat.slots[l].insert(flat.slots[l].end(), flat.per_rank, 0);
        continue;
      }
      std::vector<std::int32_t> held = HeldBy(placement, l, d);
      if (held.size() < flat.per_rank) {
        if (!repeats || held.empty() || cluster.devices[d].slots < flat.per_rank) {
          return Fail(Errc::kUnsupported, "layer ", loads.layer_id[l], ": ", GpuName(cluster, d),
                      " holds ", held.size(), " experts, others ", flat.per_rank,
                      ": the format requires the same number on every gpu; use --format plan");
        }
        flat.repeated += flat.per_rank - held.size();
        Repeat(placement, loads, l, flat.per_rank, &held);
      }
      flat.slots[l].insert(flat.slots[l].end(), held.begin(), held.end());
    }
  }
  return flat;
}

/// Returns a text about the first expert that a rank has twice; empty if there is none.
std::string FirstDuplicate(const Placement& placement, const TokenCounts& loads,
                           const Cluster& cluster) {
  for (std::uint32_t l = 0; l < placement.layers; ++l) {
    std::uint32_t ranks = 0;
    for (std::uint32_t d = 0; d < placement.device_count(); ++d) {
      if (!cluster.nodes[cluster.devices[d].node].alive) continue;
      const std::uint32_t rank = ranks++;
      if (!cluster.holds(d)) continue;
      std::set<std::int32_t> seen;
      for (const std::int32_t expert : HeldBy(placement, l, d)) {
        if (seen.insert(expert).second) continue;
        return StrCat("layer ", loads.layer_id[l], " expert ", expert, ": occurs twice on rank ",
                      rank);
      }
    }
  }
  return "";
}

void AppendRows(std::string* out, const std::vector<std::vector<std::int32_t>>& rows) {
  *out += '[';
  for (std::size_t l = 0; l < rows.size(); ++l) {
    if (l > 0) *out += ",\n";
    json::AppendNumbers(out, rows[l]);
  }
  *out += ']';
}

std::string EplbText(const Flat& flat, const Placement& placement, const TokenCounts& loads,
                     const Cluster& cluster, std::uint32_t groups) {
  std::vector<std::vector<std::int32_t>> counts;
  std::vector<std::vector<std::vector<std::int32_t>>> places;
  std::size_t most = 1;
  for (const auto& slots : flat.slots) {
    std::vector<std::vector<std::int32_t>> of(loads.experts);
    for (std::size_t s = 0; s < slots.size(); ++s) {
      of[static_cast<std::size_t>(slots[s])].push_back(static_cast<std::int32_t>(s));
    }
    std::vector<std::int32_t> count;
    for (const auto& list : of) {
      count.push_back(static_cast<std::int32_t>(list.size()));
      most = std::max(most, list.size());
    }
    counts.push_back(std::move(count));
    places.push_back(std::move(of));
  }
  std::string out = "{\"gpus\":" + std::to_string(flat.ranks) +
                    ",\"nodes\":" + std::to_string(cluster.live_nodes()) +
                    ",\"groups\":" + std::to_string(groups) + ",\n\"loads\":[";
  for (std::uint32_t l = 0; l < loads.layers; ++l) {
    if (l > 0) out += ",\n";
    json::AppendNumbers(&out, loads.layer(l));
  }
  out += "],\n\"physical_to_logical\":";
  AppendRows(&out, flat.slots);
  out += ",\n\"logical_to_physical\":[";
  for (std::size_t l = 0; l < places.size(); ++l) {
    for (auto& list : places[l]) list.resize(most, -1);
    if (l > 0) out += ",\n";
    AppendRows(&out, places[l]);
  }
  out += "],\n\"logical_count\":";
  AppendRows(&out, counts);
  out += ",\n\"imbalance\":[";
  for (std::uint32_t l = 0; l < loads.layers; ++l) {
    if (l > 0) out += ',';
    json::AppendReal(&out, Measure(placement, loads, cluster, l).imbalance);
  }
  return out + "]}\n";
}

/// Numbers all layers of the model for SGLang, up to the last one of the recording. Layers without
/// a plan get the default order.
std::string SglangText(const Flat& flat, const TokenCounts& loads,
                       std::span<const std::uint32_t> recorded, PlanNotes* notes) {
  std::vector<std::vector<std::int32_t>> rows(std::max(recorded.back(), loads.layer_id.back()) + 1);
  std::vector<std::int32_t> plain(flat.slot_count());
  for (std::size_t s = 0; s < plain.size(); ++s) {
    plain[s] = static_cast<std::int32_t>(s % loads.experts);
  }
  for (std::uint32_t l = 0; l < loads.layers; ++l) rows[loads.layer_id[l]] = flat.slots[l];
  std::size_t filled = 0;
  for (auto& row : rows) {
    if (!row.empty()) continue;
    row = plain;
    ++filled;
  }
  if (filled > 0) {
    notes->push_back(
        StrCat(Plural(filled, "layer"), " without a plan: their experts are in default order"));
  }
  std::string out = "{\"physical_to_logical_map\":";
  AppendRows(&out, rows);
  return out + "}\n";
}

/// Numbers the MoE layers from 0 for vLLM, which reads one record per line.
std::string VllmText(const Flat& flat, const TokenCounts& loads) {
  std::string out = "{\"record_type\":\"eplb_initial_mapping\",\"version\":1";
  out += ",\"num_redundant_experts\":" + std::to_string(flat.slot_count() - loads.experts);
  out += ",\"num_slots\":" + std::to_string(flat.slot_count());
  out += ",\"initial_global_assignments\":{";
  for (std::size_t l = 0; l < flat.slots.size(); ++l) {
    if (l > 0) out += ',';
    out += '"' + std::to_string(l) + "\":";
    json::AppendNumbers(&out, flat.slots[l]);
  }
  return out + "}}\n";
}

std::string TensorrtText(const Flat& flat, const TokenCounts& loads) {
  std::string out = "num_slots: " + std::to_string(flat.slot_count()) +
                    "\nlayer_updates_per_iter: 0\ninitial_global_assignments:\n";
  for (std::size_t l = 0; l < flat.slots.size(); ++l) {
    out += "  " + std::to_string(loads.layer_id[l]) + ": [";
    for (std::size_t s = 0; s < flat.slots[l].size(); ++s) {
      if (s > 0) out += ", ";
      out += std::to_string(flat.slots[l][s]);
    }
    out += "]\n";
  }
  return out;
}

/// Numbers the MoE layers from 0 for vllm-ascend.
std::string AscendText(const Flat& flat) {
  std::string out =
      "{\"moe_layer_count\":" + std::to_string(flat.slots.size()) + ",\"layer_list\":[\n";
  for (std::size_t l = 0; l < flat.slots.size(); ++l) {
    out += "{\"layer_id\":" + std::to_string(l) +
           ",\"device_count\":" + std::to_string(flat.ranks) + ",\"device_list\":[";
    for (std::uint32_t rank = 0; rank < flat.ranks; ++rank) {
      if (rank > 0) out += ',';
      out += "{\"device_id\":" + std::to_string(rank) + ",\"device_expert\":";
      json::AppendNumbers(&out, flat.of_rank(l, rank));
      out += '}';
    }
    out += l + 1 < flat.slots.size() ? "]},\n" : "]}\n";
  }
  return out + "]}\n";
}

}  // namespace

Result<std::string> ForeignPlanText(PlanFormat format, const Placement& placement,
                                    const TokenCounts& loads, const Cluster& cluster,
                                    std::uint32_t groups, std::span<const std::uint32_t> recorded,
                                    PlanNotes* notes) {
  if (format == PlanFormat::kEplb || format == PlanFormat::kVllm) {
    // Their files state one number of experts, or of redundant slots, for all layers.
    SW_TRY(token_counts::RequireEqualExperts(
        loads, format == PlanFormat::kEplb ? "--format eplb" : "--format vllm"));
  }
  // An expert map of vllm-ascend has one slot for each expert of a device.
  const bool repeats = format != PlanFormat::kAscend;
  SW_TRY_ASSIGN(const Flat flat, Flatten(placement, loads, cluster, repeats));
  if (flat.slot_count() < loads.experts) {
    return Fail(Errc::kUnsupported, loads.experts, " experts do not fit in ", flat.slot_count(),
                " slots");
  }
  if (!flat.idle.empty() && format != PlanFormat::kSglang) {
    return Fail(Errc::kUnsupported, GpuName(cluster, flat.idle.front()),
                " holds no experts: only --format sglang and plan can express a rank without "
                "experts");
  }
  for (const std::uint32_t gpu : flat.idle) {
    notes->push_back(StrCat(GpuName(cluster, gpu), " holds no experts: its slots name expert 0"));
  }
  const std::string duplicate = FirstDuplicate(placement, loads, cluster);
  if (!duplicate.empty() && format == PlanFormat::kAscend) {
    return Fail(Errc::kUnsupported, duplicate,
                ": vllm-ascend requires different experts on each device");
  }
  if (!duplicate.empty() && format != PlanFormat::kEplb) {
    notes->push_back(StrCat(duplicate, ": the second copy wastes memory"));
  }
  if (flat.repeated > 0) {
    notes->push_back(StrCat("filled ", Plural(flat.repeated, "slot"),
                            " with an expert that the gpu already holds: the format requires ",
                            flat.per_rank, " experts on every gpu"));
  }
  if (const std::uint32_t slots = EqualSlots(cluster); flat.per_rank < slots) {
    notes->push_back(StrCat("the plan has ", flat.per_rank, " slots on every gpu, not ", slots,
                            ": vllm-ascend requires different experts on each device"));
  }
  if (flat.ranks != cluster.device_count()) {
    notes->push_back(StrCat("ranks 0 to ", flat.ranks - 1, " are the live gpus, ",
                            cluster.device_count() - flat.ranks, " dead ones are left out"));
  }
  // SGLang's file has rows for all layers, and its own note.
  if (recorded.size() != loads.layers && format != PlanFormat::kSglang) {
    const bool numbered = format == PlanFormat::kTensorrt;
    notes->push_back(StrCat(numbered ? "" : "layers are numbered from 0: ",
                            "the reader needs all MoE layers, these are ", loads.layers, " of ",
                            recorded.size()));
  }
  switch (format) {
    case PlanFormat::kEplb:
      return EplbText(flat, placement, loads, cluster, groups);
    case PlanFormat::kSglang:
      return SglangText(flat, loads, recorded, notes);
    case PlanFormat::kVllm:
      return VllmText(flat, loads);
    case PlanFormat::kTensorrt:
      return TensorrtText(flat, loads);
    case PlanFormat::kAscend:
      return AscendText(flat);
    case PlanFormat::kPlan:
      break;
  }
  return Fail(Errc::kUsage, "--format plan is not a format of another program");
}

}  // namespace shardwright::placement
