// SPDX-License-Identifier: Apache-2.0
// Reads CSV files with token counts. With a heading: a row per count, columns in any order:
//   layer,expert,tokens [,iteration] [,rank]     (rows of several ranks add up)
//   layer_id,expert_id,count                     (SGLang's; counts without a row are 0)
// Without a heading: a row per layer, a column per expert.

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "support/base/checked.h"
#include "support/base/limits.h"
#include "support/base/text.h"
#include "token_counts/trace_internal.h"
#include "token_counts/window.h"

namespace shardwright::token_counts {
namespace {

constexpr std::uint64_t kColumns = limits::kMoeExperts;

/// Numbered lines of a text, without blank lines and comments.
class Lines {
 public:
  explicit Lines(std::string_view text) : rest_(text) {}

  bool Next() {
    while (!rest_.empty()) {
      const std::string_view whole = rest_.substr(0, rest_.find('\n'));
      unterminated_ = whole.size() == rest_.size();
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
  /// Removes zero bytes at the end, as a power loss leaves them. Returns whether there are any.
  bool RemoveZeros() {
    const std::size_t bytes = rest_.find_last_not_of('\0') + 1;
    const bool any = bytes < rest_.size();
    rest_ = rest_.substr(0, bytes);
    return any;
  }
  std::string_view line() const { return line_; }
  std::uint64_t number() const { return number_; }
  /// Returns true for a last line without a line break.
  bool unterminated() const { return unterminated_; }

 private:
  std::string_view rest_;
  std::string_view line_;
  std::uint64_t number_ = 0;
  bool unterminated_ = false;
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
  if (const auto whole = NumberIn<std::uint64_t>(cell)) return WholeCountOf(*whole, where);
  const auto real = NumberIn<double>(cell);
  if (!real) {
    return Fail(Errc::kBadInput, where, ": \"", cell.substr(0, 24), "\" is not a count");
  }
  return CountOf(*real, where);
}

bool IsHeading(const std::vector<std::string_view>& cells) {
  return std::any_of(cells.begin(), cells.end(), [](std::string_view cell) {
    return cell == "layer" || cell == "layer_id" || cell == "expert" || cell == "expert_id" ||
           cell == "tokens" || cell == "count";
  });
}

/// Column indices of a table with a heading.
struct Columns {
  std::size_t count = 0;
  std::size_t layer = 0;
  std::size_t expert = 0;
  std::size_t tokens = 0;
  std::optional<std::size_t> iteration;
  std::optional<std::size_t> rank;
  bool sparse = false;  ///< counts without a row are 0
};

Result<Columns> ReadHeading(const std::vector<std::string_view>& cells, const std::string& where) {
  Columns columns;
  columns.count = cells.size();
  std::optional<std::size_t> layer;
  std::optional<std::size_t> expert;
  std::optional<std::size_t> tokens;
  const auto column = [&](std::string_view name) -> std::optional<std::size_t>* {
    if (name == "layer" || name == "layer_id") return &layer;
    if (name == "expert" || name == "expert_id") return &expert;
    if (name == "tokens" || name == "count") return &tokens;
    if (name == "iteration" || name == "step") return &columns.iteration;
    if (name == "rank") return &columns.rank;
    return nullptr;
  };
  for (std::size_t i = 0; i < cells.size(); ++i) {
    std::optional<std::size_t>* const at = column(cells[i]);
    if (at == nullptr || at->has_value()) {
      return Fail(Errc::kBadInput, where, ": column \"", cells[i].substr(0, 24), "\" ",
                  (at == nullptr ? "is unknown: known columns are layer (layer_id), expert "
                                   "(expert_id), tokens (count), iteration "
                                   "(step) and rank"
                                 : "occurs twice"));
    }
    *at = i;
    columns.sparse = columns.sparse || cells[i] == "layer_id" || cells[i] == "expert_id";
  }
  if (!layer || !expert || !tokens) {
    return Fail(Errc::kBadInput, where,
                ": a table of counts lacks a column: layer (or layer_id), "
                "expert (or expert_id) and tokens (or count) expected");
  }
  columns.layer = *layer;
  columns.expert = *expert;
  columns.tokens = *tokens;
  return columns;
}

/// Usually iteration, layer and expert.
using Cell = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>;

/// Returns the layers with expert numbers in the lower half only. They may have fewer experts than
/// the others. Returns an empty text if there are none.
/// \param experts_of  by layer: the highest expert number plus 1; 0: no rows
/// \param most  the largest of these
std::string SmallLayers(const std::map<std::uint64_t, std::uint64_t>& experts_of,
                        std::uint64_t most) {
  std::vector<std::uint64_t> layers;
  std::uint64_t highest = 0;
  for (const auto& [layer, experts] : experts_of) {
    if (experts == 0 || experts > most / 2) continue;
    layers.push_back(layer);
    highest = std::max(highest, experts - 1);
  }
  if (layers.empty()) return "";
  return StrCat(" in every layer; in layer", layers.size() > 1 ? "s " : " ", Ranges(layers),
                " no expert_id is above ", highest,
                ": for layers with fewer experts use the columns layer,expert,tokens, with a row "
                "for every count");
}

/// Converts counts by cell to records. A missing cell is an error. In a sparse table it is 0, all
/// layers have the same number of experts, and a layer without rows between others is one
/// without tokens.
Status AddCells(const std::map<Cell, std::uint64_t>& counts, bool sparse, const std::string& where,
                TokenTrace* trace) {
  std::uint64_t most = 0;
  std::map<std::uint64_t, std::uint64_t> experts_of;  // by layer; 0: no rows
  for (const auto& [cell, tokens] : counts) {
    std::uint64_t& experts = experts_of[std::get<1>(cell)];
    experts = std::max(experts, std::get<2>(cell) + 1);
    most = std::max(most, experts);
  }
  if (sparse && !experts_of.empty()) {
    const std::uint64_t last = experts_of.rbegin()->first;
    for (std::uint64_t l = experts_of.begin()->first; l < last; ++l) experts_of.try_emplace(l, 0);
    if (experts_of.size() * most > limits::kMoeCounts) {
      return Fail(Errc::kLimit, where, ": ", experts_of.size(), " layers of ", most,
                  " experts: more than ", limits::kMoeCounts, " counts");
    }
  }
  std::uint64_t missing = 0;
  auto at = counts.begin();
  while (at != counts.end()) {
    const std::uint64_t iteration = std::get<0>(at->first);
    const std::string place = where + ": iteration " + std::to_string(iteration);
    RecordBuilder record(place);
    const auto add = [&](std::uint64_t layer, std::uint64_t experts) -> Status {
      std::vector<std::uint64_t> row;
      for (std::uint64_t e = 0; e < experts; ++e) {
        const bool given = at != counts.end() && at->first == Cell{iteration, layer, e};
        if (!given && !sparse) {
          return Fail(Errc::kBadInput, place, ": no count for ", CellName(layer, e));
        }
        missing += given ? 0 : 1;
        row.push_back(given ? (at++)->second : 0);
      }
      return record.Add(layer, std::move(row));
    };
    if (sparse) {
      for (const auto& layer : experts_of) SW_TRY(add(layer.first, most));
    }
    while (at != counts.end() && std::get<0>(at->first) == iteration) {
      const std::uint64_t layer = std::get<1>(at->first);
      SW_TRY(add(layer, experts_of[layer]));
    }
    SW_TRY(Append(trace, iteration, record, place));
  }
  if (missing > 0) {
    trace->notes.push_back(StrCat(where, ": ", missing,
                                  " counts have no row and are set to 0; the highest "
                                  "expert_id implies ",
                                  most, " experts", SmallLayers(experts_of, most)));
  }
  return {};
}

/// Collects the rows of a table with a heading, and adds the counts of all ranks.
class Rows {
 public:
  Rows(const Columns& columns, TokenTrace* trace) : columns_(columns), trace_(trace) {}

  /// \param place  place of the line
  Status Add(const std::vector<std::string_view>& cells, const std::string& place) {
    if (cells.size() != columns_.count) {
      return Fail(Errc::kBadInput, place, ": ", columns_.count, " columns expected, found ",
                  cells.size());
    }
    const auto optional = [&](const std::optional<std::size_t>& column) -> Result<std::uint64_t> {
      if (!column) return std::uint64_t{0};
      return Number(cells[*column], place);
    };
    SW_TRY_ASSIGN(const std::uint64_t iteration, optional(columns_.iteration));
    SW_TRY_ASSIGN(const std::uint64_t rank, optional(columns_.rank));
    SW_TRY_ASSIGN(const std::uint64_t layer, Number(cells[columns_.layer], place));
    SW_TRY_ASSIGN(const std::uint64_t expert, Number(cells[columns_.expert], place));
    if (layer >= limits::kMoeLayers || expert >= limits::kMoeExperts) {
      return Fail(Errc::kLimit, place, ": ", CellName(layer, expert), ": at most ",
                  limits::kMoeLayers, " layers of ", limits::kMoeExperts);
    }
    SW_TRY_ASSIGN(const std::uint64_t tokens,
                  Number(cells[columns_.tokens], place + ": " + CellName(layer, expert)));
    return Enter({{iteration, layer, expert}, rank}, tokens, place);
  }

  /// Removes the iterations of abandoned runs. Tables that are sorted by layer first, so that
  /// other iterations are between the rows of one, have none.
  void DropAbandoned() {
    if (!grouped_) return;
    for (const std::uint64_t iteration : AbandonedIn(order_, trace_)) Drop(iteration);
  }

  /// Removes the last iteration, if its rows are only the first rows of the iteration before. In
  /// a sparse table it may lack any rows, so that only a warning is possible.
  /// \param torn  the last line is truncated, and a warning states this: removes the iteration
  ///        also if its rows are only fewer
  void DropIncomplete(bool torn, const std::string& where) {
    if (columns_.sparse && !grouped_) return;
    const std::size_t rows = current_.size();
    const bool fewer = rows > 0 && rows < previous_.size();
    const std::string last = StrCat(where, ": iteration ", newest_, ", the last one, has ",
                                    Plural(rows, "row"), " of ", previous_.size(), ": ");
    if (torn ? fewer : !columns_.sparse && IsCut()) {
      Drop(newest_);
      trace_->torn = true;
      if (!torn) trace_->warnings.push_back(last + "it is truncated and is ignored");
    } else if (columns_.sparse && fewer && rows * 2 <= previous_.size()) {
      trace_->warnings.push_back(last + "it may be truncated");
    }
  }

  const std::map<Cell, std::uint64_t>& counts() const { return counts_; }

 private:
  using Row = std::pair<Cell, std::uint64_t>;  // with the rank

  Status Enter(const Row& row, std::uint64_t tokens, const std::string& place) {
    const auto& [iteration, layer, expert] = row.first;
    if (iteration != newest_) EndIteration(iteration < newest_);
    if (seen_.contains(row)) {
      // The first row of an iteration appears again, so the whole iteration is repeated.
      const bool restart = columns_.iteration && first_.at(iteration) == row;
      if (!restart) {
        return Fail(Errc::kBadInput, place, ": ", CellName(layer, expert), " occurs twice");
      }
      if (iteration == newest_) EndIteration(true);
      DropFrom(iteration);
      WarnOfRestart(trace_, place, iteration, "occurs again");
    }
    current_.emplace_back(layer, expert, row.second);
    seen_.insert(row);
    if (first_.try_emplace(iteration, row).second) {
      order_.push_back({iteration, place});
    } else if (iteration != newest_) {
      grouped_ = false;
    }
    newest_ = iteration;
    std::uint64_t& sum = counts_[row.first];
    SW_TRY_ASSIGN(sum, CheckedAdd(sum, tokens));
    if (seen_.size() <= limits::kMoeCounts) return {};
    return Fail(Errc::kLimit, place, ": more than ", limits::kMoeCounts, " counts");
  }

  /// Returns whether the rows of the current iteration are only the first rows of the one before.
  bool IsCut() const {
    return !current_.empty() && current_.size() < previous_.size() &&
           std::equal(current_.begin(), current_.end(), previous_.begin());
  }

  /// \param restart  the next row is of a new run, so that the iteration may be incomplete
  void EndIteration(bool restart) {
    if (!restart || !IsCut()) previous_ = std::move(current_);
    current_.clear();
  }

  void Drop(std::uint64_t iteration) {
    const Cell end{iteration + 1, 0, 0};
    counts_.erase(counts_.lower_bound({iteration, 0, 0}), counts_.lower_bound(end));
    seen_.erase(seen_.lower_bound({{iteration, 0, 0}, 0}), seen_.lower_bound({end, 0}));
  }

  void DropFrom(std::uint64_t iteration) {
    counts_.erase(counts_.lower_bound({iteration, 0, 0}), counts_.end());
    seen_.erase(seen_.lower_bound({{iteration, 0, 0}, 0}), seen_.end());
    first_.erase(first_.lower_bound(iteration), first_.end());
    std::erase_if(order_, [&](const LogEntry& one) { return one.iteration >= iteration; });
  }

  const Columns& columns_;
  TokenTrace* trace_;
  std::map<Cell, std::uint64_t> counts_;
  std::set<Row> seen_;
  std::map<std::uint64_t, Row> first_;  // by iteration
  std::vector<LogEntry> order_;         // of the iterations in first_
  bool grouped_ = true;                 // the rows of each iteration follow each other
  std::uint64_t newest_ = 0;            // iteration of the last row
  // Layer, expert and rank of the last rows in succession that have one iteration, and of those
  // of the iteration before them.
  std::vector<Cell> current_;
  std::vector<Cell> previous_;
};

Result<TokenTrace> ParseLong(Lines lines, const Columns& columns, const std::string& where) {
  TokenTrace trace;
  trace.format = "csv";
  Rows rows(columns, &trace);
  // Only logs, which have iterations, have truncated lines. Other files may lack a line break.
  const bool log = columns.iteration.has_value();
  const bool zeros = log && lines.RemoveZeros();
  std::string open;  // place of a last line without a line break
  while (lines.Next()) {
    const std::string place = where + ":" + std::to_string(lines.number());
    if (lines.unterminated()) open = place;
    const bool torn = zeros && lines.unterminated();
    const Status added = torn ? Status() : rows.Add(Cells(lines.line()), place);
    const bool bad = !added && added.error().code == Errc::kBadInput;
    if (torn || (bad && log && lines.unterminated())) {
      WarnOfTornLine(&trace, place);
      break;
    }
    SW_TRY(added);
  }
  if (zeros && !trace.torn) {
    WarnOfTornLine(&trace, where + ":" + std::to_string(lines.number() + 1));
  }
  rows.DropAbandoned();
  if (log) rows.DropIncomplete(trace.torn, where);
  if (log && !open.empty() && !trace.torn) {
    trace.warnings.push_back(open + ": the last line has no line break and may be truncated");
  }
  SW_TRY(AddCells(rows.counts(), columns.sparse, where, &trace));
  SW_TRY(Finish(&trace, where));
  return trace;
}

}  // namespace

Result<TokenTrace> ParseCsvLoads(std::string_view text, const std::string& where) {
  Lines lines(text);
  if (!lines.Next()) return Fail(Errc::kBadInput, where, ": contains no token counts");
  const auto first = Cells(lines.line());
  if (IsHeading(first)) {
    SW_TRY_ASSIGN(const Columns columns,
                  ReadHeading(first, where + ":" + std::to_string(lines.number())));
    return ParseLong(lines, columns, where);
  }
  TokenTrace trace;
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

}  // namespace shardwright::token_counts
