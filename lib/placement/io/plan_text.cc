// SPDX-License-Identifier: Apache-2.0
#include "placement/io/plan_text.h"

#include <algorithm>
#include <utility>

#include "engine/exec/manifest.h"
#include "support/json/json.h"

namespace shardwright::placement {
namespace {

void AppendRecovery(std::string* out, const RecoveryProbability& recovery) {
  *out += '{';
  for (std::size_t k = 1; k < recovery.survived.size() && k <= kRecordFailures; ++k) {
    if (k > 1) *out += ',';
    *out += '"' + std::to_string(k) + "\":";
    json::AppendReal(out, recovery.survived[k]);
    if (recovery.survived[k] == 0) break;
  }
  *out += '}';
}

void AppendMember(std::string* out, std::string_view name) {
  *out += ",\"";
  *out += name;
  *out += "\":";
}

/// Appends the slots by device, empty ones as -1.
void AppendDevices(std::string* out, const Placement& placement, std::uint32_t layer) {
  *out += '[';
  for (std::uint32_t d = 0; d < placement.device_count(); ++d) {
    if (d > 0) *out += ',';
    json::AppendNumbers(out, placement.slots(layer, d));
  }
  *out += ']';
}

/// Appends the experts by node, without empty slots.
void AppendNodes(std::string* out, const Placement& placement, const Cluster& cluster,
                 std::uint32_t layer) {
  *out += '[';
  for (std::uint32_t n = 0; n < cluster.node_count(); ++n) {
    if (n > 0) *out += ',';
    std::vector<std::int32_t> held;
    for (std::uint32_t d = cluster.device_first(n); d < cluster.device_first(n + 1); ++d) {
      for (const std::int32_t expert : placement.slots(layer, d)) {
        if (expert != kNoExpert) held.push_back(expert);
      }
    }
    json::AppendNumbers(out, held);
  }
  *out += ']';
}

std::vector<std::uint32_t> ReplicasOf(const Placement& placement, std::uint32_t layer) {
  std::vector<std::uint32_t> replicas(placement.ExpertsOf(layer), 0);
  for (const std::int32_t expert : placement.layer(layer)) {
    if (expert != kNoExpert) ++replicas[static_cast<std::size_t>(expert)];
  }
  return replicas;
}

void AppendLayer(std::string* out, const VerifiedPlan& plan, const TokenCounts& loads,
                 const Cluster& cluster, std::uint32_t layer) {
  *out += "{\"layer\":" + std::to_string(loads.layer_id[layer]);
  if (!loads.layer_experts.empty()) {
    AppendMember(out, "experts");
    *out += std::to_string(loads.ExpertsOf(layer));
  }
  AppendMember(out, "loads");
  json::AppendNumbers(out, loads.layer(layer));
  AppendMember(out, "replicas");
  json::AppendNumbers(out, ReplicasOf(plan.result.placement, layer));
  AppendMember(out, "placement");
  AppendNodes(out, plan.result.placement, cluster, layer);
  AppendMember(out, "devices");
  AppendDevices(out, plan.result.placement, layer);
  if (plan.result.owners) {
    AppendMember(out, "owners");
    AppendDevices(out, *plan.result.owners, layer);
  }
  AppendMember(out, "cut");
  const bool cut = layer < plan.result.notes.size() && plan.result.notes[layer].cut;
  *out += cut ? "true" : "false";
  const LayerMetrics& metrics = plan.metrics.layers[layer];
  for (const auto& [name, value] :
       {std::pair("imbalance", metrics.imbalance), std::pair("bound", metrics.bound),
        std::pair("lp_bound", metrics.lp_bound)}) {
    AppendMember(out, name);
    json::AppendReal(out, value);
  }
  AppendMember(out, "recovery");
  AppendRecovery(out, plan.layer_recovery[layer]);
  AppendMember(out, "recovery_method");
  json::AppendString(out, Name(plan.layer_recovery[layer].method));
  *out += '}';
}

void AppendMigration(std::string* out, const Migration& migration, const TokenCounts& loads) {
  AppendMember(out, "migration");
  *out += "{\"transfer_count\":" + std::to_string(migration.transfers.size());
  *out += ",\"bytes\":" + std::to_string(migration.bytes);
  *out += ",\"inter_node_bytes\":" + std::to_string(migration.inter_node_bytes);
  *out += ",\"rounds\":" + std::to_string(migration.rounds);
  *out += ",\"columns\":[\"layer\",\"expert\",\"from\",\"to\",\"round\"],\n \"transfers\":[";
  for (std::size_t i = 0; i < migration.transfers.size(); ++i) {
    const Transfer& transfer = migration.transfers[i];
    if (i > 0) *out += ',';
    json::AppendNumbers(out,
                        std::vector<std::uint32_t>{loads.layer_id[transfer.layer], transfer.expert,
                                                   transfer.from, transfer.to, transfer.round});
  }
  *out += "],\n \"lost\":[";
  for (std::size_t i = 0; i < migration.lost.size(); ++i) {
    if (i > 0) *out += ',';
    json::AppendNumbers(out, std::vector<std::uint32_t>{loads.layer_id[migration.lost[i].layer],
                                                        migration.lost[i].expert});
  }
  *out += "]}";
}

/// Returns the slots of a node if all nodes have the same number.
std::optional<std::uint64_t> SlotsPerNode(const Cluster& cluster) {
  const std::uint64_t slots = cluster.node_slots(0);
  for (std::uint32_t n = 1; n < cluster.node_count(); ++n) {
    if (cluster.node_slots(n) != slots) return std::nullopt;
  }
  return slots;
}

/// Returns the threshold that every layer meets: distinct failure units per expert.
std::uint64_t ThresholdOf(const VerifiedPlan& plan) {
  std::uint64_t kept =
      static_cast<std::uint64_t>(std::max<std::int64_t>(plan.model_recovery.certain, -1) + 1);
  if (plan.result.notes.empty()) return kept;
  std::uint32_t noted = plan.result.notes.front().copies_min;
  for (const LayerNotes& note : plan.result.notes) noted = std::min(noted, note.copies_min);
  return noted == 0 ? kept : noted;
}

void AppendGpu(std::string* out, const Device& gpu) {
  if (gpu.alive && gpu.speed == 1) {
    *out += std::to_string(gpu.slots);
    return;
  }
  *out += "{\"slots\":" + std::to_string(gpu.slots);
  if (!gpu.alive) *out += ",\"alive\":false";
  if (gpu.speed != 1) {
    *out += ",\"speed\":";
    json::AppendReal(out, gpu.speed);
  }
  *out += '}';
}

}  // namespace

std::string ClusterText(const Cluster& cluster) {
  std::string out = "{\"expert_bytes\":" + std::to_string(cluster.expert_bytes) +
                    ",\"param_bytes\":" + std::to_string(cluster.param_bytes);
  std::string rates;
  for (const auto& [name, rate] :
       {std::pair("gpu", cluster.device_bytes_per_s), std::pair("node", cluster.node_bytes_per_s),
        std::pair("rack", cluster.rack_bytes_per_s)}) {
    if (rate <= 0) continue;
    rates += rates.empty() ? "\"" : ",\"";
    rates += name;
    rates += "\":";
    json::AppendReal(&rates, rate);
  }
  if (!rates.empty()) out += ",\"bandwidth\":{" + rates + "}";
  out += ",\"nodes\":[";
  for (std::uint32_t n = 0; n < cluster.node_count(); ++n) {
    const Node& node = cluster.nodes[n];
    if (n > 0) out += ',';
    out += "{\"name\":";
    json::AppendString(&out, node.name);
    out += ",\"rack\":";
    json::AppendString(&out, cluster.racks[node.rack]);
    if (!node.alive) out += ",\"alive\":false";
    AppendMember(&out, "gpus");
    out += '[';
    for (std::uint32_t d = cluster.device_first(n); d < cluster.device_first(n + 1); ++d) {
      const Device& gpu = cluster.devices[d];
      if (d > cluster.device_first(n)) out += ',';
      AppendGpu(&out, gpu);
    }
    out += "]}";
  }
  return out + "]}";
}

std::string PlanText(const VerifiedPlan& plan, const TokenCounts& loads, const Cluster& cluster,
                     FailureUnit unit) {
  std::string out = "{\"schema\":\"shardwright-moe-plan\",\"schema_version\":1";
  AppendMember(&out, exec::kTextSum);
  json::AppendString(&out, exec::NoTextSum());
  AppendMember(&out, "strategy");
  json::AppendString(&out, plan.strategy);
  out += ",\n\"nodes\":" + std::to_string(cluster.node_count());
  if (const auto slots = SlotsPerNode(cluster)) {
    out += ",\"slots_per_node\":" + std::to_string(*slots);
  }
  out += ",\"fault_threshold\":" + std::to_string(ThresholdOf(plan));
  out += ",\"failure_unit\":";
  out += unit == FailureUnit::kRack ? "\"rack\"" : "\"node\"";
  out += ",\"experts\":" + std::to_string(loads.experts);
  if (loads.iteration) out += ",\"iteration\":" + std::to_string(*loads.iteration);
  out += ",\n\"cluster\":" + ClusterText(cluster) + ",\n\"layers\":[\n";
  for (std::uint32_t l = 0; l < loads.layers; ++l) {
    AppendLayer(&out, plan, loads, cluster, l);
    out += l + 1 < loads.layers ? ",\n" : "\n";
  }
  out += "],\n\"survives\":" + std::to_string(plan.model_recovery.certain) + ",\"model_recovery\":";
  AppendRecovery(&out, plan.model_recovery);
  AppendMember(&out, "model_recovery_method");
  json::AppendString(&out, Name(plan.model_recovery.method));
  for (const auto& [name, value] : {std::pair("imbalance", plan.metrics.imbalance_mean),
                                    std::pair("bound", plan.metrics.bound_mean),
                                    std::pair("lp_bound", plan.metrics.lp_bound_mean)}) {
    AppendMember(&out, name);
    json::AppendReal(&out, value);
  }
  if (plan.migration) AppendMigration(&out, *plan.migration, loads);
  return exec::WithTextSum(out + "}\n");
}

}  // namespace shardwright::placement
