// SPDX-License-Identifier: Apache-2.0
#include "partial/report/report_json.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "convert/describe.h"

namespace shardwright::partial {
namespace {

using Json = nlohmann::json;

Json LayersJson(const Selection& selection) {
  Json layers = Json::object();
  for (std::size_t m = 0; m < selection.size(); ++m) layers[std::to_string(m)] = selection[m];
  return layers;
}

Json ModuleJson(const RestoredModule& module) {
  Json json = {{"module", module.name},
               {"version", module.version},
               {"source", Name(module.source)},
               {"expert", module.id.is_expert()}};
  for (const Component component : kAllComponents) {
    const auto& part = module.parts[static_cast<std::size_t>(component)];
    if (!part) continue;
    Json one = {{"version", part->version}, {"bytes", part->bytes}};
    if (part->rounded_from_master) one["rounded_from"] = "master";
    json[std::string(Name(component))] = std::move(one);
  }
  if (module.replayed) {
    json["replayed"] = {{"from", module.replayed->version},
                        {"iterations", module.replayed->iterations},
                        {"bytes", module.replayed->bytes},
                        {"lost_tokens", 0}};
  }
  if (module.replayed_in_memory) {
    json["replayed_in_memory"] = {{"from", *module.replayed_in_memory}};
  }
  return json;
}

Json ReplayJson(const ReplayReport& report) {
  return {{"mode", Name(report.mode)},
          {"log", report.log},
          {"modules", report.modules},
          {"bytes", report.bytes},
          {"in_memory", report.in_memory},
          {"refused", report.refused},
          {"torn", report.torn}};
}

Json LossJson(const RestoreLoss& loss) {
  return {{"lost", loss.fault.layer},
          {"lost_by_expert", loss.fault.lost},
          {"faults", loss.faults},
          {"fault_plt", loss.plt},
          {"plt", loss.run.plt},
          {"plt_limit", kPltLimit},
          {"mlt_sum", loss.run.mlt_sum},
          {"mlt_avg", loss.run.mlt_avg},
          {"layers_without_tokens", loss.run.skipped},
          {"tokens_of_the_run", loss.run.observed ? "observed" : "known"}};
}

}  // namespace

Json SaveJson(const SaveReport& report, bool dry_run) {
  const TwoLevelSelection& selection = report.selection;
  Json result = {{"iteration", report.iteration},
                 {"sequence", report.sequence},
                 {"dry_run", dry_run},
                 {"first", report.first},
                 {"replaces", report.replaces == 0 ? Json(nullptr) : Json(report.replaces)},
                 {"modules", report.modules},
                 {"nonexpert_modules", report.nonexpert_modules},
                 {"experts", report.experts},
                 {"layers", LayersJson(selection.snapshot)},
                 {"persist", LayersJson(selection.persist)},
                 {"full_bytes", report.full_bytes},
                 {"bytes", report.bytes},
                 {"written_bytes", report.written_bytes},
                 {"text_bytes", report.text_bytes},
                 {"blobs", report.blobs},
                 {"blobs_written", report.blobs_written},
                 {"blobs_unchanged", report.blobs_unchanged},
                 {"blobs_restored", report.blobs_restored},
                 {"rank_bytes", report.rank_bytes},
                 {"bottleneck_bytes", report.bottleneck_bytes},
                 {"bound_bytes", report.bound_bytes},
                 {"cut_ep", report.cut_ep == 0 ? Json(nullptr) : Json(report.cut_ep)},
                 {"members_verified", report.members_verified},
                 {"members_in_part", report.members_in_part}};
  if (report.at_risk) {
    result["tokens_at_risk"] = {{"at_risk", report.at_risk->at_risk},
                                {"total", report.at_risk->total},
                                {"fraction", report.at_risk->fraction()}};
  }
  if (report.dynamic_k) result["dynamic_k"] = DynamicKJson(*report.dynamic_k);
  return result;
}

Json RestoreJson(const RestoreReport& report) {
  if (report.empty) {
    return {{"iteration", nullptr}, {"versions", Json::object()}, {"wrote", false}};
  }
  Json modules = Json::array();
  Json versions = Json::object();
  for (const RestoredModule& module : report.modules) {
    modules.push_back(ModuleJson(module));
    // Only experts: others are at `iteration`, and may have names that expert names start with.
    if (module.id.is_expert()) versions[module.name] = module.version;
  }
  const bool converted = report.convert.totals.output_files > 0;
  return {{"iteration", report.iteration},
          {"versions", std::move(versions)},
          {"sequence", report.sequence},
          {"tag", report.tag},
          {"modules", std::move(modules)},
          {"stale_modules", report.stale_modules},
          {"restarted_modules", report.restarted_modules},
          {"bytes",
           {{"memory", report.memory_bytes},
            {"peer", report.peer_bytes},
            {"storage", report.storage_bytes}}},
          {"lost_nodes", report.lost_nodes},
          {"lost_agents", report.lost_agents},
          {"abandoned", report.abandoned},
          {"recorded", report.recorded},
          {"damaged", report.damaged},
          {"replay", ReplayJson(report.replay)},
          {"loss", report.loss ? LossJson(*report.loss) : Json(nullptr)},
          {"dynamic_k", report.dynamic_k ? DynamicKJson(*report.dynamic_k) : Json()},
          {"wrote", report.wrote},
          {"conversion", converted ? convert::ConversionJson(report.convert) : Json()}};
}

Json CheckJson(const StoreCheck& check) {
  return {{"checkpoints", check.checkpoints},
          {"collected", check.collected},
          {"blobs", check.blobs},
          {"bytes", check.bytes},
          {"damaged", check.damaged}};
}

Json RepairJson(const StoreRepair& repair) {
  Json blobs = Json::array();
  for (const BlobRepair& blob : repair.blobs) {
    blobs.push_back({{"module", blob.module},
                     {"component", blob.component.empty() ? Json() : Json(blob.component)},
                     {"iteration", blob.iteration},
                     {"path", blob.path},
                     {"bytes", blob.bytes},
                     {"damage", blob.damage},
                     {"repaired", blob.repaired()},
                     {"reason", blob.repaired() ? Json() : Json(blob.reason)}});
  }
  Json json = CheckJson(repair.check);
  json["repair"] = {{"checkpoint", repair.checkpoint},
                    {"repaired", repair.repaired},
                    {"not_repaired", repair.blobs.size() - repair.repaired},
                    {"bytes_written", repair.written_bytes},
                    {"blobs", std::move(blobs)}};
  return json;
}

std::vector<std::uint64_t> IterationsOf(const std::vector<StoredCheckpoint>& checkpoints) {
  std::vector<std::uint64_t> iterations;
  iterations.reserve(checkpoints.size());
  for (const StoredCheckpoint& one : checkpoints) iterations.push_back(one.iteration);
  return iterations;
}

Json CollectedJson(const Collected& collected, const CollectedLog& log, bool dry_run) {
  return {{"dry_run", dry_run},
          {"kept", IterationsOf(collected.kept)},
          {"removed", IterationsOf(collected.removed)},
          {"blobs_kept", collected.blobs_kept},
          {"blobs_removed", collected.blobs_removed},
          {"bytes_removed", collected.bytes_removed},
          {"log",
           {{"through", collected.oldest_version},
            {"segments_kept", log.segments_kept},
            {"segments_removed", log.segments_removed},
            {"bytes_removed", log.bytes_removed},
            {"wrong", log.wrong.empty() ? Json(nullptr) : Json(log.wrong)}}}};
}

Json UndoneJson(const Undone& undone, bool confirmed) {
  return {{"confirmed", confirmed},          {"was_pending", undone.was_pending},
          {"resume", undone.resume},         {"newest", undone.newest},
          {"reinstated", undone.reinstated}, {"abandoned", undone.abandoned}};
}

Json AgentJson(const AgentStatus& status) {
  Json sent = Json::object();
  for (std::size_t i = 0; i < kSentKinds; ++i) sent[Name(static_cast<Sent>(i))] = status.sent[i];
  return {{"sent", std::move(sent)},
          {"sends_due", status.sends_due},
          {"snapshots", status.snapshots},
          {"snapshots_failed", status.snapshots_failed},
          {"snapshots_skipped", status.snapshots_skipped},
          {"persists", status.persists},
          {"persists_failed", status.persists_failed},
          {"snapshot_bytes", status.snapshot_bytes},
          {"snapshot_seconds", status.snapshot_seconds},
          {"newest", status.newest ? Json(*status.newest) : Json(nullptr)},
          {"persisted", status.persisted ? Json(*status.persisted) : Json(nullptr)}};
}

Json DynamicKJson(const DynamicKReport& report) {
  const DynamicK& now = report.state;
  return {{"k", now.k},
          {"experts", now.experts},
          {"mode", now.predict ? "predict" : "react"},
          {"levels", now.levels},
          {"limit", now.limit},
          {"share", now.share()},
          {"spent", now.spent},
          {"total", now.total},
          {"iterations", now.iterations > 0 ? Json(now.iterations) : Json(nullptr)},
          {"fault_plt", report.fault_plt ? Json(*report.fault_plt) : Json(nullptr)},
          {"faults_covered", report.faults_covered ? Json(*report.faults_covered) : Json(nullptr)}};
}

}  // namespace shardwright::partial
