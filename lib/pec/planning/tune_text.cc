#include <string>

#include "base/bytes.h"
#include "base/text.h"
#include "pec/planning/tune.h"
#include "text/table.h"

namespace shardwright::pec {
namespace {

using Column = text::Table::Column;
using text::kRight;

std::string NumbersTable(const TunedNumbers& a, const TunedNumbers& b) {
  text::Table table(
      {Column{"NUMBER"}, Column{"EQ"}, Column{"CHOSEN", kRight}, Column{"FULL", kRight}});
  const auto add = [&](const char* what, const char* eq, const auto& of) {
    table.AddRow({what, eq, of(a), of(b)});
  };
  const auto seconds = [](double value) { return Fixed(value, 3) + " s"; };
  const auto percent = [](double value) { return Fixed(100 * value, 3) + " %"; };
  add("K of a snapshot", "",
      [](const TunedNumbers& n) { return std::to_string(n.config.k_snapshot); });
  add("K of a persist", "",
      [](const TunedNumbers& n) { return std::to_string(n.config.k_persist); });
  add("iterations between", "",
      [](const TunedNumbers& n) { return std::to_string(n.config.interval); });
  add("checkpoint", "5, 6", [](const TunedNumbers& n) { return FormatBytes(n.persist.bytes); });
  add("of the full one", "6", [&](const TunedNumbers& n) { return percent(n.persist.ratio()); });
  add("snapshot of a rank", "8, 9",
      [](const TunedNumbers& n) { return FormatBytes(n.snapshot_rank_bytes); });
  add("persist of a rank", "8, 9",
      [](const TunedNumbers& n) { return FormatBytes(n.persist_rank_bytes); });
  add("snapshot takes", "10", [&](const TunedNumbers& n) { return seconds(n.config.snapshot_s); });
  add("persist takes", "", [&](const TunedNumbers& n) { return seconds(n.config.persist_s); });
  add("stall", "10", [&](const TunedNumbers& n) { return seconds(n.config.stall_s); });
  add("all stalls", "3, 11", [&](const TunedNumbers& n) { return seconds(n.stalls_s); });
  add("all restarts", "4, 12", [&](const TunedNumbers& n) { return seconds(n.restarts_s); });
  add("repeated work", "4, 12", [&](const TunedNumbers& n) { return seconds(n.repeated_s); });
  add("overhead", "4, 13", [&](const TunedNumbers& n) { return seconds(n.config.overhead_s); });
  add("per iteration", "14-16",
      [](const TunedNumbers& n) { return Fixed(1e3 * n.rate_s, 3) + " ms"; });
  add("lost tokens (PLT)", "7",
      [&](const TunedNumbers& n) { return percent(n.config.expected_plt); });
  add("effective time", "", [&](const TunedNumbers& n) { return percent(n.config.ettr); });
  return table.Render(0);
}

}  // namespace

std::string TuningText(const Tuning& tuning) {
  const AutoConfig& config = tuning.chosen.config;
  const std::uint64_t interval = config.interval;
  return NumbersTable(tuning.chosen, tuning.full) + "\nuse --k " +
         std::to_string(config.k_snapshot) + " --k-persist " + std::to_string(config.k_persist) +
         (interval == 1 ? " every iteration\n"
                        : " every " + std::to_string(interval) + " iterations\n");
}

}  // namespace shardwright::pec
