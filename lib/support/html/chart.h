// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace shardwright::html {

/// What the numbers of an axis are.
enum class Unit : std::uint8_t { kCount, kBytes, kShare, kSeconds };

/// A point of a curve.
struct Point {
  double x = 0;
  double y = 0;
  std::string note;  ///< shown when the pointer rests on it; plain text
};

/// One curve. Curves of a style have its colour, dashes and mark on every chart.
struct Curve {
  static constexpr std::size_t kStyles = 7;

  std::string name;
  std::size_t style = 0;  ///< below kStyles
  std::vector<Point> points;
  bool marked = true;  ///< a mark at every point
  bool level = false;  ///< its one point is drawn as a line over the whole width
};

/// Curves over a common x, y from 0.
struct Chart {
  std::string label;  ///< what it shows, for readers who do not see it
  std::string x_name;
  bool by_doubling = false;  ///< equal steps of x are doublings, ticks stand at the points
  Unit y_unit = Unit::kCount;
  std::vector<Curve> curves;
  std::optional<double> limit;  ///< a line across
  std::string limit_name;
  std::vector<double> events;  ///< x of lines from top to bottom
  std::optional<Point> ring;   ///< a point to stand out
};

/// The chart as markup: a key, then an inline SVG that needs no script. Curves with the same points
/// are drawn once and share an entry of the key.
/// \pre styles are below kStyles; with by_doubling every x is positive; numbers are finite
/// Pure.
std::string ChartMarkup(const Chart& chart);

}  // namespace shardwright::html
