#include "loads/load_trace.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <set>
#include <utility>

#include "base/checked.h"
#include "base/limits.h"
#include "loads/load_trace_internal.h"
#include "os/dir.h"

namespace shardwright::loads {
namespace {

Result<std::uint32_t> LayerNumber(std::string_view text, std::string_view whole) {
  std::uint32_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (text.empty() || error != std::errc() || end != text.data() + text.size() ||
      number >= limits::kMoeLayers) {
    return Fail(Errc::kUsage, "\"" + std::string(whole) +
                                  "\" is no list of layers as 0-11,14 below " +
                                  std::to_string(limits::kMoeLayers));
  }
  return number;
}

/// The records whose mean is taken: [first, last].
Result<std::pair<std::size_t, std::size_t>> WindowOf(const LoadTrace& trace,
                                                     const LoadWindow& window) {
  std::size_t last = trace.records.size() - 1;
  if (window.at) {
    SW_TRY_ASSIGN(last, RecordAt(trace, *window.at));
  }
  if (window.window == 0 || window.window > last + 1) {
    return Fail(Errc::kUsage, "window of " + std::to_string(window.window) +
                                  " iterations, but there are " + std::to_string(last + 1) +
                                  " up to iteration " +
                                  std::to_string(trace.records[last].iteration));
  }
  return std::pair(last + 1 - static_cast<std::size_t>(window.window), last);
}

/// Indices of the layers that a window names.
Result<std::vector<std::size_t>> LayersIn(const LoadTrace& trace, const LoadWindow& window) {
  std::vector<std::size_t> rows;
  if (window.layers.empty()) {
    for (std::size_t row = 0; row < trace.layer_id.size(); ++row) rows.push_back(row);
    return rows;
  }
  for (const std::uint32_t layer : window.layers) {
    const auto at = std::lower_bound(trace.layer_id.begin(), trace.layer_id.end(), layer);
    if (at == trace.layer_id.end() || *at != layer) {
      return Fail(Errc::kUsage, "layer " + std::to_string(layer) + ": the loads have " +
                                    std::to_string(trace.layer_id.size()) + " layers, " +
                                    std::to_string(trace.layer_id.front()) + " to " +
                                    std::to_string(trace.layer_id.back()));
    }
    rows.push_back(static_cast<std::size_t>(at - trace.layer_id.begin()));
  }
  return rows;
}

}  // namespace

std::string CellName(std::uint64_t layer, std::uint64_t expert) {
  return "layer " + std::to_string(layer) + " expert " + std::to_string(expert);
}

Status RecordBuilder::Add(std::uint64_t layer, std::vector<std::uint64_t> counts) {
  if (counts.empty()) {
    return Fail(Errc::kBadInput, where_ + ": layer " + std::to_string(layer) + ": no experts");
  }
  if (layer >= limits::kMoeLayers || counts.size() > limits::kMoeExperts) {
    return Fail(Errc::kLimit, where_ + ": layer " + std::to_string(layer) + " of " +
                                  std::to_string(counts.size()) + " experts: at most " +
                                  std::to_string(limits::kMoeLayers) + " layers of " +
                                  std::to_string(limits::kMoeExperts));
  }
  if (!rows_.empty() && rows_.begin()->second.size() != counts.size()) {
    return Fail(Errc::kBadInput, where_ + ": layer " + std::to_string(layer) + " has " +
                                     std::to_string(counts.size()) + " experts, layer " +
                                     std::to_string(rows_.begin()->first) + " has " +
                                     std::to_string(rows_.begin()->second.size()));
  }
  auto [at, fresh] = rows_.try_emplace(layer, std::move(counts));
  if (fresh) return {};
  for (std::size_t e = 0; e < at->second.size(); ++e) {
    SW_TRY_ASSIGN(at->second[e], CheckedAdd(at->second[e], counts[e]));
  }
  return {};
}

Status Append(LoadTrace* trace, std::uint64_t iteration, const RecordBuilder& record,
              const std::string& where) {
  if (record.empty()) return Fail(Errc::kBadInput, where + ": no layers");
  const auto& rows = record.rows();
  if (trace->records.empty()) {
    trace->experts = static_cast<std::uint32_t>(rows.begin()->second.size());
    for (const auto& [layer, counts] : rows) {
      trace->layer_id.push_back(static_cast<std::uint32_t>(layer));
    }
  }
  const std::uint64_t cells = rows.size() * rows.begin()->second.size();
  if ((trace->records.size() + 1) * cells > limits::kMoeCounts) {
    return Fail(Errc::kLimit,
                where + ": more than " + std::to_string(limits::kMoeCounts) + " counts in all");
  }
  if (rows.size() != trace->layer_id.size() || rows.begin()->second.size() != trace->experts) {
    return Fail(Errc::kBadInput, where + ": " + std::to_string(rows.size()) + " layers of " +
                                     std::to_string(rows.begin()->second.size()) +
                                     " experts, the first record has " +
                                     std::to_string(trace->layer_id.size()) + " of " +
                                     std::to_string(trace->experts));
  }
  LoadTrace::Record made;
  made.iteration = iteration;
  made.tokens.reserve(cells);
  std::size_t at = 0;
  for (const auto& [layer, counts] : rows) {
    if (layer != trace->layer_id[at++]) {
      return Fail(Errc::kBadInput,
                  where + ": layer " + std::to_string(layer) + " is not in the first record");
    }
    made.tokens.insert(made.tokens.end(), counts.begin(), counts.end());
  }
  trace->records.push_back(std::move(made));
  return {};
}

Status Finish(LoadTrace* trace, const std::string& where) {
  if (trace->records.empty()) return Fail(Errc::kBadInput, where + ": holds no loads");
  std::stable_sort(trace->records.begin(), trace->records.end(),
                   [](const auto& a, const auto& b) { return a.iteration < b.iteration; });
  for (std::size_t r = 0; r < trace->records.size(); ++r) {
    const LoadTrace::Record& record = trace->records[r];
    const std::string place = where + ": iteration " + std::to_string(record.iteration);
    if (r > 0 && trace->records[r - 1].iteration == record.iteration) {
      return Fail(Errc::kBadInput, place + " twice");
    }
    for (std::size_t row = 0; row < trace->layer_id.size(); ++row) {
      std::uint64_t sum = 0;
      for (std::size_t e = 0; e < trace->experts; ++e) {
        const std::uint64_t tokens = record.tokens[row * trace->experts + e];
        if (tokens > limits::kMoeTokens || (sum += tokens) > limits::kMoeTokens) {
          return Fail(Errc::kBadInput, place + ": " + CellName(trace->layer_id[row], e) +
                                           ": the layer has more than " +
                                           std::to_string(limits::kMoeTokens) + " tokens");
        }
      }
    }
  }
  return {};
}

Result<std::size_t> RecordAt(const LoadTrace& trace, std::uint64_t iteration) {
  const auto after =
      std::upper_bound(trace.records.begin(), trace.records.end(), iteration,
                       [](std::uint64_t i, const auto& record) { return i < record.iteration; });
  if (after == trace.records.begin()) {
    return Fail(Errc::kUsage, "iteration " + std::to_string(iteration) +
                                  ": the loads start at iteration " +
                                  std::to_string(trace.records.front().iteration));
  }
  return static_cast<std::size_t>(after - trace.records.begin()) - 1;
}

Result<Loads> Pick(const LoadTrace& trace, const LoadWindow& window) {
  SW_TRY_ASSIGN(const auto range, WindowOf(trace, window));
  SW_TRY_ASSIGN(const auto rows, LayersIn(trace, window));
  Loads loads;
  loads.experts = trace.experts;
  loads.layers = static_cast<std::uint32_t>(rows.size());
  loads.iteration = trace.records[range.second].iteration;
  loads.tokens.reserve(rows.size() * trace.experts);
  for (const std::size_t row : rows) {
    loads.layer_id.push_back(trace.layer_id[row]);
    for (std::size_t e = 0; e < trace.experts; ++e) {
      // Quotients and remainders apart: the sum itself may not fit.
      std::uint64_t whole = 0;
      std::uint64_t rest = 0;
      for (std::size_t r = range.first; r <= range.second; ++r) {
        const std::uint64_t tokens = trace.records[r].tokens[row * trace.experts + e];
        whole += tokens / window.window;
        rest += tokens % window.window;
      }
      loads.tokens.push_back(whole + (2 * rest + window.window) / (2 * window.window));
    }
  }
  return loads;
}

Result<std::vector<std::uint32_t>> ParseLayers(std::string_view text) {
  std::set<std::uint32_t> layers;
  std::string_view rest = text;
  while (true) {
    const std::string_view part = rest.substr(0, rest.find(','));
    const std::size_t dash = part.find('-');
    SW_TRY_ASSIGN(const std::uint32_t first, LayerNumber(part.substr(0, dash), text));
    std::uint32_t last = first;
    if (dash != std::string_view::npos) {
      SW_TRY_ASSIGN(last, LayerNumber(part.substr(dash + 1), text));
    }
    if (last < first) {
      return Fail(Errc::kUsage, "\"" + std::string(text) + "\": the range runs backward");
    }
    for (std::uint32_t layer = first; layer <= last; ++layer) layers.insert(layer);
    if (part.size() == rest.size()) break;
    rest.remove_prefix(part.size() + 1);
  }
  return std::vector<std::uint32_t>(layers.begin(), layers.end());
}

namespace {

Result<LoadTrace> ReadFolder(const std::string& path) {
  SW_TRY_ASSIGN(const bool statistics, os::Exists(path + "/meta_info.json"));
  return statistics ? ReadStatisticFolder(path) : ReadCheckpointCounters(path);
}

Result<LoadTrace> ReadFile(const std::string& path) {
  if (path.ends_with(".pt") || path.ends_with(".pth")) return ReadRecorderDump(path);
  SW_TRY_ASSIGN(const std::string text, os::ReadWholeText(path, limits::kJsonBytes));
  SW_TRY_ASSIGN(LoadTrace trace, ParseLoads(text, path));
  trace.bytes_read = text.size();
  trace.files_read = 1;
  return trace;
}

}  // namespace

Result<LoadTrace> ReadLoads(const std::string& path, std::uint64_t after) {
  std::optional<LoadTrace> trace;
  SW_TRY_ASSIGN(const bool folder, os::IsDir(path));
  if (after > 0 && !folder) {
    SW_TRY_ASSIGN(trace, ReadLogEnd(path, after));
  }
  if (!trace) {
    SW_TRY_ASSIGN(trace, folder ? ReadFolder(path) : ReadFile(path));
  }
  trace->after = after;
  const auto needed = std::find_if(trace->records.begin(), trace->records.end(),
                                   [&](const auto& record) { return record.iteration > after; });
  if (needed - trace->records.begin() > 1) {
    trace->records.erase(trace->records.begin(), std::prev(needed));
  }
  return *std::move(trace);
}

Result<std::uint64_t> CountOf(double value, const std::string& where) {
  if (std::isnan(value)) return Fail(Errc::kBadInput, where + ": not a number");
  if (value < 0) {
    std::string text;
    std::isfinite(value) ? json::AppendReal(&text, value) : void(text = "-inf");
    return Fail(Errc::kBadInput, where + ": negative: " + text);
  }
  if (value > static_cast<double>(limits::kMoeTokens)) {
    return Fail(Errc::kBadInput,
                where + ": more than " + std::to_string(limits::kMoeTokens) + " tokens");
  }
  return static_cast<std::uint64_t>(std::floor(value + 0.5));
}

Result<std::uint64_t> CountOf(const Json& value, const std::string& where) {
  if (value.is_number_unsigned()) {
    const auto count = value.get<std::uint64_t>();
    if (count <= limits::kMoeTokens) return count;
    return CountOf(static_cast<double>(count), where);
  }
  if (value.is_number_integer()) {
    return Fail(Errc::kBadInput,
                where + ": negative: " + std::to_string(value.get<std::int64_t>()));
  }
  if (value.is_number_float()) return CountOf(value.get<double>(), where);
  return Fail(Errc::kBadInput, where + ": a count expected, found " + json::KindOf(value));
}

}  // namespace shardwright::loads
