// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "partial/planner/plan.h"
#include "support/base/bytes.h"
#include "support/base/text.h"
#include "support/text/table.h"
#include "support/text/text.h"

namespace shardwright::partial {
namespace {

using Column = text::Table::Column;
using text::kRight;
/// Maximum number of rows of a table. The JSON report has all rows.
constexpr std::size_t kRows = 64;

/// Formats a fraction for columns with the header "%".
std::string InPercent(double fraction) { return Fixed(100 * fraction, 1); }

std::string Seconds(double value) { return Fixed(value, 3) + " s"; }

std::string Of(std::uint64_t part, std::uint64_t all) {
  return all == 0 ? "-" : InPercent(static_cast<double>(part) / static_cast<double>(all));
}

std::uint64_t OptimizerOf(const ComponentBytes& bytes) { return bytes.master + bytes.moments; }

/// Returns the indices of the `kRows` rows with the largest keys, ascending.
std::vector<std::size_t> LargestRows(const std::vector<std::uint64_t>& keys) {
  std::vector<std::size_t> rows(keys.size());
  std::iota(rows.begin(), rows.end(), std::size_t{0});
  if (rows.size() <= kRows) return rows;
  std::stable_sort(rows.begin(), rows.end(),
                   [&](std::size_t a, std::size_t b) { return keys[a] > keys[b]; });
  rows.resize(kRows);
  std::sort(rows.begin(), rows.end());
  return rows;
}

/// Returns the note below a table that omits rows; empty if it shows all.
std::string RowsText(std::size_t count, const std::string& what) {
  if (count <= kRows) return "";
  return StrCat("the ", kRows, " largest of ", count, " ", what, "; --json has all\n");
}

std::string SizeText(const PlanAnswer& answer) {
  text::Table table({Column{"BYTES"}, Column{"WEIGHTS", kRight}, Column{"%", kRight},
                     Column{"OPTIMIZER", kRight}, Column{"%", kRight}, Column{"ALL", kRight},
                     Column{"%", kRight}});
  const std::uint64_t full = answer.full.bytes;
  const auto add = [&](const std::string& name, std::uint64_t weights, std::uint64_t optimizer) {
    table.AddRow({name, FormatBytes(weights), Of(weights, full), FormatBytes(optimizer),
                  Of(optimizer, full), FormatBytes(weights + optimizer),
                  Of(weights + optimizer, full)});
  };
  const auto add_size = [&](const std::string& name, const CheckpointSize& size) {
    add(name, size.expert.weights + size.nonexpert.weights,
        OptimizerOf(size.expert) + OptimizerOf(size.nonexpert));
  };
  add("experts", answer.full.expert.weights, OptimizerOf(answer.full.expert));
  add("other modules", answer.full.nonexpert.weights, OptimizerOf(answer.full.nonexpert));
  add_size("full checkpoint", answer.full);
  const PlannedCheckpoint& first = answer.checkpoints.front();
  if (first.persist) add_size("snapshot", first.snapshot.size);
  add_size(first.persist ? "persist" : "partial checkpoint", first.stored().size);
  return table.Render(0) +
         text::Legend("%: of a full checkpoint. OPTIMIZER: master weights and moments.");
}

std::string BudgetText(const BudgetAnswer& budget) {
  std::string text = StrCat("\nbudget    ", budget.layers.total,
                            " experts; tokens at risk afterwards: ", budget.layers.at_risk_tokens,
                            " with a budget per layer, ", budget.global.at_risk_tokens,
                            " with one for all layers\n");
  if (budget.stall_bytes > 0) {
    text += StrCat("stall     the non-expert part exceeds the budget by ",
                   FormatBytes(budget.stall_bytes), "\n");
  }
  return text;
}

/// Formats the bandwidths that an agent has measured; empty without an agent.
std::string MeasuredText(const PlanRequest& request) {
  if (!request.agent) return "";
  const auto rate = [](const std::optional<double>& bytes_per_s) {
    return bytes_per_s ? FormatBytes(static_cast<std::uint64_t>(*bytes_per_s)) + "/s" : "none";
  };
  return "measured by the agent, for all ranks: " + rate(request.agent->host_bytes_per_s) +
         " to host memory, " + rate(request.agent->network_bytes_per_s) + " to its slowest peer\n";
}

std::string LevelsText(const LevelBudgets& levels, const PlanRequest& request) {
  text::Table table({Column{"LEVEL"}, Column{"BUDGET", kRight}, Column{"RANKS", kRight},
                     Column{"EXPERT", kRight}, Column{"OTHER", kRight}, Column{"EXPERTS", kRight},
                     Column{"LARGEST", kRight}, Column{"TIME", kRight}, Column{"STALL", kRight}});
  const auto add = [&](const char* name, const LevelBudget& level) {
    table.AddRow({name, FormatBytes(level.rank_bytes), std::to_string(level.ranks),
                  FormatBytes(level.budget.expert_bytes), FormatBytes(level.budget.nonexpert_bytes),
                  std::to_string(level.budget.experts), FormatBytes(level.bottleneck_bytes),
                  Seconds(level.seconds()), Seconds(level.stall_s())});
  };
  add("local", levels.local);
  if (levels.remote) add("remote", levels.remote->level);
  return "\nbudgets of an iteration of " + Seconds(levels.local.iteration_s) + "\n" +
         MeasuredText(request) + table.Render(0) +
         text::Legend(
             "local: to host memory; remote: to other nodes. BUDGET: bandwidth x time, for each of "
             "the RANKS. EXPERT, OTHER: bytes to move for an expert, and for all other modules. "
             "EXPERTS: how many fit. LARGEST: bytes of the rank that moves most. TIME: of that "
             "rank. STALL: TIME above the iteration.");
}

std::string SelectionText(const PlanAnswer& answer) {
  const RemoteLevel* const remote =
      answer.levels && answer.levels->remote ? &*answer.levels->remote : nullptr;
  std::vector<Column> columns{Column{"CHECKPOINT", kRight}, Column{"LAYER", kRight},
                              Column{"EXPERTS"}, Column{remote != nullptr ? "SENT" : "PERSISTED"},
                              Column{"AT RISK %", kRight}};
  if (remote != nullptr) columns.push_back(Column{"UNSENT %", kRight});
  text::Table table(columns);
  for (std::size_t t = 0; t < answer.checkpoints.size(); ++t) {
    const PlannedCheckpoint& one = answer.checkpoints[t];
    const Selection& second = remote != nullptr ? remote->sent[t].selected : one.stored().selection;
    for (std::size_t m = 0; m < answer.job.layer_id.size(); ++m) {
      const bool first = m == 0;
      std::vector<std::string> row{first ? std::to_string(t) : "",
                                   std::to_string(answer.job.layer_id[m]),
                                   text::Ranges(one.snapshot.selection[m]), text::Ranges(second[m]),
                                   first && one.risk ? InPercent(one.risk->fraction()) : ""};
      if (remote != nullptr) {
        const BudgetSelection& sent = remote->sent[t];
        row.push_back(first ? Of(sent.at_risk_tokens, sent.at_risk_tokens + sent.saved_tokens)
                            : "");
      }
      table.AddRow(row);
    }
  }
  return "\n" + table.Render(0) +
         text::Legend(remote != nullptr
                          ? "EXPERTS: copied to memory. SENT: of these, sent to other nodes. AT "
                            "RISK: unsaved tokens of all other experts. UNSENT: tokens that no "
                            "version on another node includes."
                          : "EXPERTS: copied to memory. PERSISTED: of these, written to "
                            "storage. AT RISK: unsaved tokens of all other experts.");
}

std::string RanksText(const PlannedLevel& level, const std::string& name) {
  const ShareComparison& shares = level.shares;
  const std::vector<std::uint64_t>& bytes = shares.adaptive.rank_bytes;
  text::Table table({Column{"RANK", kRight}, Column{"EXPERTS", kRight}, Column{"ADAPTIVE", kRight},
                     Column{"EQUAL", kRight}, Column{"UNSHARED", kRight}});
  for (const std::size_t r : LargestRows(bytes)) {
    table.AddRow({std::to_string(r), FormatBytes(shares.adaptive.expert_bytes[r]),
                  FormatBytes(bytes[r]), FormatBytes(shares.equal.rank_bytes[r]),
                  FormatBytes(shares.unshared[r])});
  }
  return "\nshares of checkpoint 0, " + name + "\n" + table.Render(0) +
         RowsText(bytes.size(), "ranks");
}

std::string BottlenecksText(const PlanAnswer& answer) {
  text::Table table({Column{"CHECKPOINT", kRight}, Column{"LEVEL"}, Column{"ADAPTIVE", kRight},
                     Column{"EQUAL", kRight}, Column{"UNSHARED", kRight}, Column{"IDEAL", kRight},
                     Column{"BOUND", kRight}, Column{"LESS %", kRight}});
  const auto add = [&](std::size_t t, const char* name, const PlannedLevel& level) {
    const ShareComparison& s = level.shares;
    const double less = s.unshared_bottleneck == 0
                            ? 0
                            : 1 - static_cast<double>(s.adaptive.bottleneck) /
                                      static_cast<double>(s.unshared_bottleneck);
    table.AddRow({std::to_string(t), name, FormatBytes(s.adaptive.bottleneck),
                  FormatBytes(s.equal.bottleneck), FormatBytes(s.unshared_bottleneck),
                  FormatBytes(s.adaptive.ideal), FormatBytes(s.adaptive.bound), InPercent(less)});
  };
  for (std::size_t t = 0; t < answer.checkpoints.size(); ++t) {
    add(t, "persist", answer.checkpoints[t].stored());
    if (answer.checkpoints[t].persist) add(t, "snapshot", answer.checkpoints[t].snapshot);
  }
  std::string text = "\nlargest shares\n" + table.Render(0);
  if (answer.uneven) {
    text += "the experts are " + std::string(*answer.uneven ? "not " : "") +
            "spread evenly; shares repeat after " + Plural(*answer.phases, "checkpoint") + "\n";
  }
  return text +
         text::Legend(
             "Bytes of one rank. EXPERTS: its selected experts. ADAPTIVE: other modules go to "
             "ranks with few expert bytes. EQUAL: without regard to expert bytes. UNSHARED: "
             "nothing is divided. IDEAL: all bytes / ranks. BOUND: least possible. LESS: "
             "ADAPTIVE below UNSHARED.");
}

std::string CopiesText(const CopiesAnswer& copies, std::uint64_t asked) {
  const ReplicaPlan& plan = copies.plan;
  std::string text = "\ncopies    " + std::to_string(plan.replicas) + " of each worker";
  if (plan.clamped) {
    text += StrCat(" (requested: ", asked, "; there are no more workers)");
  }
  text += ": " + std::to_string(plan.cheap) + " within a stage, " + std::to_string(plan.costly) +
          " outside\nto send   " + FormatBytes(copies.all_bytes) + " in all";
  if (copies.longest_s > 0) text += ", at most " + Seconds(copies.longest_s) + " for a worker";
  text += "\n";
  if (!plan.incomplete.empty()) {
    text += "not placed: workers " + text::Ranges(plan.incomplete) +
            " have fewer copies, because there are too few nodes\n";
  }
  text::Table table({Column{"WORKER", kRight}, Column{"STAGE", kRight}, Column{"NODE", kRight},
                     Column{"COPIES ON"}, Column{"HOLDS", kRight}, Column{"SENDS", kRight},
                     Column{"RECEIVES", kRight}});
  for (const std::size_t i : LargestRows(copies.sends)) {
    std::string holders;
    for (const std::uint32_t holder : plan.holders[i]) {
      holders += (holders.empty() ? "" : ", ") + std::to_string(holder);
    }
    table.AddRow({std::to_string(i), std::to_string(copies.grid.stage[i]),
                  std::to_string(copies.grid.node[i]), holders.empty() ? "none" : holders,
                  std::to_string(plan.load[i]), FormatBytes(copies.sends[i]),
                  FormatBytes(copies.receives[i])});
  }
  return text + "\n" + table.Render(0) + RowsText(copies.sends.size(), "workers") +
         text::Legend(
             "COPIES ON: workers with a copy of this worker's part of a snapshot. HOLDS: copies "
             "of other workers on this one.");
}

std::string GradientsText(const std::vector<GradientAnswer>& list) {
  text::Table table({Column{"ITERATION", kRight}, Column{"GRADIENTS", kRight},
                     Column{"STATES", kRight}, Column{"SENT", kRight}, Column{"STATE ONLY", kRight},
                     Column{"FACTOR", kRight}, Column{"WINDOW", kRight}});
  for (const GradientAnswer& one : list) {
    const std::uint64_t bytes = one.bytes();
    table.AddRow(
        {std::to_string(one.plan.iteration), std::to_string(SizeOf(one.plan.gradients)),
         std::to_string(SizeOf(one.plan.full)), FormatBytes(bytes), FormatBytes(one.state_bytes),
         bytes == 0 ? "-"
                    : Fixed(static_cast<double>(one.state_bytes) / static_cast<double>(bytes), 2),
         std::to_string(one.window)});
  }
  std::string text = "\ngradients instead of state\n" + table.Render(0) +
                     text::Legend(
                         "GRADIENTS, STATES: experts sent as a gradient, and in full. SENT: "
                         "their bytes. STATE ONLY: bytes without gradients. FACTOR: STATE ONLY / "
                         "SENT. WINDOW: iterations in which all experts were sent in full.");
  if (const std::uint64_t over = list.back().plan.over_bytes; over > 0) {
    text += "the last iteration exceeds the budget by " + FormatBytes(over) + "\n";
  }
  return text;
}

std::string LogText(const PlanAnswer& answer) {
  const LogAnswer& log = *answer.log;
  const std::uint64_t interval = answer.request.interval;
  return StrCat(
      "\ngradients ", FormatBytes(log.bytes), " per iteration, ", FormatBytes(log.rank_bytes),
      " per rank; with the checkpoint, ", FormatBytes(log.interval_bytes), " in ",
      Plural(interval, "iteration"), "\nwindow    ", log.window,
      " iterations in which every expert is saved once\nfull      a full checkpoint writes ",
      FormatBytes(answer.full.bytes),
      log.pays_up_to == 0 ? "; this is always less\n"
                          : StrCat("; this is less at intervals above ",
                                   Plural(log.pays_up_to, "iteration"), "\n"));
}

std::string FillText(const std::string& name, const BubblePlan& plan) {
  return name + Seconds(plan.snapshot_s) + ": " + FormatBytes(plan.in_bubble) + " in the bubble, " +
         FormatBytes(plan.outside) + " during computation\n";
}

std::string BubblesText(const BubblesAnswer& bubbles) {
  const BubbleTimes& any = bubbles.stage.front();
  std::string text = "\npipeline  an iteration takes " + Seconds(any.iteration_s) +
                     ", each stage idles " + Seconds(any.bubble_s) + "\n";
  text += FillText("snapshot  rank " + std::to_string(bubbles.rank) + " needs ", bubbles.snapshot);
  if (bubbles.copies) text += FillText("copies    the busiest worker needs ", *bubbles.copies);
  text::Table stages({Column{"STAGE", kRight}, Column{"BEFORE", kRight}, Column{"BETWEEN", kRight},
                      Column{"AFTER", kRight}});
  for (std::size_t i = 0; i < bubbles.stage.size(); ++i) {
    const BubbleTimes& times = bubbles.stage[i];
    stages.AddRow({std::to_string(i), Seconds(times.before_s), Seconds(times.between_s),
                   Seconds(times.after_s)});
  }
  text::Table modules(
      {Column{"MODULE"}, Column{"IN THE BUBBLE", kRight}, Column{"OUTSIDE", kRight}});
  for (const std::size_t i : LargestRows(bubbles.bytes)) {
    modules.AddRow({text::Printable(bubbles.names[i]),
                    FormatBytes(bubbles.snapshot.module[i].in_bubble),
                    FormatBytes(bubbles.snapshot.module[i].outside)});
  }
  return text + "\n" + stages.Render(0) +
         text::Legend(
             "Idle time of a stage before its first forward pass, between its passes, and after "
             "its last backward pass. Together they are the pipeline bubble.") +
         "\n" + modules.Render(0) + RowsText(bubbles.names.size(), "modules");
}

std::string DynamicKText(const DynamicKAnswer& dynamic) {
  const std::string text = "\ndynamic K, lost tokens (PLT) up to " +
                           Fixed(100 * dynamic.state.limit, 2) + " %, " +
                           Fixed(100 * dynamic.state.share(), 4) + " % for each K\n";
  if (!dynamic.levels) return text + "K stays the same: faults cost nothing\n";
  text::Table table(
      {Column{"K", kRight}, Column{"A FAULT COSTS %", kRight}, Column{"FAULTS", kRight}});
  std::uint64_t faults = 0;
  for (const KLevel& level : *dynamic.levels) {
    table.AddRow(
        {std::to_string(level.k), Fixed(100 * level.plt, 5), std::to_string(level.faults)});
    faults += level.faults;
  }
  return text + table.Render(0) + "then all experts are saved; the limit covers " +
         Plural(faults, "fault") + "\n" +
         text::Legend(
             "K: experts of each layer that a checkpoint saves. A FAULT COSTS: expected lost "
             "tokens. FAULTS: faults until K doubles.");
}

}  // namespace

std::string PlanText(const PlanAnswer& answer) {
  const PlanRequest& request = answer.request;
  const PlannedCheckpoint& first = answer.checkpoints.front();
  std::string text = SizeText(answer);
  if (answer.budget) text += BudgetText(*answer.budget);
  if (answer.levels) text += LevelsText(*answer.levels, answer.request);
  text += SelectionText(answer);
  text += RanksText(first.stored(), first.persist ? "persist" : "both levels");
  if (first.persist) text += RanksText(first.snapshot, "snapshot");
  text += BottlenecksText(answer);
  if (answer.log) text += LogText(answer);
  if (answer.copies) text += CopiesText(*answer.copies, *request.copies);
  if (!answer.gradients.empty()) text += GradientsText(answer.gradients);
  if (answer.bubbles) text += BubblesText(*answer.bubbles);
  if (answer.extra_capacity) {
    text += StrCat("\nrecovery  ", request.lost_tokens, " lost tokens, made up with ",
                   Plural(answer.extra_capacity->extra, "token"),
                   " above capacity per iteration: ", answer.extra_capacity->iterations,
                   " iterations\n");
  }
  if (answer.wasted) {
    text += "\nfailure   wastes " + Seconds(answer.wasted->wasted_s) + ": checkpoint " +
            Seconds(answer.wasted->checkpoint_s) + ", retrieval " + Seconds(*request.retrieval_s) +
            ", half an interval\n";
  }
  if (answer.dynamic_k) text += DynamicKText(*answer.dynamic_k);
  return text;
}

}  // namespace shardwright::partial
