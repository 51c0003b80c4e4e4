// SPDX-License-Identifier: Apache-2.0
#include "support/html/timeline.h"

#include <algorithm>

#include "support/base/result.h"
#include "support/base/text.h"
#include "support/html/axis_internal.h"
#include "support/html/page.h"
#include "support/html/svg_internal.h"
#include "support/text/text.h"

namespace shardwright::html {
namespace {

std::string BarStyle(std::size_t style) { return "bar b" + std::to_string(style); }

std::string Rect(double x, double y, double width, double height, const std::string& style,
                 const std::string& note = "") {
  return Element("rect",
                 {{"x", Fixed(x, 2)},
                  {"y", Fixed(y, 2)},
                  {"width", Fixed(width, 2)},
                  {"height", Fixed(height, 2)},
                  {"class", style}},
                 note.empty() ? "" : "<title>" + Escape(note) + "</title>");
}

/// The drawing of one timeline.
class TimelineDrawing {
 public:
  explicit TimelineDrawing(const Timeline& timeline) : timeline_(timeline) {
    SW_CHECK(timeline.seconds > 0 && !timeline.bars.empty());
    slices_ = timeline.bars.front().values.size();
    SW_CHECK(slices_ > 0);
    double top = 0;
    for (std::size_t i = 0; i < slices_; ++i) {
      double sum = 0;
      for (const Timeline::Bars& bars : timeline.bars) {
        SW_CHECK(bars.values.size() == slices_ && bars.style < Timeline::kStyles);
        sum += bars.values[i];
      }
      top = std::max(top, sum);
    }
    axis_ = MakeAxis(top, timeline.unit, 4);
    bottom_ = kBarsBottom + 10 + kRow * static_cast<double>(timeline.rows.size());
    left_ = LabelSpace(axis_, kLeftMin);
    for (const Timeline::Row& row : timeline.rows) {
      left_ = std::max(left_, 10 + kLetter * static_cast<double>(text::DisplayWidth(row.name)));
    }
  }

  std::string Run() const {
    std::string text = Key() + "<div class=\"scroll wide\"><svg class=\"curves\" viewBox=\"0 0 " +
                       Fixed(kWidth, 0) + " " + Fixed(bottom_ + kFoot, 0) +
                       "\" role=\"img\" aria-label=\"" + Escape(timeline_.label) + "\">\n";
    text += Axes() + Bars() + Rows();
    return text + Events() + "</svg></div>\n";
  }

 private:
  static constexpr double kWidth = 1080;
  static constexpr double kLeftMin = 64;
  static constexpr double kRight = kWidth - 12;
  static constexpr double kTop = 34;
  static constexpr double kBarsBottom = 214;
  static constexpr double kRow = 24;
  static constexpr double kRowBar = 14;
  static constexpr double kFoot = 40;

  double X(double seconds) const { return left_ + (kRight - left_) * seconds / timeline_.seconds; }
  double Y(double value) const { return kBarsBottom - (kBarsBottom - kTop) * value / axis_.top; }

  std::string Key() const {
    std::string text = "<div class=\"key\">";
    for (const Timeline::Bars& bars : timeline_.bars) {
      text += "<span><i class=\"b" + std::to_string(bars.style) + "\"></i>" + Escape(bars.name) +
              "</span>";
    }
    if (!timeline_.rows.empty()) {
      text += "<span><i class=\"b-row\"></i>" + Escape(timeline_.stretch_name) + "</span>";
    }
    return text + "</div>\n";
  }

  std::string Axes() const {
    std::string text = LevelsOf(axis_, left_, kRight, kTop, kBarsBottom);
    for (const Tick& tick : MakeAxis(timeline_.seconds, Unit::kCount, 10).ticks) {
      if (tick.value > timeline_.seconds) continue;
      text += LabelBelow(X(tick.value), bottom_ + 18, kWidth, tick);
    }
    return text + Text((left_ + kRight) / 2, bottom_ + 34, "middle", "seconds") + "\n";
  }

  std::string Bars() const {
    const double width = (kRight - left_) / static_cast<double>(slices_);
    std::string text;
    for (std::size_t i = 0; i < slices_; ++i) {
      double below = 0;
      for (const Timeline::Bars& bars : timeline_.bars) {
        const double value = bars.values[i];
        if (value <= 0) continue;
        text += Rect(left_ + width * static_cast<double>(i), Y(below + value), width,
                     Y(below) - Y(below + value), BarStyle(bars.style), bars.name) +
                "\n";
        below += value;
      }
    }
    return text;
  }

  std::string Rows() const {
    std::string text;
    double y = kBarsBottom + 14;
    for (const Timeline::Row& row : timeline_.rows) {
      text += Text(left_ - 7, y + kRowBar - 3, "end", row.name) +
              Rect(left_, y, kRight - left_, kRowBar, "row") + "\n";
      for (const Timeline::Interval& one : row.stretches) {
        const double from = std::clamp(one.begin, 0.0, timeline_.seconds);
        const double to = std::clamp(one.end, from, timeline_.seconds);
        text += Rect(X(from), y, X(to) - X(from), kRowBar, "bar b-row") + "\n";
      }
      y += kRow;
    }
    return text;
  }

  std::string Events() const {
    std::string text;
    double free = left_;  // least left end of the next name of the lower line
    for (const Timeline::Event& event : timeline_.events) {
      const double x = X(event.at);
      const double width = kLetter * static_cast<double>(text::DisplayWidth(event.name));
      const bool late = x + 3 + width > kRight;  // no room for its name on the right
      const double begin = late ? x - 3 - width : x + 3;
      const bool high = begin < free;  // would cover the name before it
      if (!high) free = begin + width + kLetter;
      text += Line(x, kTop - 6, x, bottom_, "event") +
              Text(late ? x - 3 : x + 3, high ? kTop - 21 : kTop - 8, late ? "end" : "start",
                   event.name, "name") +
              "\n";
    }
    return text;
  }

  const Timeline& timeline_;
  std::size_t slices_ = 0;
  Axis axis_;
  double left_ = 0;
  double bottom_ = 0;
};

}  // namespace

std::string TimelineMarkup(const Timeline& timeline) { return TimelineDrawing(timeline).Run(); }

}  // namespace shardwright::html
