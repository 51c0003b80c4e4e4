#pragma once

#include <string>
#include <vector>

#include "page/chart.h"

namespace shardwright::page {

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

}  // namespace shardwright::page
