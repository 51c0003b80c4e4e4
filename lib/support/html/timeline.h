// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "support/html/chart.h"

namespace shardwright::html {

/// What happened over a time: bars of equal slices of it, stacked, above rows of stretches.
struct Timeline {
  static constexpr std::size_t kStyles = 4;

  struct Bars {
    std::string name;
    std::size_t style = 0;       ///< below kStyles
    std::vector<double> values;  ///< of each slice
  };
  struct Stretch {
    double begin = 0;
    double end = 0;
  };
  struct Row {
    std::string name;
    std::vector<Stretch> stretches;
  };
  struct Event {
    double at = 0;
    std::string name;
  };

  std::string label;  ///< what it shows, for readers who do not see it
  double seconds = 0;
  Unit unit = Unit::kCount;  ///< of a bar
  std::vector<Bars> bars;
  std::string stretch_name;  ///< of what a row is marked with
  std::vector<Row> rows;
  std::vector<Event> events;  ///< lines from top to bottom
};

/// The timeline as markup: a key, then an inline SVG that needs no script.
/// \pre seconds is positive; all bars have the same slices, one at least; numbers are finite
/// Pure.
std::string TimelineMarkup(const Timeline& timeline);

}  // namespace shardwright::html
