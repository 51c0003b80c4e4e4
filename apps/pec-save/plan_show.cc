#include "pec-save/plan_show.h"

#include <algorithm>
#include <numeric>
#include <ostream>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/text.h"
#include "common/pec.h"
#include "text/text.h"

namespace shardwright::apps {
namespace {

using Column = text::Table::Column;
constexpr auto kRight = text::Table::Align::kRight;
/// Longer tables show their largest rows; the report has all.
constexpr std::size_t kRows = 64;

/// For columns headed "%".
std::string InPercent(double fraction) { return Fixed(100 * fraction, 1); }

std::string Seconds(double value) { return Fixed(value, 3) + " s"; }

std::string Of(std::uint64_t part, std::uint64_t all) {
  return all == 0 ? "-" : InPercent(static_cast<double>(part) / static_cast<double>(all));
}

std::uint64_t OptimizerOf(const pec::ComponentBytes& bytes) { return bytes.master + bytes.moments; }

/// The `kRows` rows with the largest keys, in their order.
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

void NoteRows(std::ostream& out, std::size_t count, const char* what) {
  if (count <= kRows) return;
  out << "the " << kRows << " largest of " << count << " " << what << "; --json has all\n";
}

void ShowSize(cli::Context& context, const pec::PlanAnswer& answer) {
  text::Table table({Column{"BYTES"}, Column{"WEIGHTS", kRight}, Column{"%", kRight},
                     Column{"OPTIMIZER", kRight}, Column{"%", kRight}, Column{"ALL", kRight},
                     Column{"%", kRight}});
  const std::uint64_t full = answer.full.bytes;
  const auto add = [&](const std::string& name, std::uint64_t weights, std::uint64_t optimizer) {
    table.AddRow({name, FormatBytes(weights), Of(weights, full), FormatBytes(optimizer),
                  Of(optimizer, full), FormatBytes(weights + optimizer),
                  Of(weights + optimizer, full)});
  };
  const auto add_size = [&](const std::string& name, const pec::CheckpointSize& size) {
    add(name, size.expert.weights + size.nonexpert.weights,
        OptimizerOf(size.expert) + OptimizerOf(size.nonexpert));
  };
  add("experts", answer.full.expert.weights, OptimizerOf(answer.full.expert));
  add("other modules", answer.full.nonexpert.weights, OptimizerOf(answer.full.nonexpert));
  add_size("full checkpoint", answer.full);
  const pec::PlannedCheckpoint& first = answer.checkpoints.front();
  if (first.persist) add_size("snapshot", first.snapshot.size);
  add_size(first.persist ? "persist" : "partial checkpoint", first.stored().size);
  context.Print(table);
}

void ShowBudget(cli::Context& context, const pec::BudgetAnswer& budget) {
  std::ostream& out = context.out();
  out << "\nbudget    " << budget.layers.total
      << " experts; tokens at risk after it: " << budget.layers.at_risk_tokens << " by layers, "
      << budget.global.at_risk_tokens << " over all layers\n";
  if (budget.stall_bytes > 0) {
    out << "stall     " << FormatBytes(budget.stall_bytes)
        << " of the non-expert part are above the budget\n";
  }
}

void ShowSelection(cli::Context& context, const pec::PlanAnswer& answer) {
  text::Table table({Column{"CHECKPOINT", kRight}, Column{"LAYER", kRight}, Column{"EXPERTS"},
                     Column{"PERSISTED"}, Column{"AT RISK %", kRight}});
  for (std::size_t t = 0; t < answer.checkpoints.size(); ++t) {
    const pec::PlannedCheckpoint& one = answer.checkpoints[t];
    for (std::size_t m = 0; m < answer.job.layer_id.size(); ++m) {
      const bool first = m == 0;
      table.AddRow({first ? std::to_string(t) : "", std::to_string(answer.job.layer_id[m]),
                    text::Ranges(one.snapshot.selection[m]),
                    text::Ranges(one.stored().selection[m]),
                    first && one.risk ? InPercent(one.risk->fraction()) : ""});
    }
  }
  context.out() << "\n";
  context.Print(table);
}

void ShowRanks(cli::Context& context, const pec::PlannedLevel& level, const char* name) {
  const pec::ShareComparison& shares = level.shares;
  const std::vector<std::uint64_t>& bytes = shares.adaptive.rank_bytes;
  text::Table table({Column{"RANK", kRight}, Column{"EXPERTS", kRight}, Column{"ADAPTIVE", kRight},
                     Column{"EQUAL", kRight}, Column{"UNSHARED", kRight}});
  for (const std::size_t r : LargestRows(bytes)) {
    table.AddRow({std::to_string(r), FormatBytes(shares.adaptive.expert_bytes[r]),
                  FormatBytes(bytes[r]), FormatBytes(shares.equal.rank_bytes[r]),
                  FormatBytes(shares.unshared[r])});
  }
  std::ostream& out = context.out();
  out << "\nshares of checkpoint 0, " << name << "\n";
  context.Print(table);
  NoteRows(out, bytes.size(), "ranks");
}

void ShowBottlenecks(cli::Context& context, const pec::PlanAnswer& answer) {
  text::Table table({Column{"CHECKPOINT", kRight}, Column{"LEVEL"}, Column{"ADAPTIVE", kRight},
                     Column{"EQUAL", kRight}, Column{"UNSHARED", kRight}, Column{"IDEAL", kRight},
                     Column{"BOUND", kRight}, Column{"LESS %", kRight}});
  const auto add = [&](std::size_t t, const char* name, const pec::PlannedLevel& level) {
    const pec::ShareComparison& s = level.shares;
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
  std::ostream& out = context.out();
  out << "\nlargest shares\n";
  context.Print(table);
  if (answer.uneven) {
    out << "eq 9: the experts are " << (*answer.uneven ? "not " : "")
        << "spread evenly; shares repeat after " << *answer.phases
        << (*answer.phases == 1 ? " checkpoint\n" : " checkpoints\n");
  }
}

void ShowCopies(cli::Context& context, const pec::CopiesAnswer& copies, std::uint64_t asked) {
  std::ostream& out = context.out();
  out << "\ncopies    " << copies.plan.replicas << " of each worker";
  if (copies.plan.clamped) out << " (" << asked << " asked for, there are no more workers)";
  out << ": " << copies.plan.cheap << " within a stage, " << copies.plan.costly << " outside\n"
      << "to send   " << FormatBytes(copies.all_bytes) << " in all";
  if (copies.longest_s > 0) out << ", at most " << Seconds(copies.longest_s) << " for a worker";
  out << "\n";
  if (!copies.plan.incomplete.empty()) {
    out << "not placed: workers " << text::Ranges(copies.plan.incomplete)
        << " have fewer copies, for there are too few nodes\n";
  }
  out << "\n";
  text::Table table({Column{"WORKER", kRight}, Column{"STAGE", kRight}, Column{"NODE", kRight},
                     Column{"COPIES ON"}, Column{"HOLDS", kRight}, Column{"SENDS", kRight},
                     Column{"RECEIVES", kRight}});
  for (const std::size_t i : LargestRows(copies.sends)) {
    std::string holders;
    for (const std::uint32_t holder : copies.plan.holders[i]) {
      holders += (holders.empty() ? "" : ", ") + std::to_string(holder);
    }
    table.AddRow({std::to_string(i), std::to_string(copies.grid.stage[i]),
                  std::to_string(copies.grid.node[i]), holders.empty() ? "none" : holders,
                  std::to_string(copies.plan.load[i]), FormatBytes(copies.sends[i]),
                  FormatBytes(copies.receives[i])});
  }
  context.Print(table);
  NoteRows(out, copies.sends.size(), "workers");
}

void ShowGradients(cli::Context& context, const std::vector<pec::GradientAnswer>& list) {
  text::Table table({Column{"ITERATION", kRight}, Column{"GRADIENTS", kRight},
                     Column{"STATES", kRight}, Column{"SENT", kRight}, Column{"STATE ONLY", kRight},
                     Column{"FACTOR", kRight}});
  for (const pec::GradientAnswer& one : list) {
    const std::uint64_t bytes = one.bytes();
    table.AddRow(
        {std::to_string(one.plan.iteration), std::to_string(pec::SizeOf(one.plan.gradients)),
         std::to_string(pec::SizeOf(one.plan.full)), FormatBytes(bytes),
         FormatBytes(one.state_bytes),
         bytes == 0 ? "-"
                    : Fixed(static_cast<double>(one.state_bytes) / static_cast<double>(bytes), 2)});
  }
  context.out() << "\ngradients in place of state\n";
  context.Print(table);
}

void ShowFill(std::ostream& out, const std::string& name, const pec::BubblePlan& plan) {
  out << name << Seconds(plan.snapshot_s) << ": " << FormatBytes(plan.in_bubble)
      << " in the bubble, " << FormatBytes(plan.beside) << " beside computation\n";
}

void ShowBubbles(cli::Context& context, const pec::BubblesAnswer& bubbles) {
  std::ostream& out = context.out();
  const pec::BubbleTimes& any = bubbles.stage.front();
  out << "\npipeline  an iteration takes " << Seconds(any.iteration_s) << ", each stage idles "
      << Seconds(any.bubble_s) << "\n";
  ShowFill(out, "snapshot  rank " + std::to_string(bubbles.rank) + " needs ", bubbles.snapshot);
  if (bubbles.copies) ShowFill(out, "copies    the busiest worker needs ", *bubbles.copies);
  text::Table stages({Column{"STAGE", kRight}, Column{"BEFORE", kRight}, Column{"BETWEEN", kRight},
                      Column{"AFTER", kRight}});
  for (std::size_t i = 0; i < bubbles.stage.size(); ++i) {
    const pec::BubbleTimes& times = bubbles.stage[i];
    stages.AddRow({std::to_string(i), Seconds(times.before_s), Seconds(times.between_s),
                   Seconds(times.after_s)});
  }
  out << "\n";
  context.Print(stages);
  text::Table modules(
      {Column{"MODULE"}, Column{"IN THE BUBBLE", kRight}, Column{"BESIDE", kRight}});
  for (const std::size_t i : LargestRows(bubbles.bytes)) {
    modules.AddRow({text::Printable(bubbles.names[i]),
                    FormatBytes(bubbles.snapshot.module[i].in_bubble),
                    FormatBytes(bubbles.snapshot.module[i].beside)});
  }
  out << "\n";
  context.Print(modules);
  NoteRows(out, bubbles.names.size(), "modules");
}

void ShowDynamicK(cli::Context& context, const pec::DynamicKAnswer& dynamic) {
  std::ostream& out = context.out();
  out << "\ndynamic K, PLT up to " << Fixed(100 * dynamic.state.limit, 2) << " %, "
      << Fixed(100 * dynamic.state.share(), 4) << " % for each K\n";
  if (!dynamic.levels) {
    out << "K stays: faults cost nothing\n";
    return;
  }
  text::Table table(
      {Column{"K", kRight}, Column{"A FAULT COSTS %", kRight}, Column{"FAULTS", kRight}});
  std::uint64_t faults = 0;
  for (const pec::KLevel& level : *dynamic.levels) {
    table.AddRow(
        {std::to_string(level.k), Fixed(100 * level.plt, 5), std::to_string(level.faults)});
    faults += level.faults;
  }
  context.Print(table);
  out << "then all experts are saved: " << faults << " faults are covered\n";
}

}  // namespace

void ShowPlan(cli::Context& context, const pec::PlanAnswer& answer) {
  const pec::PlanRequest& request = answer.request;
  std::ostream& out = context.out();
  ShowSize(context, answer);
  if (answer.budget) ShowBudget(context, *answer.budget);
  ShowSelection(context, answer);
  const pec::PlannedCheckpoint& first = answer.checkpoints.front();
  ShowRanks(context, first.stored(), first.persist ? "persist" : "both levels");
  if (first.persist) ShowRanks(context, first.snapshot, "snapshot");
  ShowBottlenecks(context, answer);
  if (answer.copies) ShowCopies(context, *answer.copies, *request.copies);
  if (!answer.gradients.empty()) ShowGradients(context, answer.gradients);
  if (answer.bubbles) ShowBubbles(context, *answer.bubbles);
  if (answer.extra_capacity) {
    out << "\nrecovery  " << request.lost_tokens << " lost tokens, " << answer.extra_capacity->extra
        << " more than the capacity in an iteration: " << answer.extra_capacity->iterations
        << " iterations\n";
  }
  if (answer.wasted) {
    out << "\nfailure   wastes " << Seconds(answer.wasted->wasted_s) << ": checkpoint "
        << Seconds(answer.wasted->checkpoint_s) << ", retrieval " << Seconds(*request.retrieval_s)
        << ", half an interval\n";
  }
  if (answer.dynamic_k) ShowDynamicK(context, *answer.dynamic_k);
}

}  // namespace shardwright::apps
