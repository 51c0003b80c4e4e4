// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace shardwright::text {

/// Rows in aligned columns, used for --list and other answers.
class Table {
 public:
  enum class Align { kLeft, kRight };
  struct Column {
    std::string name;            ///< heading, in upper case by convention
    Align align = Align::kLeft;  ///< kRight for numbers and sizes
    bool shrinks = false;        ///< may be truncated on a narrow terminal
  };

  /// \pre columns is not empty
  explicit Table(std::vector<Column> columns);

  /// Adds one row and escapes its control characters. \pre as many cells as columns
  void AddRow(std::vector<std::string> cells);

  /// Returns the number of rows, without the heading.
  std::size_t row_count() const { return rows_.size(); }

  /// Returns the heading and the rows, each with a line feed, with two spaces between columns.
  /// \param width  columns of the terminal; 0 for a pipe, where nothing is truncated
  std::string Render(std::size_t width) const;

 private:
  std::vector<std::size_t> Widths(std::size_t width) const;

  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

/// Alignment for columns of numbers.
inline constexpr Table::Align kRight = Table::Align::kRight;

/// Returns the legend of a table: an empty line, then `meaning` in lines of at most 98 columns.
/// Explains headings that are not plain words, as in "BALANCE: busiest gpu / mean."
/// Pure.
std::string Legend(const std::string& meaning);

}  // namespace shardwright::text
