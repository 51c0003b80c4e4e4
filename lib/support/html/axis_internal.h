// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "support/html/chart.h"

namespace shardwright::html {

/// A position on an axis and its label.
struct Tick {
  double value = 0;
  std::string text;
};

/// An axis from 0 to at least `top`.
struct Axis {
  double top = 1;
  std::vector<Tick> ticks;
  std::string unit;  ///< unit of the labels: "GiB", "%"; empty: none
};

/// Width of a letter, in the coordinates of a chart, in narrow windows, where text is largest.
inline constexpr double kLetter = 10;

/// Returns the space that the labels of an axis need on its left, at least `least`.
double LabelSpace(const Axis& axis, double least);

/// Makes an axis with ticks at round numbers (binary ones for bytes), in about `steps` steps.
Axis MakeAxis(double top, Unit unit, int steps);

/// Makes the ticks of an x axis: one per different value, smallest first.
std::vector<Tick> TicksAt(std::vector<double> values);

/// Returns the markup of a label below a horizontal axis. It is centred at `x`, or further left
/// where it would leave the chart, which is `width` wide.
std::string LabelBelow(double x, double y, double width, const Tick& tick);

/// Returns the markup of a vertical axis: a line from `left` to `right` at each tick, and the
/// labels and unit to the left of them. 0 is at coordinate `bottom`, the axis's top at `top`.
std::string LevelsOf(const Axis& axis, double left, double right, double top, double bottom);

}  // namespace shardwright::html
