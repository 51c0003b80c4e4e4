#include "pec/records.h"

#include <nlohmann/json.hpp>

namespace shardwright::pec {
namespace {

using Json = nlohmann::ordered_json;

/// {"0":[ids],...}
Json LayersOf(const Selection& selection, bool with_empty) {
  Json layers = Json::object();
  for (std::size_t m = 0; m < selection.size(); ++m) {
    if (with_empty || !selection[m].empty()) layers[std::to_string(m)] = selection[m];
  }
  return layers;
}

std::string TextOf(const Json& record) {
  // Names come from files: what is no UTF-8 must not throw.
  return record.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

Json Start(const char* kind) {
  Json record = Json::object();
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
    return Fail(Errc::kUsage, "selection record: MoE layer " + std::to_string(m) + " has " +
                                  std::to_string(experts[m]) + " experts, layer 0 has " +
                                  std::to_string(experts[0]));
  }
  Json record = Start("selection");
  record["experts"] = experts[0];
  record["k"] = k_snapshot;
  if (k_persist) record["k_persist"] = *k_persist;
  record["ep"] = map.ep;
  record["moe_layers"] = experts.size();
  Json& list = record["checkpoints"] = Json::array();
  for (std::size_t t = 0; t < checkpoints.size(); ++t) {
    Json entry = Json::object();
    entry["t"] = t;
    entry["layers"] = LayersOf(checkpoints[t].snapshot, true);
    if (k_persist) entry["persist"] = LayersOf(checkpoints[t].persist, true);
    list.push_back(std::move(entry));
  }
  return TextOf(record);
}

std::string BudgetRecord(const Counts& popularity, const BudgetSelection& budget) {
  Json record = Start("budget");
  record["popularity"] = popularity;
  record["s_total"] = budget.total;
  record["s"] = budget.share;
  record["selected"] = budget.selected;
  return TextOf(record);
}

Result<std::string> LostTokensRecord(std::span<const Counts> tokens, const LostTokensRun& run) {
  Json record = Start("lost-tokens");
  Json& rows = record["tokens"] = Json::array();
  const LayerExperts experts = tokens.empty() ? LayerExperts() : ShapeOf(tokens.front());
  rows.push_back(MakeCounts(experts));
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    SW_TRY(ValidateShape(tokens[i], experts, "tokens of iteration " + std::to_string(i + 1)));
    rows.push_back(tokens[i]);
  }
  Json& checkpoints = record["checkpoints"] = Json::array();
  for (const LostTokensRun::Checkpoint& checkpoint : run.checkpoints) {
    SW_TRY(Validate(checkpoint.memory, experts));
    SW_TRY(Validate(checkpoint.storage, experts));
    Json entry = Json::object();
    entry["it"] = checkpoint.iteration;
    entry["saved"]["memory"] = LayersOf(checkpoint.memory, true);
    entry["saved"]["storage"] = LayersOf(checkpoint.storage, true);
    checkpoints.push_back(std::move(entry));
  }
  Json& faults = record["faults"] = Json::array();
  Json resume = Json::array();
  Json lost(experts.size(), Json::array());
  for (const LostTokensRun::Fault& fault : run.faults) {
    SW_TRY(Validate(fault.lost, experts));
    if (fault.layer.size() != experts.size()) {
      return Fail(Errc::kMismatch, "lost tokens of " + std::to_string(fault.layer.size()) +
                                       " MoE layers, expected " + std::to_string(experts.size()));
    }
    Json entry = Json::object();
    entry["it"] = fault.iteration;
    entry["lost"] = LayersOf(fault.lost, false);
    faults.push_back(std::move(entry));
    resume.push_back(fault.resume);
    for (std::size_t m = 0; m < experts.size(); ++m) lost[m].push_back(fault.layer[m]);
  }
  record["resume"] = std::move(resume);
  record["lost"] = std::move(lost);
  record["plt"] = run.plt;
  return TextOf(record);
}

Result<std::string> ShardingRecord(std::span<const std::string> names,
                                   std::span<const std::uint64_t> start, const ShardPlan& plan) {
  std::vector<std::uint32_t> count(names.size(), 0);
  for (const ShardPiece& piece : plan.pieces) {
    if (piece.module >= names.size()) {
      return Fail(Errc::kMismatch, "sharding record: " + std::to_string(names.size()) +
                                       " names, a piece of module " + std::to_string(piece.module));
    }
    ++count[piece.module];
  }
  Json modules = Json::object();
  Json owner = Json::object();
  for (const ShardPiece& piece : plan.pieces) {
    std::string name = names[piece.module];
    if (count[piece.module] > 1) {
      name += "[" + std::to_string(piece.first) + ":" + std::to_string(piece.last) + "]";
    }
    modules[name] = piece.last - piece.first;
    owner[name] = piece.rank;
  }
  Json record = Start("sharding");
  record["modules"] = std::move(modules);
  record["start"] = std::vector<std::uint64_t>(start.begin(), start.end());
  record["owner"] = std::move(owner);
  record["bottleneck"] = plan.bottleneck;
  return TextOf(record);
}

}  // namespace shardwright::pec
