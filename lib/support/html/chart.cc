// SPDX-License-Identifier: Apache-2.0
#include "support/html/chart.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "support/base/result.h"
#include "support/base/text.h"
#include "support/html/axis_internal.h"
#include "support/html/page.h"
#include "support/html/svg_internal.h"
#include "support/text/text.h"

namespace shardwright::html {
namespace {

// Coordinates of the drawing, about one pixel each on a screen with two charts in a row.
constexpr double kWidth = 540;
constexpr double kHeight = 290;
constexpr double kLeftMin = 52;
constexpr double kRight = kWidth - 16;
constexpr double kTop = 26;
constexpr double kBottom = kHeight - 44;
constexpr double kMark = 4;

std::string StyleOf(std::size_t style) { return "s" + std::to_string(style); }

/// Returns the marker of a style. Shapes differ, so that prints without color are readable.
std::string Mark(double x, double y, std::size_t style, const std::string& note) {
  const std::string looks = "mark " + StyleOf(style);
  const std::string title = note.empty() ? "" : "<title>" + Escape(note) + "</title>";
  const auto polygon = [&](std::initializer_list<std::pair<double, double>> corners) {
    std::string points;
    for (const auto& [dx, dy] : corners) {
      points += (points.empty() ? "" : " ") + At(x + dx * kMark) + "," + At(y + dy * kMark);
    }
    return Element("polygon", {{"points", points}, {"class", looks}}, title);
  };
  switch (style) {
    case 1:
      return polygon({{-0.9, -0.9}, {0.9, -0.9}, {0.9, 0.9}, {-0.9, 0.9}});
    case 2:
      return polygon({{0, -1.2}, {1.1, 0.9}, {-1.1, 0.9}});
    case 3:
      return polygon({{0, -1.3}, {1.3, 0}, {0, 1.3}, {-1.3, 0}});
    case 4:
      return polygon({{-1.1, -0.9}, {1.1, -0.9}, {0, 1.2}});
    case 6:
      return polygon({{-0.6, -1}, {0.6, -1}, {1.2, 0}, {0.6, 1}, {-0.6, 1}, {-1.2, 0}});
    default:
      return Element("circle", {{"cx", At(x)}, {"cy", At(y)}, {"r", At(kMark)}, {"class", looks}},
                     title);
  }
}

/// Curves with the same points.
struct Group {
  const Curve* first = nullptr;
  std::string names;
};

bool Same(const Curve& a, const Curve& b) {
  return a.level == b.level && a.marked == b.marked &&
         std::equal(a.points.begin(), a.points.end(), b.points.begin(), b.points.end(),
                    [](const Point& p, const Point& q) {
                      return p.x == q.x && std::abs(p.y - q.y) <= 1e-9 * std::abs(p.y);
                    });
}

std::vector<Group> GroupsOf(const std::vector<Curve>& curves) {
  std::vector<Group> groups;
  for (const Curve& curve : curves) {
    SW_CHECK(curve.style < Curve::kStyles);
    if (curve.points.empty()) continue;
    const auto same = std::find_if(groups.begin(), groups.end(),
                                   [&](const Group& group) { return Same(*group.first, curve); });
    if (same == groups.end()) {
      groups.push_back({&curve, curve.name});
    } else {
      same->names += ", " + curve.name;
    }
  }
  return groups;
}

/// The drawing of one chart.
class Drawing {
 public:
  explicit Drawing(const Chart& chart) : chart_(chart), groups_(GroupsOf(chart.curves)) {
    double top = chart.limit.value_or(0);
    first_ = std::numeric_limits<double>::infinity();
    last_ = -first_;
    for (const Group& group : groups_) {
      for (const Point& point : group.first->points) {
        top = std::max(top, point.y);
        if (group.first->level) continue;
        xs_.push_back(point.x);
        first_ = std::min(first_, point.x);
        last_ = std::max(last_, point.x);
      }
    }
    y_axis_ = MakeAxis(top, chart.y_unit, 5);
    left_ = LabelSpace(y_axis_, kLeftMin);
  }

  std::string Run() {
    std::string text = Key() + "<div class=\"scroll\"><svg class=\"curves\" viewBox=\"0 0 " +
                       Fixed(kWidth, 0) + " " + Fixed(kHeight, 0) +
                       "\" role=\"img\" aria-label=\"" + Escape(chart_.label) + "\">\n";
    text += Axes();
    for (const double event : chart_.events) {
      if (event < first_ || event > last_) continue;
      text += Line(X(event), kTop, X(event), kBottom, "event") + "\n";
    }
    if (chart_.limit) {
      text += Line(left_, Y(*chart_.limit), kRight, Y(*chart_.limit), "limit") + "\n";
    }
    for (const Group& group : groups_) text += CurveMarkup(*group.first);
    if (chart_.limit) text += LimitName();
    if (chart_.ring) {
      text += Element("circle", {{"cx", At(X(chart_.ring->x))},
                                 {"cy", At(Y(chart_.ring->y))},
                                 {"r", At(2.3 * kMark)},
                                 {"class", "ring"}}) +
              "\n";
    }
    return text + "</svg></div>\n";
  }

