// SPDX-License-Identifier: Apache-2.0
#include "partial/planner/forecast/simulate_page.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "support/base/bytes.h"
#include "support/base/text.h"
#include "support/html/chart.h"
#include "support/html/page.h"

namespace shardwright::partial {
namespace {

/// Most points of a curve over the run. Of more, each drawn point is the largest of a group.
constexpr std::size_t kRunPoints = 270;
constexpr std::size_t kDynamicStyle = 5;
constexpr std::size_t kReplayStyle = 6;

std::size_t StyleOf(const SimulationRow& row) {
  if (row.dynamic) return kDynamicStyle;
  if (row.policy.policy == Policy::kReplay) return kReplayStyle;
  return static_cast<std::size_t>(row.policy.policy);
}

/// Returns the bytes that checkpoints and gradient logs write to storage.
std::uint64_t WrittenBytes(const SimulationRow& row) { return row.persist_bytes + row.log_bytes; }

/// Returns one curve per policy: a number of each row over K.
std::vector<html::Curve> CurvesOf(const SimulationPage& report,
                                  double (*value)(const SimulationRow&),
                                  std::string (*text)(const SimulationRow&)) {
  std::vector<html::Curve> curves;
  for (const SimulationRow& row : report.rows) {
    if (row.policy.rule) continue;  // rows with a rule have no K
    const std::size_t style = StyleOf(row);
    if (curves.empty() || curves.back().style != style) {
      curves.push_back({PolicyText(row), style, {}, !row.dynamic, row.dynamic.has_value()});
    }
    const std::string note = RowText(row) + ": " + text(row);
    curves.back().points.push_back({static_cast<double>(row.policy.k_snapshot), value(row), note});
  }
  return curves;
}

/// Makes a section with a chart over K.
std::string OverK(const SimulationPage& report, const std::string& title, const std::string& about,
                  html::Unit unit, double (*value)(const SimulationRow&),
                  std::string (*text)(const SimulationRow&),
                  std::optional<double> limit = std::nullopt) {
  html::Chart chart;
  chart.label = title + " by policy and K";
  chart.x_name = "K, experts of each layer";
  chart.by_doubling = true;
  chart.y_unit = unit;
  chart.curves = CurvesOf(report, value, text);
  chart.limit = limit;
  if (limit) chart.limit_name = "limit " + Percent(*limit, 2);
  if (report.best && !report.rows[*report.best].dynamic) {
    const SimulationRow& row = report.rows[*report.best];
    chart.ring = html::Point{static_cast<double>(row.policy.k_snapshot), value(row), ""};
  }
  return "<section class=\"chart\">\n<h2>" + html::Escape(title) + "</h2>\n<p>" +
         html::Escape(about) + "</p>\n" + html::ChartMarkup(chart) + "</section>\n";
}

/// Returns K for the curves over the run: that of the best row, or the largest of partial rows.
std::uint32_t ChosenK(const SimulationPage& report) {
  const auto partial = [](const SimulationRow& row) {
    return row.policy.policy != Policy::kFull && !row.dynamic && !row.policy.rule;
  };
  if (report.best && partial(report.rows[*report.best])) {
    return report.rows[*report.best].policy.k_snapshot;
  }
  std::uint32_t k = 0;
  for (const SimulationRow& row : report.rows) {
    if (partial(row)) k = std::max(k, row.policy.k_snapshot);
  }
  return k;
}

html::Curve RiskCurve(const SimulationRow& row) {
  html::Curve curve{row.dynamic ? RowText(row) : PolicyText(row), StyleOf(row), {}, false, false};
  const std::size_t step =
      std::max<std::size_t>(1, (row.risk.size() + kRunPoints - 1) / kRunPoints);
  for (std::size_t i = 0; i < row.risk.size(); i += step) {
    const auto first = row.risk.begin() + static_cast<std::ptrdiff_t>(i);
    const auto last =
        row.risk.begin() + static_cast<std::ptrdiff_t>(std::min(i + step, row.risk.size()));
    const auto most = std::max_element(first, last, [](const RiskPoint& a, const RiskPoint& b) {
      return a.fraction < b.fraction;
    });
    curve.points.push_back({static_cast<double>(most->step), most->fraction, ""});
  }
  return curve;
}

/// Returns the iterations run before each fault, including repeated ones.
std::vector<double> FaultSteps(const SimulationRow& row) {
  std::vector<double> steps;
  std::uint64_t step = 0;
  std::uint64_t from = 0;
  for (const SimulatedRun::Fault& fault : row.run.faults) {
    step += fault.iteration - from;
    from = fault.resume;
    steps.push_back(static_cast<double>(step));
  }
  return steps;
}

std::string RiskSection(const SimulationPage& report) {
  const std::uint32_t k = ChosenK(report);
  html::Chart chart;
  chart.x_name = "iterations run, repeated ones included";
  chart.y_unit = html::Unit::kShare;
  for (const SimulationRow& row : report.rows) {
    const bool shown =
        row.policy.policy != Policy::kFull && row.policy.k_snapshot == k && !row.policy.rule;
    if (row.dynamic || shown) chart.curves.push_back(RiskCurve(row));
  }
  if (chart.curves.empty()) return "";
  const std::string title =
      "Tokens at risk over the run" + (k == 0 ? "" : ", K = " + std::to_string(k));
  chart.label = title;
  chart.events = FaultSteps(report.rows.front());
  std::string about =
      "Share of the unsaved tokens that are still not in storage after a checkpoint.";
  if (!chart.events.empty()) about += " Dotted lines are faults.";
  if (report.rows.front().risk.size() > kRunPoints) {
    about += " Each point is the largest value of several adjacent checkpoints.";
  }
  return "<section class=\"chart\">\n<h2>" + html::Escape(title) + "</h2>\n<p>" + about + "</p>\n" +
         html::ChartMarkup(chart) + "</section>\n";
}

std::string DynamicSection(const SimulationPage& report) {
  std::string text;
  for (const SimulationRow& row : report.rows) {
    if (!row.dynamic) continue;
    const DynamicK& state = row.dynamic->state;
    text +=
        "<section>\n<h2>Dynamic K</h2>\n<p>K starts at " + std::to_string(row.dynamic->k.front().k);
    for (std::size_t i = 1; i < row.dynamic->k.size(); ++i) {
      const KPoint& point = row.dynamic->k[i];
      text += (i == 1 ? " and becomes " : ", ") + std::to_string(point.k) +
              " with the fault after iteration " + std::to_string(point.iteration);
    }
    text += ". Faults cost a PLT of " + Percent(state.total, 3) + "; the limit is " +
            Percent(state.limit, 3) + ", " + Percent(state.share(), 3) + " for each of " +
            Plural(state.levels, "level") + ". ";
    const auto& covered = row.dynamic->faults_covered;
    text += covered ? "The budget covers " + Plural(*covered, "more fault") +
                          " before every checkpoint is full.</p>\n"
                    : "Faults cost nothing: the budget covers any number.</p>\n";
    text += "</section>\n";
  }
  return text;
}

/// Makes a table cell with the exact number as its title.
std::string Cell(const std::string& text, const std::string& number) {
  return "<td title=\"" + html::Escape(number) + "\">" + html::Escape(text) + "</td>";
}

std::string BytesCell(std::uint64_t bytes) {
  return Cell(FormatBytes(bytes), std::to_string(bytes));
}

std::string ShareCell(double share, int digits) {
  return Cell(Percent(share, digits), Fixed(share, 12));
}

std::string SecondsCell(double seconds, int digits) {
  return Cell(Fixed(seconds, digits), Fixed(seconds, 6));
}

std::string RowMarkup(const SimulationRow& row, bool chosen) {
  return std::string(chosen ? "<tr class=\"chosen\"><td>" : "<tr><td>") +
         html::Escape(PolicyText(row)) + (chosen ? " (chosen)" : "") + "</td>" +
         Cell(LevelsText(row), std::to_string(row.policy.k_snapshot)) +
         BytesCell(row.persist_bytes) + BytesCell(row.bottleneck_bytes) +
         BytesCell(row.bound_bytes) + ShareCell(row.loss.plt, 3) + ShareCell(row.loss.mlt_sum, 2) +
         ShareCell(row.risk_mean, 2) + ShareCell(row.risk_max, 2) + SecondsCell(row.stall_s, 3) +
         SecondsCell(row.overhead_s, 1) + BytesCell(row.log_bytes) + BytesCell(row.memory_bytes) +
         (row.recovery_s ? SecondsCell(*row.recovery_s, 1) : Cell("-", "computed only")) +
         "</tr>\n";
}

std::string TableSection(const SimulationPage& report) {
  std::string text =
      "<section>\n<h2>All rows</h2>\n<p>Hover over a number to see all its digits.</p>\n"
      "<div class=\"scroll\"><table>\n<thead><tr>";
  for (const char* name :
       {"policy", "K", "written", "largest share", "bound", "PLT", "MLT", "risk, mean",
        "risk, largest", "stall s", "cost s", "log", "memory", "restart s"}) {
    text += "<th>" + std::string(name) + "</th>";
  }
  text += "</tr></thead>\n<tbody>\n";
  for (std::size_t i = 0; i < report.rows.size(); ++i) {
    text += RowMarkup(report.rows[i], report.best == i);
  }
  return text + "</tbody>\n</table></div>\n</section>\n";
}

std::string Tiles(const SimulationPage& report) {
  const SimulationRow& any = report.rows.front();
  std::string text = "<div class=\"tiles\">\n";
  if (report.best) {
    const SimulationRow& row = report.rows[*report.best];
    const double whole =
        static_cast<double>(row.checkpoints) * static_cast<double>(report.full_bytes);
    const double share = whole > 0 ? static_cast<double>(WrittenBytes(row)) / whole : 0;
    text += html::Tile("Least cost within the limit", RowText(row),
                       row.dynamic ? "marked in the table" : "marked in the charts and the table") +
            html::Tile("Bytes written", FormatBytes(WrittenBytes(row)),
                       Percent(share, 1) + " of full checkpoints") +
            html::Tile("Lost tokens (PLT)", Percent(row.loss.plt, 3),
                       "limit " + Percent(report.plt_limit, 2));
  } else {
    text += html::Tile("Recommendation", "none", report.no_best);
  }
  return text +
         html::Tile("Faults", std::to_string(report.input->faults.size()),
                    Plural(any.replayed_iterations, "iteration") + " run again") +
         "</div>\n";
}

std::string Facts(const SimulationPage& report) {
  const SimulationInput& input = *report.input;
  const LayerExperts experts = input.map.experts();
  return "<p>" + Plural(input.tokens.size(), "iteration") + " of " +
         html::Escape(report.trace_name) + ", " + Plural(experts.size(), "MoE layer") + " of " +
         Plural(experts.front(), "expert") + ", a checkpoint every " +
         (input.interval == 1 ? "iteration" : Plural(input.interval, "iteration")) + " (" +
         std::to_string(report.rows.front().checkpoints) + " taken). A full checkpoint has " +
         FormatBytes(report.full_bytes) + ", saved by " + Plural(input.ranks.dp, "rank") +
         ".</p>\n";
}

}  // namespace

std::string LevelsText(const SimulationRow& row) {
  const std::string k = std::to_string(row.policy.k_snapshot);
  if (row.dynamic) {
    const std::uint32_t last = row.dynamic->k.back().k;
    return last == row.policy.k_snapshot ? k : k + " to " + std::to_string(last);
  }
  const std::uint32_t persist = row.policy.k_persist;
  return persist == row.policy.k_snapshot ? k : k + "/" + std::to_string(persist);
}

std::string PolicyText(const SimulationRow& row) {
  if (row.dynamic) return "dynamic K";
  const std::string name(Name(row.policy.policy));
  return row.policy.rule ? name + ", " + std::string(Name(*row.policy.rule)) : name;
}

std::string RowText(const SimulationRow& row) {
  return PolicyText(row) + (row.dynamic ? ", " : ", K ") + LevelsText(row);
}

std::string PageText(const SimulationPage& report) {
  using Row = const SimulationRow&;
  html::Document document;
  document.title = "Partial checkpoints: simulation";
  document.body =
      "<main>\n<h1>Partial checkpoints: simulation</h1>\n" + Facts(report) + Tiles(report) +
      "<div class=\"two\">\n" +
      OverK(
          report, "Bytes written",
          "All checkpoints together, and with policy gradient-log also its log.",
          html::Unit::kBytes, [](Row row) { return static_cast<double>(WrittenBytes(row)); },
          [](Row row) { return FormatBytes(WrittenBytes(row)); }) +
      OverK(
          report, "Largest share of a rank",
          "Bytes of the rank with the most to write in one checkpoint, without the first, full "
          "checkpoint.",
          html::Unit::kBytes, [](Row row) { return static_cast<double>(row.bottleneck_bytes); },
          [](Row row) {
            return FormatBytes(row.bottleneck_bytes) + ", bound " + FormatBytes(row.bound_bytes);
          }) +
      OverK(
          report, "Lost tokens (PLT)", "Share of all tokens that faults lost, mean over layers.",
          html::Unit::kShare, [](Row row) { return row.loss.plt; },
          [](Row row) { return Percent(row.loss.plt, 4); }, report.plt_limit) +
      OverK(
          report, "Lost tokens (MLT)", "The same as a sum over the layers, which may exceed 100 %.",
          html::Unit::kShare, [](Row row) { return row.loss.mlt_sum; },
          [](Row row) { return Percent(row.loss.mlt_sum, 3); }) +
      RiskSection(report) +
      OverK(
          report, "Cost",
          "Stalls, restarts and repeated work of the run; with policy gradient-log also gradient "
          "copies and replays.",
          html::Unit::kSeconds, [](Row row) { return row.overhead_s; },
          [](Row row) {
            return Fixed(row.overhead_s, 1) + " s, stall " + Fixed(row.stall_s, 3) + " s";
          }) +
      "</div>\n" + DynamicSection(report) + TableSection(report) +
      "<footer>K: experts of each layer that a checkpoint saves (into memory / into storage). "
      "Bound: lower bound of the largest share. Risk: share of the unsaved tokens that are still "
      "not in storage after a checkpoint. Cost: stalls, restarts and iterations run again, in "
      "seconds. Log: gradients. Memory: peak of all nodes together. Restart: the longest, with its "
      "replay.</footer>\n</main>\n";
  return html::Render(document);
}

}  // namespace shardwright::partial
