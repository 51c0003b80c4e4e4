// SPDX-License-Identifier: Apache-2.0
#include "placement/failure_simulation/failures_page.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <tuple>
#include <utility>
#include <vector>

#include "support/base/bytes.h"
#include "support/base/text.h"
#include "support/html/chart.h"
#include "support/html/page.h"
#include "support/html/timeline.h"
#include "support/text/text.h"

namespace shardwright::placement {
namespace {

constexpr std::size_t kSlices = 200;
/// Most events in the table.
constexpr std::size_t kRowsShown = 200;

double Seconds(std::uint64_t ms) { return static_cast<double>(ms) / 1e3; }

/// The report of one simulation, part by part.
class Page {
 public:
  explicit Page(const FailuresPage& page)
      : page_(page), first_(page.results.front()), begin_ms_(first_.steps.front().time_ms) {
    order_.resize(page.results.size());
    std::iota(order_.begin(), order_.end(), std::size_t{0});
    std::ranges::stable_sort(order_, [&](std::size_t a, std::size_t b) {
      const SimulationResult& left = page_.results[a];
      const SimulationResult& right = page_.results[b];
      return std::tuple(left.stalled_ms, left.restores, left.imbalance_mean) <
             std::tuple(right.stalled_ms, right.restores, right.imbalance_mean);
    });
  }

  std::string Text() const {
    html::Document document;
    document.title = "Expert placement with failures";
    document.body = "<main>\n<h1>Expert placement with failures</h1>\n" + Facts() + Tiles();
    if (page_.results.size() > 1) document.body += Strategies();
    document.body += "<div class=\"two\">\n" + Balance() + Nodes() + "</div>\n" + Timeline() +
                     Events() +
                     "<footer>Balance: load of the busiest GPU over the mean load. Survived: every "
                     "expert still had a replica. Restored: all state was read from a checkpoint. "
                     "Stalled: no plan exists for the remaining nodes.</footer>\n</main>\n";
    return html::Render(document);
  }

 private:
  double At(const SimulationStep& step) const { return Seconds(step.time_ms - begin_ms_); }
  double seconds() const { return std::max(Seconds(first_.time_ms), 1e-3); }
  std::string Bytes(std::uint64_t bytes) const {
    return page_.bytes_known ? FormatBytes(bytes) : "–";
  }

  std::string Facts() const {
    return "<p>" + Plural(first_.steps.size(), "moment") + " of " +
           html::Escape(page_.events_name) + " over " + text::FormatSeconds(seconds()) + ", " +
           Plural(first_.failures, "failure") + ".</p>\n";
  }

  std::string Tiles() const {
    const SimulationResult& best = page_.results[order_.front()];
    return "<div class=\"tiles\">\n" +
           html::Tile("Strategy", best.strategy,
                      page_.results.size() > 1 ? "least time without a plan, then fewest restores"
                                               : "the only one simulated") +
           html::Tile("Failures survived",
                      std::to_string(best.survived) + " of " + std::to_string(best.failures),
                      Plural(best.restores, "restore") + " from a checkpoint") +
           html::Tile("Without a plan", text::FormatSeconds(Seconds(best.stalled_ms)),
                      Fixed(100 * Seconds(best.stalled_ms) / seconds(), 1) + " % of the time") +
           html::Tile("Balance, mean of all plans", Fixed(best.imbalance_mean, 3),
                      Plural(best.transfers, "replica") + " copied") +
           "</div>\n";
  }

  std::string Strategies() const {
    std::string text =
        "<section>\n<h2>Strategies</h2>\n<p>All strategies with the same events, the best one "
        "first.</p>\n<div class=\"scroll\"><table>\n<tr><th>strategy</th><th>survived</th>"
        "<th>restores</th><th>stalled</th><th>plans</th><th>copied</th><th>bytes</th>"
        "<th>restored</th><th>balance</th></tr>\n";
    for (const std::size_t i : order_) {
      const SimulationResult& one = page_.results[i];
      text += i == order_.front() ? "<tr class=\"chosen\">" : "<tr>";
      for (const std::string& cell :
           {one.strategy, std::to_string(one.survived) + " of " + std::to_string(one.failures),
            std::to_string(one.restores), text::FormatSeconds(Seconds(one.stalled_ms)),
            std::to_string(one.plans), std::to_string(one.transfers), Bytes(one.bytes),
            Bytes(one.restored_bytes), Fixed(one.imbalance_mean, 3)}) {
        text += "<td>" + html::Escape(cell) + "</td>";
      }
      text += "</tr>\n";
    }
    return text + "</table></div>\n</section>\n";
  }

  static std::string Section(const std::string& title, const std::string& what,
                             const std::string& chart) {
    return "<section class=\"chart\">\n<h2>" + title + "</h2>\n<p>" + what +
           "</p>\n<div class=\"scroll\">" + chart + "</div>\n</section>\n";
  }

  std::vector<double> FailureTimes() const {
    std::vector<double> times;
    for (const SimulationStep& step : first_.steps) {
      if (step.nodes_removed > 0) times.push_back(At(step));
    }
    return times;
  }

  std::string Balance() const {
    html::Chart chart;
    chart.label = "balance over time";
    chart.x_name = "seconds";
    chart.events = FailureTimes();
    const std::size_t shown = std::min(order_.size(), html::Curve::kStyles);
    for (std::size_t i = 0; i < shown; ++i) {
      const SimulationResult& one = page_.results[order_[i]];
      html::Curve curve{one.strategy, i, {}, first_.steps.size() <= 40};
      for (const SimulationStep& step : one.steps) {
        if (step.state == SimulationStep::State::kStalled) continue;
        curve.points.push_back(
            {At(step), step.imbalance, one.strategy + ": " + Fixed(step.imbalance, 3)});
      }
      if (!curve.points.empty()) chart.curves.push_back(std::move(curve));
    }
    std::string what = "Of every new plan. Dotted lines are failures.";
    if (shown < order_.size()) {
      what += " The best " + std::to_string(shown) + " strategies.";
    }
    return Section("Balance", what, html::ChartMarkup(chart));
  }

