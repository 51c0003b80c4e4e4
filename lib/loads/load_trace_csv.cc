// CSV of loads. With a heading: a row per count, columns by name in any order:
//   layer,expert,tokens [,iteration] [,rank]     (rows of several ranks add up)
// Without one: a row per layer, a column per expert.

#include <algorithm>
#include <charconv>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "base/checked.h"
#include "base/limits.h"
#include "loads/load_trace_internal.h"

namespace shardwright::loads {
namespace {

constexpr std::uint64_t kColumns = limits::kMoeExperts;

/// Lines of a text, numbered, blank ones and comments left out.
class Lines {
 public:
  explicit Lines(std::string_view text) : rest_(text) {}

  bool Next() {
    while (!rest_.empty()) {
      const std::string_view whole = rest_.substr(0, rest_.find('\n'));
      rest_.remove_prefix(std::min(rest_.size(), whole.size() + 1));
      ++number_;
      line_ = whole;
      while (!line_.empty() && (line_.back() == '\r' || line_.back() == ' ')) {
        line_.remove_suffix(1);
      }
      if (!line_.empty() && line_.front() != '#') return true;
    }
    return false;
  }
  std::string_view line() const { return line_; }
  std::uint64_t number() const { return number_; }

 private:
  std::string_view rest_;
  std::string_view line_;
  std::uint64_t number_ = 0;
};

std::vector<std::string_view> Cells(std::string_view line) {
  std::vector<std::string_view> cells;
  while (true) {
    const std::size_t comma = line.find(',');
    std::string_view cell = line.substr(0, comma);
    while (!cell.empty() && (cell.front() == ' ' || cell.front() == '\t')) cell.remove_prefix(1);
    while (!cell.empty() && (cell.back() == ' ' || cell.back() == '\t')) cell.remove_suffix(1);
    cells.push_back(cell);
    if (comma == std::string_view::npos || cells.size() > kColumns) return cells;
    line.remove_prefix(comma + 1);
  }
}

Result<std::uint64_t> Number(std::string_view cell, const std::string& where) {
  std::uint64_t whole = 0;
  const char* const end = cell.data() + cell.size();
  const auto [at, error] = std::from_chars(cell.data(), end, whole);
  if (!cell.empty() && error == std::errc() && at == end) {
    if (whole <= limits::kMoeTokens) return whole;
    return CountOf(static_cast<double>(whole), where);
  }
  double real = 0;
  const auto [stop, wrong] = std::from_chars(cell.data(), end, real);
  if (cell.empty() || wrong != std::errc() || stop != end) {
    return Fail(Errc::kBadInput,
                where + ": \"" + std::string(cell.substr(0, 24)) + "\" is not a count");
  }
  return CountOf(real, where);
}

bool IsHeading(const std::vector<std::string_view>& cells) {
  return std::any_of(cells.begin(), cells.end(), [](std::string_view cell) {
    return cell == "layer" || cell == "expert" || cell == "tokens" || cell == "count";
  });
}

/// Where the columns of the long form are.
struct Columns {
  std::size_t count = 0;
  std::size_t layer = 0;
  std::size_t expert = 0;
  std::size_t tokens = 0;
  std::optional<std::size_t> iteration;
  std::optional<std::size_t> rank;
};

Result<Columns> ReadHeading(const std::vector<std::string_view>& cells, const std::string& where) {
  Columns columns;
  columns.count = cells.size();
  std::optional<std::size_t> layer;
  std::optional<std::size_t> expert;
  std::optional<std::size_t> tokens;
  const auto column = [&](std::string_view name) -> std::optional<std::size_t>* {
    if (name == "layer") return &layer;
    if (name == "expert") return &expert;
    if (name == "tokens" || name == "count") return &tokens;
    if (name == "iteration" || name == "step") return &columns.iteration;
    if (name == "rank") return &columns.rank;
    return nullptr;
  };
  for (std::size_t i = 0; i < cells.size(); ++i) {
    std::optional<std::size_t>* const at = column(cells[i]);
    if (at == nullptr || at->has_value()) {
      return Fail(Errc::kBadInput, where + ": column \"" + std::string(cells[i].substr(0, 24)) +
                                       "\" " + (at == nullptr ? "is unknown" : "twice"));
    }
    *at = i;
  }
  if (!layer || !expert || !tokens) {
    return Fail(Errc::kBadInput, where + ": columns layer, expert and tokens expected");
  }
  columns.layer = *layer;
  columns.expert = *expert;
  columns.tokens = *tokens;
  return columns;
}

using Cell = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>;  // iteration, layer, expert

/// Turns counts by cell into records; a cell that is missing is an error.
Result<LoadTrace> FromCells(const std::map<Cell, std::uint64_t>& counts, const std::string& where) {
  LoadTrace trace;
  trace.format = "csv";
  std::uint64_t experts = 0;
  for (const auto& [cell, tokens] : counts) experts = std::max(experts, std::get<2>(cell) + 1);
  auto at = counts.begin();
  while (at != counts.end()) {
    const std::uint64_t iteration = std::get<0>(at->first);
    const std::string place = where + ": iteration " + std::to_string(iteration);
    RecordBuilder record(place);
    while (at != counts.end() && std::get<0>(at->first) == iteration) {
      const std::uint64_t layer = std::get<1>(at->first);
      std::vector<std::uint64_t> row;
      for (std::uint64_t e = 0; e < experts; ++e, ++at) {
        if (at == counts.end() || at->first != Cell{iteration, layer, e}) {
          return Fail(Errc::kBadInput, place + ": no count for " + CellName(layer, e));
        }
        row.push_back(at->second);
      }
      SW_TRY(record.Add(layer, std::move(row)));
    }
    SW_TRY(Append(&trace, iteration, record, place));
  }
  SW_TRY(Finish(&trace, where));
  return trace;
}

Result<LoadTrace> ParseLong(Lines lines, const Columns& columns, const std::string& where) {
  std::map<Cell, std::uint64_t> counts;
  std::set<std::pair<Cell, std::uint64_t>> seen;
  while (lines.Next()) {
    const std::string place = where + ":" + std::to_string(lines.number());
    const auto cells = Cells(lines.line());
    if (cells.size() != columns.count) {
      return Fail(Errc::kBadInput, place + ": " + std::to_string(columns.count) +
                                       " columns expected, found " + std::to_string(cells.size()));
    }
    const auto optional = [&](const std::optional<std::size_t>& column) -> Result<std::uint64_t> {
      if (!column) return std::uint64_t{0};
      return Number(cells[*column], place);
    };
    SW_TRY_ASSIGN(const std::uint64_t iteration, optional(columns.iteration));
    SW_TRY_ASSIGN(const std::uint64_t rank, optional(columns.rank));
    SW_TRY_ASSIGN(const std::uint64_t layer, Number(cells[columns.layer], place));
    SW_TRY_ASSIGN(const std::uint64_t expert, Number(cells[columns.expert], place));
    if (layer >= limits::kMoeLayers || expert >= limits::kMoeExperts) {
      return Fail(Errc::kLimit, place + ": " + CellName(layer, expert) + ": at most " +
                                    std::to_string(limits::kMoeLayers) + " layers of " +
                                    std::to_string(limits::kMoeExperts));
    }
    SW_TRY_ASSIGN(const std::uint64_t tokens,
                  Number(cells[columns.tokens], place + ": " + CellName(layer, expert)));
    const Cell cell{iteration, layer, expert};
    if (!seen.insert({cell, rank}).second) {
      return Fail(Errc::kBadInput, place + ": " + CellName(layer, expert) + " twice");
    }
    std::uint64_t& sum = counts[cell];
    SW_TRY_ASSIGN(sum, CheckedAdd(sum, tokens));
    if (seen.size() > limits::kMoeCounts) {
      return Fail(Errc::kLimit,
                  place + ": more than " + std::to_string(limits::kMoeCounts) + " counts");
    }
  }
  return FromCells(counts, where);
}

}  // namespace

Result<LoadTrace> ParseCsvLoads(std::string_view text, const std::string& where) {
  Lines lines(text);
  if (!lines.Next()) return Fail(Errc::kBadInput, where + ": holds no loads");
  const auto first = Cells(lines.line());
  if (IsHeading(first)) {
    SW_TRY_ASSIGN(const Columns columns,
                  ReadHeading(first, where + ":" + std::to_string(lines.number())));
    return ParseLong(lines, columns, where);
  }
  LoadTrace trace;
  trace.format = "csv";
  RecordBuilder record(where);
  std::uint64_t layer = 0;
  do {
    std::vector<std::uint64_t> row;
    const std::string place = where + ":" + std::to_string(lines.number());
    for (const std::string_view cell : Cells(lines.line())) {
      SW_TRY_ASSIGN(const std::uint64_t count,
                    Number(cell, place + ": " + CellName(layer, row.size())));
      row.push_back(count);
    }
    SW_TRY(record.Add(layer++, std::move(row)));
  } while (lines.Next());
  SW_TRY(Append(&trace, 0, record, where));
  SW_TRY(Finish(&trace, where));
  return trace;
}

}  // namespace shardwright::loads
