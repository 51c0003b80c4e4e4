// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>
#include <vector>

#include "partial/planner/simulation.h"
#include "support/base/bytes.h"
#include "support/base/text.h"
#include "support/text/table.h"

namespace shardwright::partial {
namespace {

using Column = text::Table::Column;
using text::kRight;

std::string RowsTable(const std::vector<SimulationRow>& rows) {
  text::Table table({Column{"POLICY"}, Column{"K", kRight}, Column{"WRITTEN", kRight},
                     Column{"LARGEST", kRight}, Column{"BOUND", kRight}, Column{"PLT %", kRight},
                     Column{"MLT %", kRight}, Column{"RISK %", kRight}, Column{"STALL s", kRight},
                     Column{"COST s", kRight}});
  for (const SimulationRow& row : rows) {
    table.AddRow({PolicyText(row), LevelsText(row), FormatBytes(row.persist_bytes),
                  FormatBytes(row.bottleneck_bytes), FormatBytes(row.bound_bytes),
                  Fixed(100 * row.loss.plt, 3), Fixed(100 * row.loss.mlt_sum, 2),
                  Fixed(100 * row.risk_mean, 2), Fixed(row.stall_s, 3), Fixed(row.overhead_s, 1)});
  }
  return table.Render(0);
}

bool Replays(const SimulationRow& row) { return row.policy.policy == Policy::kReplay; }

/// Formats state and gradient bytes per iteration, memory and restart times as a table. It compares
/// gradient rows with the sequential and full ones. Returns "" if there are no gradient rows.
std::string ReplayTable(const Simulation& simulation) {
  const std::vector<SimulationRow>& rows = simulation.rows;
  if (std::ranges::none_of(rows, Replays)) return "";
  text::Table table({Column{"POLICY"}, Column{"K", kRight}, Column{"STATE/IT", kRight},
                     Column{"LOG/IT", kRight}, Column{"STALL/IT s", kRight},
                     Column{"MEMORY", kRight}, Column{"WINDOW", kRight},
                     Column{"RECOVERY s", kRight}});
  const std::uint64_t run = simulation.input.tokens.size() + rows.front().replayed_iterations;
  bool computed = false;
  for (const SimulationRow& row : rows) {
    const Policy policy = row.policy.policy;
    if (!Replays(row) && policy != Policy::kSequential && policy != Policy::kFull) continue;
    computed = computed || row.policy.rule.has_value();
    const bool replays = Replays(row);
    table.AddRow({PolicyText(row) + (row.policy.rule ? " *" : ""), LevelsText(row),
                  FormatBytes(row.persist_bytes / run),
                  replays ? FormatBytes(row.log_bytes / run) : "-",
                  replays ? Fixed(row.log_stall_s, 3) : "-", FormatBytes(row.memory_bytes),
                  replays ? std::to_string(row.window) : "-",
                  row.recovery_s ? Fixed(*row.recovery_s, 1) : "-"});
  }
  std::string text =
      "\n" + table.Render(0) +
      "\nSTATE, LOG  bytes per iteration for checkpoints and for gradients\n"
      "STALL  time per iteration to copy gradients\n"
      "MEMORY  peak of all nodes together; WINDOW  iterations in which every expert was saved\n"
      "RECOVERY  longest restart, with its replay\n";
  if (computed) {
    text +=
        "* computed only, for gradients as large as weights; no command runs this "
        "(docs/pec-planning.md, 9.4)\n";
  }
  return text;
}

/// Describes how dynamic K grew and how many more faults its budget covers.
std::string DynamicText(const DynamicRun& dynamic) {
  std::string text = "dynamic K " + std::to_string(dynamic.k.front().k);
  for (std::size_t i = 1; i < dynamic.k.size(); ++i) {
    text += ", " + std::to_string(dynamic.k[i].k) + " after iteration " +
            std::to_string(dynamic.k[i].iteration);
  }
  text += "; lost " + Fixed(100 * dynamic.state.total, 3) + " of " +
          Fixed(100 * dynamic.state.limit, 3) + " %, covers ";
  if (!dynamic.faults_covered) return text + "any number of faults\n";
  return text + Plural(*dynamic.faults_covered, "more fault") + "\n";
}

}  // namespace

std::string SimulationText(const Simulation& simulation) {
  const Job& job = simulation.job;
  const std::vector<SimulationRow>& rows = simulation.rows;
  std::string text =
      "run       " + Plural(simulation.input.tokens.size(), "iteration") + ", " +
      Plural(job.layer_id.size(), "MoE layer") + " of " + Plural(job.experts().front(), "expert") +
      ", " + Plural(rows.front().checkpoints, "checkpoint") + ", " +
      Plural(simulation.input.faults.size(), "fault") + "\njob       " +
      FormatBytes(simulation.full_bytes) + " of state, " +
      Plural(job.ranks.dp, "data-parallel rank") + ", " + std::to_string(job.map.ep) +
      " of them expert-parallel, " + Plural(job.nodes(), "node") + "\nrepeated  " +
      Plural(rows.front().replayed_iterations, "iteration") + " after faults\n\n" +
      RowsTable(rows) +
      "\nWRITTEN  bytes of all checkpoints\n"
      "LARGEST  largest share of a rank in a checkpoint; BOUND  its lower bound\n"
      "PLT  share of lost tokens, mean over layers; MLT  sum over layers, may exceed 100\n"
      "RISK  mean share of unsaved tokens after a checkpoint\n"
      "STALL  stall of the longest snapshot\n"
      "COST  time of all stalls, restarts and repeated work\n" +
      ReplayTable(simulation) + "\n";
  if (!job.no_replay.empty()) text += "no row gradient-log: " + job.no_replay + "\n";
  for (const SimulationRow& row : rows) {
    if (row.dynamic) text += DynamicText(*row.dynamic);
  }
  if (!simulation.best) return text + "no recommendation: " + simulation.no_best + "\n";
  return text + "least cost with PLT up to " + Fixed(100 * simulation.plt_limit, 2) +
         " %: " + RowText(rows[*simulation.best]) + "\n";
}

}  // namespace shardwright::partial