  std::string Nodes() const {
    html::Chart chart;
    chart.label = "live nodes over time";
    chart.x_name = "seconds";
    chart.events = FailureTimes();
    html::Curve curve{"live nodes", 0, {}, false};
    for (std::size_t i = 0; i < first_.steps.size(); ++i) {
      const SimulationStep& step = first_.steps[i];
      if (i > 0) curve.points.push_back({At(step), Count(first_.steps[i - 1].nodes_live), ""});
      curve.points.push_back({At(step), Count(step.nodes_live), ""});
    }
    chart.curves.push_back(std::move(curve));
    return Section("Nodes", "Nodes that can store experts. Dotted lines are failures.",
                   html::ChartMarkup(chart));
  }

  static double Count(std::uint64_t number) { return static_cast<double>(number); }

  std::string Timeline() const {
    html::Timeline timeline;
    timeline.label = "copies, and times without a plan";
    timeline.seconds = seconds();
    timeline.stretch_name = "without a plan";
    const SimulationResult& best = page_.results[order_.front()];
    html::Timeline::Bars copied{"replicas copied (" + best.strategy + ")", 3,
                                std::vector<double>(kSlices)};
    for (const SimulationStep& step : best.steps) {
      const auto slice = static_cast<std::size_t>(At(step) / seconds() * kSlices);
      copied.values[std::min(slice, kSlices - 1)] += Count(step.transfers);
    }
    timeline.bars.push_back(std::move(copied));
    for (const std::size_t i : order_) {
      const SimulationResult& one = page_.results[i];
      html::Timeline::Row row{one.strategy, {}};
      for (std::size_t s = 0; s < one.steps.size(); ++s) {
        if (one.steps[s].state != SimulationStep::State::kStalled) continue;
        const double end = s + 1 < one.steps.size() ? At(one.steps[s + 1]) : seconds();
        row.stretches.push_back({At(one.steps[s]), end});
      }
      timeline.rows.push_back(std::move(row));
    }
    for (const double at : FailureTimes()) timeline.events.push_back({at, ""});
    return Section("Timeline",
                   "Replicas that are copied after each event, and times in which a strategy has "
                   "no plan for the remaining nodes. Vertical lines are failures.",
                   html::TimelineMarkup(timeline));
  }

  static std::string Change(const SimulationStep& step) {
    std::string text;
    if (step.nodes_removed > 0) text = Plural(step.nodes_removed, "node") + " left";
    if (step.nodes_added > 0) {
      text += (text.empty() ? "" : ", ") + Plural(step.nodes_added, "node") + " joined";
    }
    return text.empty() ? "new plan" : text;
  }

  static std::string Outcome(const SimulationStep& step) {
    switch (step.state) {
      case SimulationStep::State::kStarted:
        return "first plan";
      case SimulationStep::State::kMigrated:
        return "continued";
      case SimulationStep::State::kRestored:
        return step.experts_lost == 0
                   ? "restored from a checkpoint"
                   : Plural(step.experts_lost, "expert") + " lost, restored from a checkpoint";
      case SimulationStep::State::kStalled:
        return "no plan: " + step.reason;
    }
    return "";
  }

  std::string Events() const {
    const SimulationResult& best = page_.results[order_.front()];
    std::string text =
        "<section>\n<h2>Events</h2>\n<p>What happens with strategy " + html::Escape(best.strategy) +
        ".</p>\n<div class=\"scroll\"><table>\n<tr><th>time</th><th>iteration</th>"
        "<th class=\"text\">event</th><th>live</th><th class=\"text\">outcome</th><th>copied</th>"
        "<th>bytes</th><th>before</th><th>after</th></tr>\n";
    for (std::size_t i = 0; i < std::min(best.steps.size(), kRowsShown); ++i) {
      const SimulationStep& step = best.steps[i];
      const bool stalled = step.state == SimulationStep::State::kStalled;
      text += "<tr><td>" + text::FormatSeconds(At(step)) + "</td><td>" +
              std::to_string(step.iteration) + "</td><td class=\"text\">" + Change(step) +
              "</td><td>" + std::to_string(step.nodes_live) + "</td><td class=\"text\">" +
              html::Escape(text::Printable(Outcome(step))) + "</td><td>" +
              std::to_string(step.transfers) + "</td><td>" + Bytes(step.bytes) + "</td><td>" +
              (step.imbalance_before > 0 ? Fixed(step.imbalance_before, 3) : "–") + "</td><td>" +
              (stalled ? "–" : Fixed(step.imbalance, 3)) + "</td></tr>\n";
    }
    text += "</table></div>\n";
    if (best.steps.size() > kRowsShown) {
      text += "<p>The first " + std::to_string(kRowsShown) + " of " +
              std::to_string(best.steps.size()) + "; --json has all.</p>\n";
    }
    return text + "</section>\n";
  }

  const FailuresPage& page_;
  const SimulationResult& first_;
  std::uint64_t begin_ms_;
  std::vector<std::size_t> order_;  ///< of the results, the best one first
};

}  // namespace

std::string FailuresPageText(const FailuresPage& page) { return Page(page).Text(); }

}  // namespace shardwright::placement