 private:
  double X(double x) const {
    const auto along = [&](double value) { return chart_.by_doubling ? std::log2(value) : value; };
    if (!(last_ > first_)) return (left_ + kRight) / 2;
    // Keeps markers at the ends away from the axis.
    const double margin = chart_.by_doubling ? 14 : 0;
    const double share = (along(x) - along(first_)) / (along(last_) - along(first_));
    return left_ + margin + (kRight - left_ - 2 * margin) * share;
  }
  double Y(double y) const { return kBottom - (kBottom - kTop) * y / y_axis_.top; }

  std::string Key() const {
    std::string text = "<div class=\"key\">";
    for (const Group& group : groups_) {
      const std::size_t style = group.first->style;
      const std::string mark = group.first->marked ? Mark(17, 6, style, "") : "";
      text += "<span><svg viewBox=\"0 0 34 12\" aria-hidden=\"true\">" +
              Line(0, 6, 34, 6, StyleOf(style)) + mark + "</svg>" + Escape(group.names) + "</span>";
    }
    return text + "</div>\n";
  }

  std::string Axes() const {
    std::string text = LevelsOf(y_axis_, left_, kRight, kTop, kBottom);
    for (const Tick& tick : XTicks()) {
      text += LabelBelow(X(tick.value), kBottom + 20, kWidth, tick);
    }
    return text + Text((left_ + kRight) / 2, kHeight - 6, "middle", chart_.x_name) + "\n";
  }

  std::vector<Tick> XTicks() const {
    if (xs_.empty()) return {};
    if (chart_.by_doubling) return TicksAt(xs_);
    std::vector<Tick> inside;
    for (Tick& tick : MakeAxis(last_, Unit::kCount, 8).ticks) {
      if (tick.value >= first_ && tick.value <= last_) inside.push_back(std::move(tick));
    }
    return inside;
  }

  /// Returns true if a curve or one of its markers is inside a rectangle.
  bool Meets(double x0, double x1, double y0, double y1) const {
    constexpr int kSteps = 50;  // per line between two points
    const auto inside = [&](double x, double y) {
      return x > x0 - kMark && x < x1 + kMark && y > y0 - kMark && y < y1 + kMark;
    };
    for (const Group& group : groups_) {
      const std::vector<Point>& points = group.first->points;
      if (group.first->level && inside((x0 + x1) / 2, Y(points.front().y))) return true;
      if (group.first->level) continue;
      for (std::size_t i = 0; i < points.size(); ++i) {
        const Point& next = points[std::min(i + 1, points.size() - 1)];
        for (int step = 0; step < kSteps; ++step) {
          const double share = static_cast<double>(step) / kSteps;
          const double x = X(points[i].x) + share * (X(next.x) - X(points[i].x));
          if (inside(x, Y(points[i].y) + share * (Y(next.y) - Y(points[i].y)))) return true;
        }
      }
    }
    return false;
  }

  /// Names the limit at a place without curves, if there is one: above its line or below it, at the
  /// right end, at the left end or in the middle.
  std::string LimitName() const {
    constexpr double kLine = 18;
    const double width = kLetter * static_cast<double>(text::DisplayWidth(chart_.limit_name));
    const double y = Y(*chart_.limit);
    double x = kRight - width;
    double base = y - 5;
    const auto free = [&](double from, double top) {
      return top > 0 && top + kLine < kBottom && !Meets(from, from + width, top, top + kLine);
    };
    for (const double from : {kRight - width, left_ + 4, (left_ + kRight - width) / 2}) {
      const bool above = free(from, y - 2 - kLine);
      if (!above && !free(from, y + 2)) continue;
      x = from;
      base = above ? y - 5 : y + 16;
      break;
    }
    const bool right = x + width >= kRight;
    return Text(right ? kRight : x, base, right ? "end" : "start", chart_.limit_name, "name over") +
           "\n";
  }

  std::string CurveMarkup(const Curve& curve) const {
    const std::string style = StyleOf(curve.style);
    if (curve.level) {
      const double y = Y(curve.points.front().y);
      return "<g>" + Line(left_, y, kRight, y, style) + "<title>" +
             Escape(curve.points.front().note) + "</title></g>\n";
    }
    std::string points;
    std::string marks;
    for (const Point& point : curve.points) {
      points += (points.empty() ? "" : " ") + At(X(point.x)) + "," + At(Y(point.y));
      if (curve.marked) marks += Mark(X(point.x), Y(point.y), curve.style, point.note);
    }
    return Element("polyline", {{"points", points}, {"class", style}},
                   "<title>" + Escape(curve.name) + "</title>") +
           marks + "\n";
  }

  const Chart& chart_;
  std::vector<Group> groups_;
  std::vector<double> xs_;
  Axis y_axis_;
  double left_ = kLeftMin;
  double first_ = 0;
  double last_ = 0;
};

}  // namespace

std::string ChartMarkup(const Chart& chart) { return Drawing(chart).Run(); }

}  // namespace shardwright::html
