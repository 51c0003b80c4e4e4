// SPDX-License-Identifier: Apache-2.0
#include "common/pec.h"

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <ostream>

#include "partial/report/report_json.h"
#include "support/base/bytes.h"
#include "support/base/text.h"
#include "support/text/text.h"

namespace shardwright::apps {
namespace {

using Column = text::Table::Column;
using text::kRight;

/// Formats the bytes of each rank, or only the number of ranks if there are many.
std::string Shares(const std::vector<std::uint64_t>& bytes) {
  constexpr std::size_t kListed = 4;
  if (bytes.size() > kListed) return std::to_string(bytes.size());
  std::string text;
  for (const std::uint64_t one : bytes) text += (text.empty() ? "" : " + ") + FormatBytes(one);
  return text;
}

std::string Iterations(const std::vector<std::uint64_t>& list) {
  std::string text;
  for (const std::uint64_t one : list) text += (text.empty() ? "" : ", ") + std::to_string(one);
  return text;
}

/// Shows the current K, the budget it has spent, the total K of the limit, and faults left.
void ShowDynamicK(cli::Context& context, const partial::DynamicKReport& report) {
  const partial::DynamicK& now = report.state;
  std::string covered = "unknown";
  if (report.fault_plt) {
    covered = report.faults_covered ? std::to_string(*report.faults_covered) : "any";
  }
  text::Table table({Column{"DYNAMIC K", kRight}, Column{"SPENT", kRight}, Column{"SHARE", kRight},
                     Column{"TOTAL", kRight}, Column{"LIMIT", kRight},
                     Column{"FAULTS COVERED", kRight}});
  table.AddRow({std::to_string(now.k) + " of " + std::to_string(now.experts), Percent(now.spent, 3),
                Percent(now.share(), 3), Percent(now.total, 3), Percent(now.limit, 3), covered});
  context.out() << "\n";
  context.Print(table);
  context.out() << text::Legend(
      "SPENT: lost tokens (PLT) since K last grew. SHARE: limit of SPENT, above which K doubles. "
      "TOTAL: lost tokens in all. FAULTS COVERED: faults until every checkpoint is full.");
}

}  // namespace

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

void KeyFlags::AddTo(cli::App& app) {
  app.AddText("--key", &key, "key file of agents at HOST:PORT and their clients (pec-save keygen)",
              "FILE");
  app.FromEnvironment("--key", &key, "SHARDWRIGHT_AGENT_KEY");
  app.AddFlag(
      "--insecure", &insecure,
      "use HOST:PORT without a key: any process that reaches the port can read the training state");
  trust.AddTo(app);
}

Status KeyFlags::CheckRules(const cli::App& app, const std::vector<std::string>& addresses) {
  if (app.IsSet("--key") && insecure) {
    return Fail(Errc::kUsage, "--key cannot be combined with --insecure");
  }
  SW_TRY(trust.User());
  for (const std::string& text : addresses) {
    SW_TRY_ASSIGN(const os::Address address, os::ParseAddress(text));
    if (port_.empty() && !address.is_local()) port_ = text;
  }
  if (port_.empty() || insecure || !key.empty()) return {};
  return Fail(Errc::kUsage, port_,
              ": a port requires the key of the agents. Create one with pec-save keygen FILE "
              "and pass --key FILE, or pass --insecure to accept every client");
}

Result<std::shared_ptr<const os::TlsKey>> KeyFlags::Read(cli::Context& context,
                                                         bool later_ports) const {
  const bool later = later_ports && !insecure && !key.empty();
  if (port_.empty() && !later) return std::shared_ptr<const os::TlsKey>();
  if (!insecure) return context.comm().Agree(os::TlsKey::Read(key));
  context.sink().Warn(
      port_ +
      ": --insecure turns off authentication and encryption. Any process that reaches the port can "
      "read the training state and store copies there; use --key to prevent this");
  return std::shared_ptr<const os::TlsKey>();
}

Result<partial::KeptComponents> ParseKeep(const std::vector<std::string>& words) {
  partial::KeptComponents keep{};
  for (const std::string& word : Words(words)) {
    auto component = partial::ParseComponent(word);
    if (!component) return Within("--keep", std::move(component).error());
    keep[static_cast<std::size_t>(*component)] = true;
  }
  return keep;
}

namespace {

/// Returns the relation of a save to the store's other checkpoints, if it is a special one.
std::string SaveNote(const partial::SaveReport& report) {
  if (report.replaces != 0) {
    return "; replaces checkpoint " + std::to_string(report.replaces) + " of the same iteration";
  }
  return report.first && report.sequence == 1 ? ", its first" : "";
}

}  // namespace

void ShowSave(cli::Context& context, const partial::SaveReport& report, bool dry_run) {
  const partial::TwoLevelSelection& selection = report.selection;
  context.SetResult(partial::SaveJson(report, dry_run));
  std::ostream& out = context.out();
  const double share = report.full_bytes == 0 ? 0
                                              : static_cast<double>(report.bytes) /
                                                    static_cast<double>(report.full_bytes);
  out << "iteration " << report.iteration << ", checkpoint " << report.sequence << " of the store"
      << SaveNote(report) << "\n"
      << "modules   " << report.nonexpert_modules << " non-expert, "
      << partial::SizeOf(selection.persist) << " of " << report.modules - report.nonexpert_modules
      << " experts\n"
      << "bytes     " << FormatBytes(report.bytes) << " of " << FormatBytes(report.full_bytes)
      << " (" << Percent(share, 3) << ")";
  if (!dry_run) {
    out << ", " << FormatBytes(report.written_bytes) << " written in "
        << Plural(report.blobs_written, "blob") << ", " << report.blobs_unchanged << " unchanged";
  }
  out << "\n";
  if (report.rank_bytes.size() > 1) {
    out << "ranks     " << Shares(report.rank_bytes) << ", at most "
        << FormatBytes(report.bottleneck_bytes) << " each, bound "
        << FormatBytes(report.bound_bytes) << "\n";
  }
  if (report.at_risk) {
    out << "at risk   " << report.at_risk->at_risk << " of " << report.at_risk->total
        << " unsaved tokens (" << Percent(report.at_risk->fraction(), 3) << ")\n";
  }
  if (report.dynamic_k) ShowDynamicK(context, *report.dynamic_k);
  if (selection.persist.empty()) return;
  text::Table table({Column{"LAYER", kRight}, Column{"EXPERTS", kRight}, Column{"SAVED", kRight},
                     Column{"WHICH", text::Table::Align::kLeft, true}});
  for (std::size_t m = 0; m < selection.persist.size(); ++m) {
    table.AddRow({std::to_string(report.layer_id[m]), std::to_string(report.experts[m]),
                  std::to_string(selection.persist[m].size()), text::Ranges(selection.persist[m])});
  }
  out << "\n";
  context.Print(table);
}

namespace {

/// Returns the state of a checkpoint: usable, abandoned by a restart, or replaced by a later one.
std::string StateOf(const partial::ListedCheckpoint& one,
                    const std::vector<partial::ListedCheckpoint>& all) {
  if (!one.checkpoint.abandoned) return "usable";
  std::uint64_t later = one.checkpoint.sequence;
  for (const partial::ListedCheckpoint& other : all) {
    if (other.checkpoint.iteration != one.checkpoint.iteration) continue;
    later = std::max(later, other.checkpoint.sequence);
  }
  if (later == one.checkpoint.sequence) return "abandoned";
  return "replaced by " + std::to_string(later);
}

}  // namespace

void ShowListing(cli::Context& context, const partial::StoreListing& listing) {
  context.SetResult(partial::ListingJson(listing));
  text::Table table({Column{"CHECKPOINT", kRight}, Column{"ITERATION", kRight}, Column{"POLICY"},
                     Column{"K", kRight}, Column{"STALE", kRight}, Column{"OLDEST", kRight},
                     Column{"STATE"}});
  for (const partial::ListedCheckpoint& one : listing.checkpoints) {
    std::string state = StateOf(one, listing.checkpoints);
    if (one.missing_modules > 0) {
      state += ", " + Plural(one.missing_modules, "module") + " missing";
    }
    table.AddRow({std::to_string(one.checkpoint.sequence), std::to_string(one.checkpoint.iteration),
                  one.policy, std::to_string(one.k_persist), std::to_string(one.stale_modules),
                  std::to_string(one.oldest), state});
  }
  const partial::StoreHead& head = listing.head;
  context.out() << "store of " << Plural(head.modules, "module") << ", "
                << Plural(head.experts.size(), "MoE layer") << ", keeps "
                << partial::KeepText(head.keep) << " of every expert\n\n";
  context.Print(table);
  context.out() << text::Legend(
      "K: experts of each layer that a checkpoint saves. STALE: modules older than the "
      "checkpoint. OLDEST: iteration of the oldest module. STATE: a checkpoint is abandoned if "
      "training restarted from an older one, and replaced if its iteration was saved again.");
  if (listing.dynamic_k) ShowDynamicK(context, *listing.dynamic_k);
}

namespace {

/// \error kMismatch  something is damaged
Status ShowDamage(cli::Context& context, const std::string& path,
                  const partial::StoreCheck& check) {
  for (const std::string& line : check.damaged) context.out() << text::Printable(line) << "\n";
  context.out() << Plural(check.checkpoints, "checkpoint") << ", " << Plural(check.blobs, "blob")
                << ", " << FormatBytes(check.bytes) << ", " << check.damaged.size() << " damaged\n";
  if (check.collected > 0) {
    context.out() << "pec-save gc has deleted " << Plural(check.collected, "checkpoint")
                  << " meanwhile\n";
  }
  if (check.damaged.empty()) return {};
  return Fail(Errc::kMismatch, path, ": ", check.damaged.front());
}

}  // namespace

Status ShowCheck(cli::Context& context, const std::string& path, const partial::StoreCheck& check) {
  context.SetResult(partial::CheckJson(check));
  return ShowDamage(context, path, check);
}

Status ShowRepair(cli::Context& context, const std::string& path,
                  const partial::StoreRepair& repair) {
  context.SetResult(partial::RepairJson(repair));
  for (const partial::BlobRepair& blob : repair.blobs) {
    if (blob.repaired()) context.out() << "repaired " << text::Printable(blob.damage) << "\n";
  }
  context.out() << "repaired " << repair.repaired << " of " << Plural(repair.blobs.size(), "blob")
                << " from " << text::Printable(repair.checkpoint) << ", "
                << FormatBytes(repair.written_bytes) << " written\n";
  return ShowDamage(context, path, repair.check);
}

void ShowCollected(cli::Context& context, const partial::Collected& collected,
                   const partial::CollectedLog& log, bool dry_run) {
  const std::vector<std::uint64_t> kept = partial::IterationsOf(collected.kept);
  const std::vector<std::uint64_t> removed = partial::IterationsOf(collected.removed);
  context.SetResult(partial::CollectedJson(collected, log, dry_run));
  context.out() << "keeps    " << Plural(kept.size(), "checkpoint") << ": " << Iterations(kept)
                << "\n"
                << (dry_run ? "would remove " : "removed  ") << Plural(removed.size(), "checkpoint")
                << (removed.empty() ? "" : ": " + Iterations(removed)) << ", "
                << collected.blobs_removed << " of "
                << Plural(collected.blobs_removed + collected.blobs_kept, "blob") << ", "
                << FormatBytes(collected.bytes_removed) << "\n";
  if (!log.wrong.empty()) {
    context.sink().Warn("the gradient log is left unchanged: " + log.wrong);
  }
  const std::uint64_t segments = log.segments_removed + log.segments_kept;
  if (segments == 0) return;
  context.out() << "log      " << (dry_run ? "would remove " : "removed ") << log.segments_removed
                << " of " << Plural(segments, "segment") << ", " << FormatBytes(log.bytes_removed)
                << ": gradients up to iteration " << collected.oldest_version << "\n";
}

void ShowUndone(cli::Context& context, const partial::Undone& undone, bool confirmed) {
  context.SetResult(partial::UndoneJson(undone, confirmed));
  const std::string resume = std::to_string(undone.resume);
  if (confirmed) {
    context.out() << "recorded  a restart from iteration " << resume << "\n";
    if (!undone.abandoned.empty()) {
      context.out() << "abandoned iterations " << Iterations(undone.abandoned)
                    << "; pec-save undo reverts this\n";
    }
    return;
  }
  context.out() << (undone.was_pending ? "forgot    a restore of iteration "
                                       : "undid     the restart from iteration ")
                << resume << "\n";
  if (!undone.reinstated.empty()) {
    context.out() << "usable    again: iterations " << Iterations(undone.reinstated) << "\n";
  }
  context.out() << "newest    iteration " << undone.newest << ", which the next save continues\n";
}

namespace {

/// Shows the modules that are older than the restored iteration, or were replayed up to it.
void ShowOlder(cli::Context& context, const partial::RestoreReport& report) {
  text::Table table({Column{"MODULE", text::Table::Align::kLeft, true}, Column{"VERSION", kRight},
                     Column{"BEHIND", kRight}, Column{"LOST TOKENS", kRight}, Column{"SOURCE"}});
  bool replayed = false;
  bool none = false;
  bool uncounted = false;
  for (const partial::RestoredModule& module : report.modules) {
    if (module.replayed) {
      replayed = true;
      table.AddRow({module.name, std::to_string(module.version), "0", "0",
                    "iteration " + std::to_string(module.replayed->version) + " + " +
                        Plural(module.replayed->iterations, "step") + ", " +
                        FormatBytes(module.replayed->bytes)});
      continue;
    }
    if (module.version >= report.iteration) continue;
    std::string lost = "-";
    if (report.loss && module.id.is_expert()) {
      lost = std::to_string(report.loss->fault.lost[static_cast<std::size_t>(module.id.layer)]
                                                   [static_cast<std::size_t>(module.id.expert)]);
    }
    none = none || lost == "0";
    uncounted = uncounted || lost == "-";
    table.AddRow({module.name, std::to_string(module.version),
                  std::to_string(report.iteration - module.version), lost,
                  partial::Name(module.source)});
  }
  context.out() << "\n";
  context.Print(table);
  std::string meaning =
      "VERSION: iteration of the restored module. BEHIND: iterations that it is older than the "
      "checkpoint. LOST TOKENS: tokens of these iterations.";
  if (none) {
    meaning += " 0: the expert got no tokens in them, or an earlier restore has counted them.";
  }
  if (replayed) meaning += " 0 where SOURCE has steps: the steps were replayed.";
  if (uncounted) meaning += " -: not counted.";
  context.out() << text::Legend(meaning);
}

}  // namespace

void ShowRestore(cli::Context& context, const partial::RestoreReport& report) {
  context.SetResult(partial::RestoreJson(report));
  if (report.empty) {
    context.out() << "no checkpoint yet\n";
    return;
  }
  const auto experts = static_cast<std::size_t>(
      std::count_if(report.modules.begin(), report.modules.end(),
                    [](const partial::RestoredModule& module) { return module.id.is_expert(); }));
  std::ostream& out = context.out();
  out << "iteration " << report.iteration << ", checkpoint " << report.sequence << " of the store, "
      << FormatBytes(report.storage_bytes) << " from storage, " << FormatBytes(report.memory_bytes)
      << " from memory, " << FormatBytes(report.peer_bytes) << " from peers\n"
      << "modules   " << report.modules.size() - experts << " non-expert, " << experts
      << " experts, " << report.stale_modules << " older than iteration " << report.iteration
      << "\n";
  if (report.replay.modules > 0) {
    out << "replayed  " << Plural(report.replay.modules, "module") << " to iteration "
        << report.iteration << " out of " << FormatBytes(report.replay.bytes)
        << " of gradients, 0 tokens lost there\n";
  }
  if (report.replay.in_memory > 0) {
    out << "replayed  " << Plural(report.replay.in_memory, "module")
        << " by agents, in their memory, before\n";
  }
  for (std::size_t i = 0; i < report.lost_nodes.size(); ++i) {
    out << "lost node " << report.lost_nodes[i] << ": " << text::Printable(report.lost_agents[i])
        << "\n";
  }
  if (report.restarted_modules > 0) {
    out << "restarted " << Plural(report.restarted_modules, "expert") << " without a version\n";
  }
  if (!report.abandoned.empty()) {
    out << (report.recorded ? "abandoned" : "newer    ") << " iterations "
        << Iterations(report.abandoned) << "\n";
  }
  if (report.loss) {
    const partial::RestoreLoss& loss = *report.loss;
    out << "lost      " << Percent(loss.run.plt, 3) << " of the tokens over "
        << Plural(loss.faults, "fault") << ", as the mean over the layers (PLT); limit "
        << Percent(partial::kPltLimit, 3) << "\n          " << Percent(loss.run.mlt_sum, 3)
        << " as the sum over the layers (MLT)\n";
  } else if (experts > 0) {
    out << "lost      unknown: the tokens were not counted\n";
  }
  if (report.dynamic_k) ShowDynamicK(context, *report.dynamic_k);
  if (report.stale_modules > 0 || report.replay.modules > 0) ShowOlder(context, report);
}

}  // namespace shardwright::apps
