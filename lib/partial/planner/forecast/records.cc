// SPDX-License-Identifier: Apache-2.0
#include "partial/planner/forecast/records.h"

#include <nlohmann/json.hpp>

namespace shardwright::partial {
namespace {

using OrderedJson = nlohmann::ordered_json;

/// Returns {"0":[ids],...}: the selected experts by layer.
OrderedJson LayersOf(const Selection& selection) {
  OrderedJson layers = OrderedJson::object();
  for (std::size_t m = 0; m < selection.size(); ++m) {
    layers[std::to_string(m)] = selection[m];
  }
  return layers;
}

std::string TextOf(const OrderedJson& record) {
  // Names come from files: replace invalid UTF-8 instead of throwing.
  return record.dump(-1, ' ', false, OrderedJson::error_handler_t::replace) + "\n";
}

OrderedJson Start(const char* kind) {
  OrderedJson record = OrderedJson::object();
  record["kind"] = kind;
  return record;
}

}  // namespace

Result<std::string> SelectionRecord(const ExpertMap& map, std::uint32_t k_snapshot,
                                    std::optional<std::uint32_t> k_persist,
                                    std::span<const TwoLevelSelection> checkpoints) {
  const LayerExperts experts = map.experts();
  SW_TRY(ValidateExperts(experts));
  for (std::size_t m = 1; m < experts.size(); ++m) {
    if (experts[m] == experts[0]) continue;
    return Fail(Errc::kUsage, "selection record: MoE layer ", m, " has ", experts[m],
                " experts, layer 0 has ", experts[0]);
  }
  OrderedJson record = Start("selection");
  record["experts"] = experts[0];
  record["k"] = k_snapshot;
  if (k_persist) record["k_persist"] = *k_persist;
  record["ep"] = map.ep;
  record["moe_layers"] = experts.size();
  OrderedJson& list = record["checkpoints"] = OrderedJson::array();
  for (std::size_t t = 0; t < checkpoints.size(); ++t) {
    OrderedJson entry = OrderedJson::object();
    entry["t"] = t;
    entry["layers"] = LayersOf(checkpoints[t].snapshot);
    if (k_persist) entry["persist"] = LayersOf(checkpoints[t].persist);
    list.push_back(std::move(entry));
  }
  return TextOf(record);
}

std::string BudgetRecord(const Counts& popularity, const BudgetSelection& budget) {
  OrderedJson record = Start("budget");
  record["popularity"] = popularity;
  record["s_total"] = budget.total;
  record["s"] = budget.share;
  record["selected"] = budget.selected;
  return TextOf(record);
}

Result<std::string> ShardingRecord(std::span<const std::string> names,
                                   std::span<const std::uint64_t> start, const ShardPlan& plan) {
  std::vector<std::uint32_t> count(names.size(), 0);
  for (const ShardPiece& piece : plan.pieces) {
    if (piece.module >= names.size()) {
      return Fail(Errc::kMismatch, "sharding record: there are ", names.size(),
                  " module names, but a piece of module ", piece.module);
    }
    ++count[piece.module];
  }
  OrderedJson modules = OrderedJson::object();
  OrderedJson owner = OrderedJson::object();
  for (const ShardPiece& piece : plan.pieces) {
    std::string name = names[piece.module];
    if (count[piece.module] > 1) {
      name += "[" + std::to_string(piece.first) + ":" + std::to_string(piece.last) + "]";
    }
    modules[name] = piece.last - piece.first;
    owner[name] = piece.rank;
  }
  OrderedJson record = Start("sharding");
  record["modules"] = std::move(modules);
  record["start"] = std::vector<std::uint64_t>(start.begin(), start.end());
  record["owner"] = std::move(owner);
  record["bottleneck"] = plan.bottleneck;
  return TextOf(record);
}

}  // namespace shardwright::partial
