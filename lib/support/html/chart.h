// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace shardwright::html {

/// Kind of the numbers on an axis.
enum class Unit : std::uint8_t { kCount, kBytes, kShare, kSeconds };

/// A point of a curve.
struct Point {
  double x = 0;
  double y = 0;
  std::string note;  ///< tooltip in plain text
};

/// One curve. Curves with the same style have the same color, dashes and markers in every chart.
struct Curve {
  static constexpr std::size_t kStyles = 7;

  std::string name;
  std::size_t style = 0;  ///< below kStyles
  std::vector<Point> points;
  bool marked = true;  ///< has a marker at every point
  bool level = false;  ///< has one point, drawn as a horizontal line over the whole width
};

/// Curves with a common x axis. The y axis starts at 0.
struct Chart {
  std::string label;  ///< text for screen readers
  std::string x_name;
  bool by_doubling = false;  ///< x axis is logarithmic with base 2; ticks are at the points
  Unit y_unit = Unit::kCount;
  std::vector<Curve> curves;
  std::optional<double> limit;  ///< y of a horizontal line
  std::string limit_name;
  std::vector<double> events;  ///< x of vertical lines
  std::optional<Point> ring;   ///< a point to highlight
};

/// Returns the chart as HTML: a legend, then an inline SVG without scripts. Curves with the
/// same points are drawn once and share one entry of the legend.
/// \pre styles are below kStyles; with by_doubling every x is positive; numbers are finite
/// Pure.
std::string ChartMarkup(const Chart& chart);

}  // namespace shardwright::html
