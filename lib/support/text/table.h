// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace shardwright::text {

/// Rows in aligned columns, the answer of --list.
class Table {
 public:
  enum class Align { kLeft, kRight };
  struct Column {
    std::string name;            ///< heading, shown in upper case by convention
    Align align = Align::kLeft;  ///< kRight for numbers and sizes
    bool shrinks = false;        ///< may lose its end when the terminal is narrow
  };

  /// \pre columns is not empty
  explicit Table(std::vector<Column> columns);

  /// Adds one row. Control characters are escaped. \pre as many cells as columns
  void AddRow(std::vector<std::string> cells);

  /// Number of rows, the heading not counted.
  std::size_t row_count() const { return rows_.size(); }

  /// The heading and the rows, each ended by a line feed, columns two spaces apart.
  /// \param width  columns of the terminal; 0 for a pipe, where nothing is ever cut
  std::string Render(std::size_t width) const;

 private:
  std::vector<std::size_t> Widths(std::size_t width) const;

  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

/// For columns of numbers.
inline constexpr Table::Align kRight = Table::Align::kRight;

}  // namespace shardwright::text
