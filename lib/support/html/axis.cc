// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cmath>

#include "support/base/text.h"
#include "support/html/axis_internal.h"
#include "support/html/svg_internal.h"

namespace shardwright::html {
namespace {

constexpr std::array<const char*, 6> kBinary = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};

/// A unit of an axis: its size and its name.
struct Scale {
  double one = 1;
  std::string name;
};

Scale ScaleOf(double top, Unit unit) {
  if (unit == Unit::kShare) return {0.01, "%"};
  if (unit == Unit::kSeconds) return {1, "s"};
  if (unit == Unit::kCount) return {};
  std::size_t power = 0;
  for (double rest = top; rest >= 1024 && power + 1 < kBinary.size(); rest /= 1024) ++power;
  return {std::pow(1024.0, static_cast<double>(power)), kBinary[power]};
}

/// Returns the smallest of 1, 2, 5 times a power of ten that is at least `least`.
double RoundStep(double least) {
  const double power = std::pow(10.0, std::floor(std::log10(least)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= least * (1 - 1e-9)) return factor * power;
  }
  return 10 * power;
}

std::string NumberText(double value, double step) {
  int digits = 0;
  for (double rest = step; rest < 1 - 1e-9 && digits < 9; rest *= 10) ++digits;
  return Fixed(value, digits);
}

}  // namespace

Axis MakeAxis(double top, Unit unit, int steps) {
  if (!std::isfinite(top) || top <= 0) top = unit == Unit::kShare ? 0.01 : 1;
  const Scale scale = ScaleOf(top, unit);
  const double step = RoundStep(top / scale.one / steps);
  Axis axis;
  axis.unit = scale.name;
  const auto count = static_cast<int>(std::ceil(top / scale.one / step - 1e-9));
  for (int i = 0; i <= count; ++i)
    axis.ticks.push_back({i * step * scale.one, NumberText(i * step, step)});
  axis.top = axis.ticks.back().value;
  return axis;
}

std::vector<Tick> TicksAt(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  values.erase(std::unique(values.begin(), values.end()), values.end());
  std::vector<Tick> ticks;
  ticks.reserve(values.size());
  for (const double value : values) ticks.push_back({value, Fixed(value, 0)});
  return ticks;
}

double LabelSpace(const Axis& axis, double least) {
  for (const Tick& tick : axis.ticks) {
    least = std::max(least, kLetter * static_cast<double>(tick.text.size() + 1));
  }
  return least;
}

std::string LabelBelow(double x, double y, double width, const Tick& tick) {
  const double half = kLetter * static_cast<double>(tick.text.size()) / 2;
  return Text(std::min(x, width - half), y, "middle", tick.text);
}

std::string LevelsOf(const Axis& axis, double left, double right, double top, double bottom) {
  std::string text;
  for (const Tick& tick : axis.ticks) {
    const double y = bottom - (bottom - top) * tick.value / axis.top;
    text += Line(left, y, right, y, "axis") + Text(left - 7, y + 4, "end", tick.text) + "\n";
  }
  return text + Text(left - 7, top - 12, "end", axis.unit);
}

}  // namespace shardwright::html
