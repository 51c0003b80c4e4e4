// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "support/html/chart.h"

namespace shardwright::html {

/// Where a value stands along an axis, and what is written beside it.
struct Tick {
  double value = 0;
  std::string text;
};

/// An axis from 0 to at least `top`.
struct Axis {
  double top = 1;
  std::vector<Tick> ticks;
  std::string unit;  ///< of the ticks: "GiB", "%"; empty: none
};

/// Ticks at round numbers (in binary units for bytes), about as many steps as given or fewer.
Axis MakeAxis(double top, Unit unit, int steps);

/// Ticks of a K axis: every value, smallest first, without repeats.
std::vector<Tick> TicksAt(std::vector<double> values);

/// The markup of an upright axis: a line from `left` to `right` at each tick, 0 at `bottom` and the
/// axis's top at `top` (coordinates), with the ticks' texts and the unit before them.
std::string LevelsOf(const Axis& axis, double left, double right, double top, double bottom);

}  // namespace shardwright::html
