// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "support/html/chart.h"

namespace shardwright::html {

/// Events over time: stacked bars of equal time slices, above rows that mark time intervals.
struct Timeline {
  static constexpr std::size_t kStyles = 4;

  struct Bars {
    std::string name;
    std::size_t style = 0;       ///< below kStyles
    std::vector<double> values;  ///< one per slice
  };
  struct Interval {
    double begin = 0;
    double end = 0;
  };
  struct Row {
    std::string name;
    std::vector<Interval> stretches;
  };
  struct Event {
    double at = 0;
    std::string name;
  };

  std::string label;  ///< text for screen readers
  double seconds = 0;
  Unit unit = Unit::kCount;  ///< unit of the bars
  std::vector<Bars> bars;
  std::string stretch_name;  ///< name of the marked intervals, for the legend
  std::vector<Row> rows;
  std::vector<Event> events;  ///< vertical lines
};

/// Returns the timeline as HTML: a legend, then an inline SVG without scripts.
/// \pre seconds is positive; all bars have the same number of slices, at least 1; finite numbers
/// Pure.
std::string TimelineMarkup(const Timeline& timeline);

}  // namespace shardwright::html
