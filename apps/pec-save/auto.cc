#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <ostream>
#include <string>
#include <utility>

#include "base/bytes.h"
#include "base/number.h"
#include "cli/text.h"
#include "pec-save/simulate.h"
#include "pec/auto_config.h"
#include "pec/bandwidth.h"
#include "pec/lost_tokens.h"
#include "pec/overhead.h"
#include "pec/saved_model.h"

namespace shardwright::apps {
namespace {

using Json = nlohmann::json;
using Column = cli::Table::Column;
constexpr auto kRight = cli::Table::Align::kRight;

/// A configuration, what its checkpoints hold, and the terms of eq 4.
struct Numbers {
  pec::AutoConfig config;
  pec::CheckpointSize snapshot;
  pec::CheckpointSize persist;
  std::uint64_t snapshot_rank_bytes = 0;
  std::uint64_t persist_rank_bytes = 0;
  double stalls_s = 0;
  double restarts_s = 0;
  double repeated_s = 0;
  double rate_s = 0;  // eq 14 to 16
};

Result<Numbers> NumbersOf(const Job& job, const pec::AutoInput& input) {
  Numbers n;
  SW_TRY_ASSIGN(n.config, pec::ChooseConfig(input));
  SW_TRY_ASSIGN(n.snapshot, pec::SizeForK(job.model, n.config.k_snapshot, job.keep));
  SW_TRY_ASSIGN(n.persist, pec::SizeForK(job.model, n.config.k_persist, job.keep));
  n.snapshot_rank_bytes = input.snapshot.bytes[n.config.k_snapshot - 1];
  n.persist_rank_bytes = input.persist.bytes[n.config.k_persist - 1];
  const auto interval = static_cast<double>(n.config.interval);
  const double faults = input.fault_rate * input.iterations;
  n.stalls_s = n.config.stall_s * input.iterations / interval;
  n.restarts_s = faults * input.restart_s;
  n.repeated_s = faults * interval * input.iteration_s / 2;
  SW_TRY_ASSIGN(n.rate_s, pec::OverheadRate({n.config.stall_s, interval, input.iteration_s,
                                             input.fault_rate, input.restart_s}));
  return n;
}

/// The same job with full checkpoints: every K but N is taken away.
Result<Numbers> FullNumbers(const Job& job, pec::AutoInput input) {
  const std::size_t experts = input.snapshot.bytes.size();
  for (pec::BottleneckTable* table : {&input.snapshot, &input.persist}) {
    // Equal costs for all K: the choice is then K = N.
    std::fill(table->bytes.begin(), table->bytes.end(), table->bytes[experts - 1]);
  }
  return NumbersOf(job, input);
}

Json NumbersJson(const Numbers& n) {
  return {{"k", n.config.k_snapshot},
          {"k_persist", n.config.k_persist},
          {"interval", n.config.interval},
          {"snapshot_bytes", n.snapshot.bytes},
          {"bytes", n.persist.bytes},
          {"full_bytes", n.persist.full_bytes},
          {"snapshot_bottleneck_bytes", n.snapshot_rank_bytes},
          {"bottleneck_bytes", n.persist_rank_bytes},
          {"snapshot_s", n.config.snapshot_s},
          {"persist_s", n.config.persist_s},
          {"stall_s", n.config.stall_s},
          {"stalls_s", n.stalls_s},
          {"restarts_s", n.restarts_s},
          {"repeated_s", n.repeated_s},
          {"overhead_s", n.config.overhead_s},
          {"overhead_per_iteration_s", n.rate_s},
          {"expected_plt", n.config.expected_plt},
          {"plt_in_limit", n.config.plt_in_limit},
          {"ettr", n.config.ettr}};
}

Json MeasuredJson(const pec::Bandwidths& measured) {
  return {{"bytes", pec::kMeasuredBytes},
          {"persist_bytes_per_s", measured.persist_bytes_per_s},
          {"snapshot_bytes_per_s", measured.snapshot_bytes_per_s}};
}

cli::Table NumbersTable(const Numbers& a, const Numbers& b) {
  cli::Table table(
      {Column{"NUMBER"}, Column{"EQ"}, Column{"CHOSEN", kRight}, Column{"FULL", kRight}});
  const auto add = [&](const char* what, const char* eq, const auto& of) {
    table.AddRow({what, eq, of(a), of(b)});
  };
  const auto seconds = [](double value) { return Fixed(value, 3) + " s"; };
  const auto percent = [](double value) { return Fixed(100 * value, 3) + " %"; };
  add("K of a snapshot", "", [](const Numbers& n) { return std::to_string(n.config.k_snapshot); });
  add("K of a persist", "", [](const Numbers& n) { return std::to_string(n.config.k_persist); });
  add("iterations between", "", [](const Numbers& n) { return std::to_string(n.config.interval); });
  add("checkpoint", "5, 6", [](const Numbers& n) { return FormatBytes(n.persist.bytes); });
  add("of the full one", "6", [&](const Numbers& n) { return percent(n.persist.ratio()); });
  add("snapshot of a rank", "8, 9",
      [](const Numbers& n) { return FormatBytes(n.snapshot_rank_bytes); });
  add("persist of a rank", "8, 9",
      [](const Numbers& n) { return FormatBytes(n.persist_rank_bytes); });
  add("snapshot takes", "10", [&](const Numbers& n) { return seconds(n.config.snapshot_s); });
  add("persist takes", "", [&](const Numbers& n) { return seconds(n.config.persist_s); });
  add("stall", "10", [&](const Numbers& n) { return seconds(n.config.stall_s); });
  add("all stalls", "3, 11", [&](const Numbers& n) { return seconds(n.stalls_s); });
  add("all restarts", "4, 12", [&](const Numbers& n) { return seconds(n.restarts_s); });
  add("repeated work", "4, 12", [&](const Numbers& n) { return seconds(n.repeated_s); });
  add("overhead", "4, 13", [&](const Numbers& n) { return seconds(n.config.overhead_s); });
  add("per iteration", "14-16", [](const Numbers& n) { return Fixed(1e3 * n.rate_s, 3) + " ms"; });
  add("lost tokens (PLT)", "7", [&](const Numbers& n) { return percent(n.config.expected_plt); });
  add("effective time", "", [&](const Numbers& n) { return percent(n.config.ettr); });
  return table;
}

/// Both bandwidths of a rank, measured while all ranks do the same.
Result<pec::Bandwidths> Measure(cli::Context& context, const std::string& folder) {
  SW_TRY_ASSIGN(const pec::Bandwidths measured,
                pec::MeasureBandwidths(context.comm(), folder, context.sink()));
  const auto rate = [](double bytes_per_s) {
    return FormatBytes(static_cast<std::uint64_t>(bytes_per_s)) + "/s";
  };
  const int ranks = context.comm().size();
  context.out() << "measured  persist " << rate(measured.persist_bytes_per_s) << ", snapshot "
                << rate(measured.snapshot_bytes_per_s) << " of a rank"
                << (ranks > 1 ? ", the slowest of " + std::to_string(ranks) + " at once" : "")
                << ": " << FormatBytes(pec::kMeasuredBytes) << " written to "
                << cli::Printable(folder) << " and synced, and as much copied\n\n";
  return measured;
}

}  // namespace

Status Auto(cli::Context& context, const cli::App& app, const SaveFlags& save,
            const PlanningFlags& flags) {
  SW_TRY_ASSIGN(const Job job, flags.job.Read(app, save.keep, std::nullopt));
  SW_TRY_ASSIGN(const pec::SavedModel model,
                pec::SavedModelOf(job.model, job.keep, job.map, job.ranks, 0));
  pec::AutoInput input;
  // The loads of ranks repeat after ep checkpoints at most.
  SW_TRY_ASSIGN(input.snapshot, pec::BottleneckByK(model, job.map.ep, 1));
  input.persist = input.snapshot;
  input.snapshot_bytes_per_s = static_cast<double>(flags.job.snapshot_bandwidth);
  input.persist_bytes_per_s = static_cast<double>(flags.persist_bandwidth);
  std::optional<pec::Bandwidths> measured;
  if (!flags.measure.empty()) {
    SW_TRY_ASSIGN(measured, Measure(context, flags.measure));
    input.snapshot_bytes_per_s = measured->snapshot_bytes_per_s;
    input.persist_bytes_per_s = measured->persist_bytes_per_s;
  }
  input.forward_backward_s = flags.job.forward_backward_s;
  input.iteration_s = flags.job.iteration_s;
  input.fault_rate = flags.fault_rate;
  input.restart_s = flags.job.restart_s;
  input.iterations = static_cast<double>(flags.iterations);
  input.plt_limit = flags.plt_limit;
  input.lost_share = flags.LostShare(job);
  if (flags.interval != 0) input.interval = flags.interval;
  SW_TRY_ASSIGN(const Numbers chosen, NumbersOf(job, input));
  SW_TRY_ASSIGN(const Numbers full, FullNumbers(job, input));
  context.SetResult({{"chosen", NumbersJson(chosen)},
                     {"full", NumbersJson(full)},
                     {"bottleneck_bytes_by_k", input.snapshot.bytes},
                     {"plt_limit", input.plt_limit},
                     {"lost_share", input.lost_share},
                     {"measured", measured ? MeasuredJson(*measured) : Json(nullptr)},
                     {"faults", input.fault_rate * input.iterations}});
  context.Print(NumbersTable(chosen, full));
  std::ostream& out = context.out();
  const std::uint64_t interval = chosen.config.interval;
  out << "\nuse --k " << chosen.config.k_snapshot << " --k-persist " << chosen.config.k_persist
      << (interval == 1 ? " every iteration\n"
                        : " every " + std::to_string(interval) + " iterations\n");
  if (!chosen.config.plt_in_limit) {
    context.sink().Warn("the expected PLT is above " + Fixed(100 * input.plt_limit, 2) +
                        " %: no K to persist that fits the interval is enough");
  }
  return {};
}

}  // namespace shardwright::apps
