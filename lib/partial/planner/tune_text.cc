// SPDX-License-Identifier: Apache-2.0
#include <string>
#include <vector>

#include "partial/planner/tune.h"
#include "support/base/bytes.h"
#include "support/base/text.h"
#include "support/text/table.h"

namespace shardwright::partial {
namespace {

using Column = text::Table::Column;
using text::kRight;

std::string NumbersTable(const Tuning& tuning) {
  std::vector<Column> columns = {Column{"NUMBER"}, Column{"EQ"}};
  std::vector<const TunedNumbers*> all;
  if (tuning.chosen.config.plt_in_limit) {
    columns.push_back(Column{"CHOSEN", kRight});
    all.push_back(&tuning.chosen);
  }
  columns.push_back(Column{"FULL", kRight});
  all.push_back(&tuning.full);
  if (tuning.replay) {
    columns.push_back(Column{"REPLAY", kRight});
    all.push_back(&tuning.replay->numbers);
  }
  const std::size_t replays = tuning.replay ? columns.size() - 1 : 0;
  if (tuning.gemini) {
    columns.push_back(Column{"GEMINI", kRight});
    all.push_back(&*tuning.gemini);
  }
  columns.push_back(Column{"CHECKFREQ", kRight});
  all.push_back(&tuning.checkfreq);
  columns.push_back(Column{"BLOCKING", kRight});
  all.push_back(&tuning.blocking);
  text::Table table(columns);
  const auto add = [&](const char* what, const char* eq, const auto& of) {
    std::vector<std::string> row = {what, eq};
    for (const TunedNumbers* const one : all) row.push_back(of(*one));
    table.AddRow(row);
  };
  const auto seconds = [](double value) { return Fixed(value, 3) + " s"; };
  const auto percent = [](double value) { return Fixed(100 * value, 3) + " %"; };
  // Adds a row for a number that only a lossless run has.
  const auto add_replay = [&](const char* what, const std::string& text) {
    if (!tuning.replay) return;
    std::vector<std::string> row = {what, ""};
    row.resize(columns.size(), "-");
    row[replays] = text;
    table.AddRow(row);
  };
  add("K of a snapshot", "",
      [](const TunedNumbers& n) { return std::to_string(n.config.k_snapshot); });
  add("K of a persist", "",
      [](const TunedNumbers& n) { return std::to_string(n.config.k_persist); });
  add("iterations between", "",
      [](const TunedNumbers& n) { return std::to_string(n.config.interval); });
  add("checkpoint", "5, 6", [](const TunedNumbers& n) { return FormatBytes(n.persist.bytes); });
  add("share of full", "6", [&](const TunedNumbers& n) { return percent(n.persist.ratio()); });
  add_replay("gradients copied", FormatBytes(tuning.input.log_bytes) + "/it");
  add("snapshot of a rank", "8, 9",
      [](const TunedNumbers& n) { return FormatBytes(n.snapshot_rank_bytes); });
  add("persist of a rank", "8, 9",
      [](const TunedNumbers& n) { return FormatBytes(n.persist_rank_bytes); });
  add("snapshot takes", "10", [&](const TunedNumbers& n) { return seconds(n.config.snapshot_s); });
  add("persist takes", "", [&](const TunedNumbers& n) { return seconds(n.config.persist_s); });
  add("stall", "10", [&](const TunedNumbers& n) { return seconds(n.config.stall_s); });
  add("stall reduction", "", [&](const TunedNumbers& n) { return percent(n.stall_reduction); });
  add("speed-up", "", [](const TunedNumbers& n) { return Fixed(n.speed_up, 2) + " x"; });
  add("all stalls", "3, 11", [&](const TunedNumbers& n) { return seconds(n.stalls_s); });
  if (tuning.replay) {
    const TunedReplay& replay = *tuning.replay;
    add_replay("copies of gradients", seconds(replay.numbers.log_stalls_s));
    add_replay("a replay", seconds(replay.replay_s));
    add_replay("all replays", seconds(replay.numbers.replays_s));
  }
  add("all restarts", "4, 12", [&](const TunedNumbers& n) { return seconds(n.restarts_s); });
  add("repeated work", "4, 12", [&](const TunedNumbers& n) { return seconds(n.repeated_s); });
  add("overhead", "4, 13", [&](const TunedNumbers& n) { return seconds(n.config.overhead_s); });
  add("per iteration", "14-16",
      [](const TunedNumbers& n) { return Fixed(1e3 * n.rate_s, 3) + " ms"; });
  add("lost tokens (PLT)", "7",
      [&](const TunedNumbers& n) { return percent(n.config.expected_plt); });
  add("effective time", "", [&](const TunedNumbers& n) { return percent(n.config.ettr); });
  std::string meaning = "EQ: equations of MoC-System (arXiv 2408.04307).";
  if (tuning.chosen.config.plt_in_limit) meaning += " CHOSEN: the best partial checkpoints.";
  meaning += " FULL: full checkpoints.";
  if (tuning.replay) meaning += " REPLAY: a lossless run, which logs gradients.";
  if (tuning.gemini) {
    meaning += " GEMINI: as CHECKFREQ, but the persist is a copy to the memory of another node.";
  }
  meaning +=
      " CHECKFREQ, BLOCKING: full checkpoints in which copies do not share the work, written while "
      "training runs or waits. The stall reduction, and the speed-up of an iteration with a "
      "checkpoint, are against BLOCKING.";
  return table.Render(0) + text::Legend(meaning);
}

std::string Every(std::uint64_t interval) {
  return interval == 1 ? " every iteration" : " every " + std::to_string(interval) + " iterations";
}

std::string FlagsOf(const AutoConfig& config) {
  return "--k " + std::to_string(config.k_snapshot) + " --k-persist " +
         std::to_string(config.k_persist) + Every(config.interval);
}

/// Returns the computed time of a step; empty with measured times.
std::string StepText(const Tuning& tuning) {
  if (!tuning.step) return "";
  const StepTime& step = *tuning.step;
  return "computed  forward and backward pass " + Fixed(step.seconds(), 3) + " s: operations " +
         Fixed(step.compute_s, 3) + " s, reductions " + Fixed(step.reduce_s, 3) + " s, exchanges " +
         Fixed(step.exchange_s, 3) + " s\n\n";
}

/// Returns why there is no column CHOSEN.
std::string NoneChosenText(const Tuning& tuning) {
  const AutoConfig& closest = tuning.chosen.config;
  return "no column CHOSEN: no K is within the limit of " + Fixed(100 * tuning.input.plt_limit, 3) +
         " % lost tokens; the closest, " + FlagsOf(closest) + ", loses " +
         Fixed(100 * closest.expected_plt, 3) + " %\n";
}

/// Returns the flags of the best configuration.
std::string UseText(const Tuning& tuning) {
  if (tuning.best == TunedBest::kReplay && tuning.replay) {
    const AutoConfig& config = tuning.replay->numbers.config;
    return "use shardwright.PartialCheckpoints(k=" + std::to_string(config.k_snapshot) +
           ", every=" + std::to_string(config.interval) +
           ", lossless=True, flags=[\"--policy\", \"gradient-log\"])\n";
  }
  if (tuning.best == TunedBest::kFull) {
    return "use --policy full" + Every(tuning.full.config.interval) + "\n";
  }
  return "use " + FlagsOf(tuning.chosen.config) + "\n";
}

}  // namespace

std::string TuningText(const Tuning& tuning) {
  std::string text = StepText(tuning) + NumbersTable(tuning) + "\n";
  if (!tuning.chosen.config.plt_in_limit) text += NoneChosenText(tuning);
  if (!tuning.no_replay.empty()) text += "no column REPLAY: " + tuning.no_replay + "\n";
  return text + UseText(tuning);
}

}  // namespace shardwright::partial
