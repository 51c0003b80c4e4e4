// SPDX-License-Identifier: Apache-2.0
#include "support/text/table.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "support/base/result.h"
#include "support/text/text.h"

namespace shardwright::text {
namespace {

constexpr std::size_t kGap = 2;
constexpr std::size_t kNarrowest = 8;

void AppendCell(std::string& line, const std::string& cell, Table::Align align, std::size_t width) {
  const std::string shown = Truncate(cell, width);
  const std::size_t fill = width - DisplayWidth(shown);
  if (align == Table::Align::kRight) line.append(fill, ' ');
  line += shown;
  if (align == Table::Align::kLeft) line.append(fill, ' ');
}

}  // namespace

Table::Table(std::vector<Column> columns) : columns_(std::move(columns)) {
  SW_CHECK(!columns_.empty());
}

void Table::AddRow(std::vector<std::string> cells) {
  SW_CHECK(cells.size() == columns_.size());
  for (std::string& cell : cells) cell = Printable(cell);
  rows_.push_back(std::move(cells));
}

std::vector<std::size_t> Table::Widths(std::size_t width) const {
  std::vector<std::size_t> widths;
  for (std::size_t c = 0; c < columns_.size(); ++c) {
    std::size_t widest = std::max<std::size_t>(DisplayWidth(columns_[c].name), 1);
    for (const auto& row : rows_) widest = std::max(widest, DisplayWidth(row[c]));
    widths.push_back(widest);
  }
  if (width == 0) return widths;
  std::size_t total = std::accumulate(widths.begin(), widths.end(), kGap * (widths.size() - 1));
  while (total > width) {
    // Shrinks the widest of the columns that may shrink, so that several end up with equal widths.
    std::size_t victim = widths.size();
    for (std::size_t c = 0; c < widths.size(); ++c) {
      if (!columns_[c].shrinks || widths[c] <= kNarrowest) continue;
      if (victim == widths.size() || widths[c] > widths[victim]) victim = c;
    }
    if (victim == widths.size()) break;
    --widths[victim];
    --total;
  }
  return widths;
}

std::string Table::Render(std::size_t width) const {
  const std::vector<std::size_t> widths = Widths(width);
  std::string text;
  const auto append = [&](const auto& cell_of) {
    std::string line;
    for (std::size_t c = 0; c < columns_.size(); ++c) {
      if (c != 0) line.append(kGap, ' ');
      AppendCell(line, cell_of(c), columns_[c].align, widths[c]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  };
  append([&](std::size_t c) -> const std::string& { return columns_[c].name; });
  for (const auto& row : rows_) {
    append([&](std::size_t c) -> const std::string& { return row[c]; });
  }
  return text;
}

std::string Legend(const std::string& meaning) {
  std::string text = "\n";
  for (const std::string& line : Wrap(meaning, 98)) text += line + "\n";
  return text;
}

}  // namespace shardwright::text
