#include "common/pec.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <ostream>

#include "base/bytes.h"
#include "cli/text.h"
#include "common/ucp.h"
#include "exec/integrity.h"
#include "pec/store.h"

namespace shardwright::apps {
namespace {

using Json = nlohmann::json;
using Column = cli::Table::Column;
constexpr auto kRight = cli::Table::Align::kRight;

std::string Percent(double fraction) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3f %%", 100 * fraction);
  return text;
}

/// Bytes of each rank; of many ranks their number.
std::string Shares(const std::vector<std::uint64_t>& bytes) {
  constexpr std::size_t kListed = 4;
  if (bytes.size() > kListed) return std::to_string(bytes.size());
  std::string text;
  for (const std::uint64_t one : bytes) text += (text.empty() ? "" : " + ") + FormatBytes(one);
  return text;
}

Json LayersJson(const pec::Selection& selection) {
  Json layers = Json::object();
  for (std::size_t m = 0; m < selection.size(); ++m) layers[std::to_string(m)] = selection[m];
  return layers;
}

std::string Iterations(const std::vector<std::uint64_t>& list) {
  std::string text;
  for (const std::uint64_t one : list) text += (text.empty() ? "" : ", ") + std::to_string(one);
  return text;
}

Json ModuleJson(const pec::RestoredModule& module) {
  Json json = {{"module", module.name},
               {"version", module.version},
               {"source", pec::Name(module.source)},
               {"expert", module.id.is_expert()}};
  for (const pec::Component component : pec::kAllComponents) {
    const auto& part = module.parts[static_cast<std::size_t>(component)];
    if (!part) continue;
    Json one = {{"version", part->version}, {"bytes", part->bytes}};
    if (part->rounded_from_master) one["rounded_from"] = "master";
    json[std::string(Name(component))] = std::move(one);
  }
  return json;
}

Json DynamicKJson(const pec::DynamicKReport& report) {
  const pec::DynamicK& now = report.state;
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

/// K now, what it has spent of its share, all K of the limit, and faults that are left.
void ShowDynamicK(cli::Context& context, const pec::DynamicKReport& report) {
  const pec::DynamicK& now = report.state;
  std::string covered = "unknown";
  if (report.fault_plt) {
    covered = report.faults_covered ? std::to_string(*report.faults_covered) : "any";
  }
  cli::Table table({Column{"DYNAMIC K", kRight}, Column{"SPENT", kRight}, Column{"SHARE", kRight},
                    Column{"TOTAL", kRight}, Column{"LIMIT", kRight},
                    Column{"FAULTS COVERED", kRight}});
  table.AddRow({std::to_string(now.k) + " of " + std::to_string(now.experts), Percent(now.spent),
                Percent(now.share()), Percent(now.total), Percent(now.limit), covered});
  context.out() << "\n";
  context.Print(table);
}

Json LossJson(const pec::RestoreLoss& loss) {
  return {{"lost", loss.fault.layer},
          {"lost_by_expert", loss.fault.lost},
          {"faults", loss.faults},
          {"fault_plt", loss.plt},
          {"plt", loss.run.plt},
          {"plt_limit", pec::kPltLimit},
          {"mlt_sum", loss.run.mlt_sum},
          {"mlt_avg", loss.run.mlt_avg},
          {"layers_without_tokens", loss.run.skipped},
          {"tokens_of_the_run", loss.run.observed ? "observed" : "known"}};
}

}  // namespace

std::string Ranges(std::vector<std::uint32_t> ids) {
  std::sort(ids.begin(), ids.end());
  std::string text;
  for (std::size_t i = 0; i < ids.size();) {
    std::size_t last = i;
    while (last + 1 < ids.size() && ids[last + 1] == ids[last] + 1) ++last;
    text += (text.empty() ? "" : ", ") + std::to_string(ids[i]);
    if (last > i) text += "-" + std::to_string(ids[last]);
    i = last + 1;
  }
  return text.empty() ? "none" : text;
}

std::vector<std::string> Split(const std::string& text, char at) {
  std::vector<std::string> parts;
  for (std::size_t first = 0; first <= text.size();) {
    const std::size_t last = std::min(text.find(at, first), text.size());
    parts.push_back(text.substr(first, last - first));
    first = last + 1;
  }
  return parts;
}

std::vector<std::string> Words(const std::vector<std::string>& values) {
  std::vector<std::string> words;
  for (const std::string& value : values) {
    for (std::string& word : Split(value, ',')) words.push_back(std::move(word));
  }
  return words;
}

Result<pec::KeptComponents> ParseKeep(const std::vector<std::string>& words) {
  pec::KeptComponents keep{};
  for (const std::string& word : Words(words)) {
    auto component = pec::ParseComponent(word);
    if (!component) return Within("--keep", std::move(component).error());
    keep[static_cast<std::size_t>(*component)] = true;
  }
  return keep;
}

void ShowSave(cli::Context& context, const pec::SaveReport& report, bool dry_run) {
  const pec::TwoLevelSelection& selection = report.selection;
  Json result = {{"iteration", report.iteration},
                 {"sequence", report.sequence},
                 {"dry_run", dry_run},
                 {"first", report.first},
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
  context.SetResult(std::move(result));
  std::ostream& out = context.out();
  const double share = report.full_bytes == 0 ? 0
                                              : static_cast<double>(report.bytes) /
                                                    static_cast<double>(report.full_bytes);
  out << "iteration " << report.iteration << ", checkpoint " << report.sequence << " of the store"
      << (report.first ? ", its first" : "") << "\n"
      << "modules   " << report.nonexpert_modules << " non-expert, "
      << pec::SizeOf(selection.persist) << " of " << report.modules - report.nonexpert_modules
      << " experts\n"
      << "bytes     " << FormatBytes(report.bytes) << " of " << FormatBytes(report.full_bytes)
      << " (" << Percent(share) << ")";
  if (!dry_run) {
    out << ", " << FormatBytes(report.written_bytes) << " written in " << report.blobs_written
        << " blobs, " << report.blobs_unchanged << " unchanged";
  }
  out << "\n";
  if (report.rank_bytes.size() > 1) {
    out << "ranks     " << Shares(report.rank_bytes) << ", at most "
        << FormatBytes(report.bottleneck_bytes) << " each, bound "
        << FormatBytes(report.bound_bytes) << "\n";
  }
  if (report.at_risk) {
    out << "at risk   " << report.at_risk->at_risk << " of " << report.at_risk->total
        << " unsaved tokens (" << Percent(report.at_risk->fraction()) << ")\n";
  }
  if (report.dynamic_k) ShowDynamicK(context, *report.dynamic_k);
  if (selection.persist.empty()) return;
  cli::Table table({Column{"LAYER", kRight}, Column{"EXPERTS", kRight}, Column{"SAVED", kRight},
                    Column{"WHICH", cli::Table::Align::kLeft, true}});
  for (std::size_t m = 0; m < selection.persist.size(); ++m) {
    table.AddRow({std::to_string(report.layer_id[m]), std::to_string(report.experts[m]),
                  std::to_string(selection.persist[m].size()), Ranges(selection.persist[m])});
  }
  out << "\n";
  context.Print(table);
}

Status ShowStore(cli::Context& context, const std::string& path) {
  SW_TRY_ASSIGN(const pec::Store store, pec::Store::Open(path));
  SW_TRY_ASSIGN(const std::vector<pec::StoredCheckpoint> checkpoints, store.List());
  SW_TRY_ASSIGN(const auto last, store.LastRecovery());
  const pec::StoreHead& head = store.head();
  Json list = Json::array();
  cli::Table table({Column{"CHECKPOINT", kRight}, Column{"ITERATION", kRight}, Column{"POLICY"},
                    Column{"K", kRight}, Column{"STALE", kRight}, Column{"OLDEST", kRight},
                    Column{"STATE"}});
  for (const pec::StoredCheckpoint& one : checkpoints) {
    const Result<pec::Manifest> read = store.ReadManifest(one);
    if (!read && store.IsGone(one)) continue;  // collected since it was listed
    if (!read) return tl::unexpected<Error>(read.error());
    const pec::Manifest& manifest = *read;
    std::uint64_t oldest = manifest.iteration;
    std::uint64_t stale = 0;
    std::uint64_t missing = 0;
    Json versions = Json::object();
    for (std::size_t i = 0; i < manifest.modules.size(); ++i) {
      std::uint64_t version = manifest.iteration;
      bool there = false;
      for (const auto& held : manifest.modules[i]) {
        if (!held) continue;
        there = true;
        version = std::min(version, held->version);
      }
      missing += there ? 0 : 1;
      if (!there) continue;
      stale += version < manifest.iteration ? 1 : 0;
      oldest = std::min(oldest, version);
      versions[manifest.names[i]] = version;
    }
    const auto& dynamic = manifest.state.dynamic_k;
    const std::string state = one.abandoned ? "abandoned" : "usable";
    table.AddRow(
        {std::to_string(one.sequence), std::to_string(one.iteration), manifest.policy,
         std::to_string(manifest.k_persist), std::to_string(stale), std::to_string(oldest),
         state + (missing > 0 ? ", " + std::to_string(missing) + " modules missing" : "")});
    list.push_back({{"sequence", one.sequence},
                    {"iteration", one.iteration},
                    {"abandoned", one.abandoned},
                    {"policy", manifest.policy},
                    {"k", manifest.k_snapshot},
                    {"k_persist", manifest.k_persist},
                    {"stale_modules", stale},
                    {"missing_modules", missing},
                    {"dynamic_k", dynamic ? DynamicKJson({*dynamic, {}, {}}) : Json(nullptr)},
                    {"modules", std::move(versions)}});
  }
  context.out() << "store of " << head.modules << " modules, " << head.experts.size()
                << " MoE layers, keeps " << pec::KeepText(head.keep) << " of every expert\n\n";
  context.Print(table);
  Json result = {{"fingerprint", exec::Hex(head.fingerprint)},
                 {"module_count", head.modules},
                 {"experts", head.experts},
                 {"keep", pec::KeepText(head.keep)},
                 {"checkpoints", std::move(list)},
                 {"recoveries", last ? last->sequence : 0}};
  SW_TRY_ASSIGN(const auto dynamic, pec::NewestDynamicK(store, checkpoints, last));
  if (dynamic) {
    const std::uint64_t newest = pec::NewestIteration(checkpoints);
    const pec::DynamicKReport now =
        pec::ReportOf(*dynamic, head.experts, pec::IntervalBefore(checkpoints, newest), newest);
    ShowDynamicK(context, now);
    result["dynamic_k"] = DynamicKJson(now);
  }
  context.SetResult(std::move(result));
  return {};
}

Status ShowCheck(cli::Context& context, const std::string& path, const pec::StoreCheck& check) {
  context.SetResult({{"checkpoints", check.checkpoints},
                     {"collected", check.collected},
                     {"blobs", check.blobs},
                     {"bytes", check.bytes},
                     {"damaged", check.damaged}});
  for (const std::string& line : check.damaged) context.out() << cli::Printable(line) << "\n";
  context.out() << check.checkpoints << " checkpoints, " << check.blobs << " blobs, "
                << FormatBytes(check.bytes) << ", " << check.damaged.size() << " damaged\n";
  if (check.collected > 0) {
    context.out() << check.collected << " checkpoints were collected meanwhile\n";
  }
  if (check.damaged.empty()) return {};
  return Fail(Errc::kMismatch, path + ": " + check.damaged.front());
}

void ShowCollected(cli::Context& context, const pec::Collected& collected, bool dry_run) {
  std::vector<std::uint64_t> kept;
  std::vector<std::uint64_t> removed;
  for (const auto& one : collected.kept) kept.push_back(one.iteration);
  for (const auto& one : collected.removed) removed.push_back(one.iteration);
  context.SetResult({{"dry_run", dry_run},
                     {"kept", kept},
                     {"removed", removed},
                     {"blobs_kept", collected.blobs_kept},
                     {"blobs_removed", collected.blobs_removed},
                     {"bytes_removed", collected.bytes_removed}});
  context.out() << "keeps    " << kept.size() << " checkpoints: " << Iterations(kept) << "\n"
                << (dry_run ? "would remove " : "removed  ") << removed.size() << " checkpoints"
                << (removed.empty() ? "" : ": " + Iterations(removed)) << ", "
                << collected.blobs_removed << " of "
                << collected.blobs_removed + collected.blobs_kept << " blobs, "
                << FormatBytes(collected.bytes_removed) << "\n";
}

void ShowRestore(cli::Context& context, const pec::RestoreReport& report) {
  if (report.empty) {
    context.SetResult({{"iteration", nullptr}, {"versions", Json::object()}, {"wrote", false}});
    context.out() << "no checkpoint yet\n";
    return;
  }
  Json modules = Json::array();
  Json versions = Json::object();
  std::map<std::uint64_t, std::vector<std::string>> by_version;
  std::size_t experts = 0;
  for (const pec::RestoredModule& module : report.modules) {
    modules.push_back(ModuleJson(module));
    by_version[module.version].push_back(module.name);
    // What is not named is at `iteration`: names of other modules may begin those of experts.
    if (!module.id.is_expert()) continue;
    versions[module.name] = module.version;
    ++experts;
  }
  Json convert = report.convert.totals.output_files > 0 ? ConversionJson(report.convert) : Json();
  context.SetResult({{"iteration", report.iteration},
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
                     {"damaged", report.damaged},
                     {"loss", report.loss ? LossJson(*report.loss) : Json(nullptr)},
                     {"dynamic_k", report.dynamic_k ? DynamicKJson(*report.dynamic_k) : Json()},
                     {"wrote", report.wrote},
                     {"conversion", std::move(convert)}});
  std::ostream& out = context.out();
  out << "iteration " << report.iteration << ", checkpoint " << report.sequence << " of the store, "
      << FormatBytes(report.storage_bytes) << " from storage, " << FormatBytes(report.memory_bytes)
      << " from memory, " << FormatBytes(report.peer_bytes) << " from peers\n"
      << "modules   " << report.modules.size() - experts << " non-expert, " << experts
      << " experts, " << report.stale_modules << " older than iteration " << report.iteration
      << "\n";
  for (std::size_t i = 0; i < report.lost_nodes.size(); ++i) {
    out << "lost node " << report.lost_nodes[i] << ": " << cli::Printable(report.lost_agents[i])
        << "\n";
  }
  if (report.restarted_modules > 0) {
    out << "restarted " << report.restarted_modules << " experts had no version\n";
  }
  if (!report.abandoned.empty()) {
    out << "abandoned iterations " << Iterations(report.abandoned) << "\n";
  }
  if (report.loss) {
    const pec::RestoreLoss& loss = *report.loss;
    out << "lost      PLT " << Percent(loss.run.plt) << " of limit " << Percent(pec::kPltLimit)
        << ", MLT " << Percent(loss.run.mlt_avg) << " on average, over " << loss.faults
        << (loss.faults == 1 ? " fault\n" : " faults\n");
  } else if (experts > 0) {
    out << "lost      unknown: the tokens were not counted\n";
  }
  if (report.dynamic_k) ShowDynamicK(context, *report.dynamic_k);
  if (report.stale_modules == 0) return;
  cli::Table table({Column{"MODULE", cli::Table::Align::kLeft, true}, Column{"VERSION", kRight},
                    Column{"BEHIND", kRight}, Column{"LOST TOKENS", kRight}, Column{"SOURCE"}});
  for (const pec::RestoredModule& module : report.modules) {
    if (module.version >= report.iteration) continue;
    std::string lost = "-";
    if (report.loss && module.id.is_expert()) {
      lost = std::to_string(report.loss->fault.lost[static_cast<std::size_t>(module.id.layer)]
                                                   [static_cast<std::size_t>(module.id.expert)]);
    }
    table.AddRow({module.name, std::to_string(module.version),
                  std::to_string(report.iteration - module.version), lost,
                  pec::Name(module.source)});
  }
  out << "\n";
  context.Print(table);
}

}  // namespace shardwright::apps
