// SPDX-License-Identifier: Apache-2.0
#include "token_counts/trace.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "support/base/checked.h"
#include "support/base/limits.h"
#include "support/base/text.h"
#include "support/os/dir.h"
#include "token_counts/trace_internal.h"
#include "token_counts/window.h"

namespace shardwright::token_counts {
std::string CellName(std::uint64_t layer, std::uint64_t expert) {
  return "layer " + std::to_string(layer) + " expert " + std::to_string(expert);
}

Status RecordBuilder::Add(std::uint64_t layer, std::vector<std::uint64_t> counts) {
  if (counts.empty()) {
    return Fail(Errc::kBadInput, where_, ": layer ", layer, ": no experts");
  }
  if (layer >= limits::kMoeLayers || counts.size() > limits::kMoeExperts) {
    return Fail(Errc::kLimit, where_, ": layer ", layer, " of ", counts.size(),
                " experts: at most ", limits::kMoeLayers, " layers of ", limits::kMoeExperts);
  }
  const auto [at, fresh] = rows_.try_emplace(layer, std::move(counts));
  if (fresh) return {};
  if (at->second.size() != counts.size()) {
    return Fail(Errc::kBadInput, where_, ": layer ", layer, " has ", at->second.size(),
                " experts in one place and ", counts.size(), " in another");
  }
  for (std::size_t e = 0; e < at->second.size(); ++e) {
    SW_TRY_ASSIGN(at->second[e], CheckedAdd(at->second[e], counts[e]));
  }
  return {};
}

namespace {

/// Replaces the oldest three quarters of the records by one record, their sum.
Status SumOldest(TokenTrace* trace, const std::string& where) {
  std::vector<TokenTrace::Record>& records = trace->records;
  const std::size_t last = records.size() - records.size() / 4 - 1;
  TokenTrace::Record& sum = records[last];
  for (std::size_t r = 0; r < last; ++r) {
    for (std::size_t i = 0; i < sum.tokens.size(); ++i) {
      sum.tokens[i] += records[r].tokens[i];
      if (sum.tokens[i] <= limits::kMoeTokens) continue;
      return Fail(Errc::kLimit, where, ": the sum of the earlier records has more than ",
                  limits::kMoeTokens, " tokens");
    }
  }
  trace->first_sums += last;
  records.erase(records.begin(), records.begin() + static_cast<std::ptrdiff_t>(last));
  return {};
}

}  // namespace

namespace {

/// Numbers of experts of a record's layers.
struct RecordShape {
  std::size_t most = 0;
  std::vector<std::uint32_t> by_layer;

  bool uneven() const {
    return std::any_of(by_layer.begin(), by_layer.end(), [&](auto count) { return count != most; });
  }
};

RecordShape ShapeOf(const RecordBuilder& record) {
  RecordShape shape;
  for (const auto& [layer, counts] : record.rows()) {
    shape.most = std::max(shape.most, counts.size());
    shape.by_layer.push_back(static_cast<std::uint32_t>(counts.size()));
  }
  return shape;
}

}  // namespace

Status Append(TokenTrace* trace, std::uint64_t iteration, const RecordBuilder& record,
              const std::string& where) {
  if (record.empty()) return Fail(Errc::kBadInput, where, ": no layers");
  const auto& rows = record.rows();
  const RecordShape shape = ShapeOf(record);
  if (trace->records.empty()) {
    trace->experts = static_cast<std::uint32_t>(shape.most);
    trace->layer_id.clear();  // of an idle record that was removed
    for (const auto& [layer, counts] : rows) {
      trace->layer_id.push_back(static_cast<std::uint32_t>(layer));
    }
    trace->layer_experts = shape.uneven() ? shape.by_layer : std::vector<std::uint32_t>();
  }
  const std::uint64_t cells = rows.size() * shape.most;
  if ((trace->records.size() + 1) * cells > limits::kMoeCounts) {
    if (!trace->serving || trace->records.size() < 8) {
      return Fail(Errc::kLimit, where, ": more than ", limits::kMoeCounts, " counts in all");
    }
    SW_TRY(SumOldest(trace, where));
  }
  if (rows.size() != trace->layer_id.size() || shape.most != trace->experts) {
    return Fail(Errc::kBadInput, where, ": ", rows.size(), " layers of ", shape.most,
                " experts, the first record has ", trace->layer_id.size(), " of ", trace->experts);
  }
  TokenTrace::Record made;
  made.iteration = iteration;
  made.tokens.reserve(cells);
  std::size_t at = 0;
  for (const auto& [layer, counts] : rows) {
    if (layer != trace->layer_id[at]) {
      return Fail(Errc::kBadInput, where, ": layer ", layer, " is not in the first record");
    }
    if (counts.size() != trace->ExpertsOf(at)) {
      return Fail(Errc::kBadInput, where, ": layer ", layer, " has ", counts.size(),
                  " experts, in the first record ", trace->ExpertsOf(at));
    }
    ++at;
    made.tokens.insert(made.tokens.end(), counts.begin(), counts.end());
    made.tokens.resize(at * shape.most, 0);
  }
  trace->records.push_back(std::move(made));
  return {};
}

Status Finish(TokenTrace* trace, const std::string& where) {
  if (trace->records.empty()) return Fail(Errc::kBadInput, where, ": contains no token counts");
  std::stable_sort(trace->records.begin(), trace->records.end(),
                   [](const auto& a, const auto& b) { return a.iteration < b.iteration; });
  for (std::size_t r = 0; r < trace->records.size(); ++r) {
    const TokenTrace::Record& record = trace->records[r];
    const std::string place = where + ": iteration " + std::to_string(record.iteration);
    if (r > 0 && trace->records[r - 1].iteration == record.iteration) {
      return Fail(Errc::kBadInput, place, " occurs twice");
    }
    for (std::size_t row = 0; row < trace->layer_id.size(); ++row) {
      std::uint64_t sum = 0;
      for (std::size_t e = 0; e < trace->experts; ++e) {
        const std::uint64_t tokens = record.tokens[row * trace->experts + e];
        if (tokens > limits::kMoeTokens || (sum += tokens) > limits::kMoeTokens) {
          return Fail(Errc::kBadInput, place, ": ", CellName(trace->layer_id[row], e),
                      ": the layer has more than ", limits::kMoeTokens, " tokens");
        }
      }
    }
  }
  return {};
}

void WarnOfRestart(TokenTrace* trace, const std::string& place, std::uint64_t iteration,
                   std::string_view sign) {
  trace->warnings.push_back(
      StrCat(place, ": iteration ", iteration, " ", sign,
             ", as after a restart of training: earlier lines of iterations from ", iteration,
             " on are ignored"));
}

std::set<std::uint64_t> AbandonedIn(const std::vector<LogEntry>& order, TokenTrace* trace) {
  std::set<std::uint64_t> abandoned;
  const bool sorted = order.size() > 2 &&
                      std::is_sorted(order.begin(), order.end(), [](const auto& a, const auto& b) {
                        return a.iteration > b.iteration;
                      });
  if (sorted) return abandoned;
  std::vector<std::uint64_t> kept;  // ascending
  for (const LogEntry& entry : order) {
    if (!kept.empty() && kept.back() > entry.iteration) {
      WarnOfRestart(trace, entry.place, entry.iteration, StrCat("follows iteration ", kept.back()));
    }
    for (; !kept.empty() && kept.back() > entry.iteration; kept.pop_back()) {
      abandoned.insert(kept.back());
    }
    kept.push_back(entry.iteration);
  }
  return abandoned;
}

void WarnOfTornLine(TokenTrace* trace, const std::string& place) {
  trace->warnings.push_back(StrCat(place, ": the last line is truncated and is ignored"));
  trace->torn = true;
}

namespace {

constexpr std::size_t kListedNumbers = 4;  // of experts, in a note

Result<TokenTrace> ReadFolder(const std::string& path) {
  SW_TRY_ASSIGN(const bool statistics, os::Exists(path + "/meta_info.json"));
  return statistics ? ReadStatisticFolder(path) : ReadCheckpointCounters(path);
}

Result<TokenTrace> ReadFile(const std::string& path) {
  if (path.ends_with(".pt") || path.ends_with(".pth")) return ReadTensorFile(path);
  if (path.ends_with(".npy")) return ReadNumpyFile(path);
  for (const std::string_view ending : {".npz", ".safetensors", ".bin", ".parquet"}) {
    if (!path.ends_with(ending)) continue;
    return Fail(Errc::kUnsupported, path, ": token counts in a ", ending,
                " file are not supported: save the array [layers, experts] as "
                ".npy or .pt");
  }
  SW_TRY_ASSIGN(const os::File file, os::File::OpenRead(path));
  SW_TRY_ASSIGN(const os::Identity identity, file.Stat());
  if (identity.bytes > limits::kJsonBytes) return ReadLongLog(file, identity.bytes);
  SW_TRY_ASSIGN(const std::string text, os::ReadWholeText(file, limits::kJsonBytes));
  SW_TRY_ASSIGN(TokenTrace trace, ParseUnevenLoads(text, path));
  trace.bytes_read = text.size();
  trace.files_read = 1;
  return trace;
}

/// Fails for layers with different numbers of experts.
Status CheckEven(const TokenTrace& trace, const std::string& where) {
  for (std::size_t row = 1; row < trace.layer_experts.size(); ++row) {
    if (trace.layer_experts[row] == trace.layer_experts[0]) continue;
    return Fail(Errc::kBadInput, where, ": layer ", trace.layer_id[row], " has ",
                trace.layer_experts[row], " experts, layer ", trace.layer_id[0], " has ",
                trace.layer_experts[0]);
  }
  return {};
}

/// Returns a note that names the layers of every number of experts, the layers of the most frequent
/// number (ties: the largest) last. Lists of counts do not state the numbers, so that a missing
/// count looks like a smaller layer.
std::string UnevenNote(const TokenTrace& trace, const std::string& where) {
  std::map<std::uint32_t, std::vector<std::uint64_t>> layers_of;  // by number of experts
  for (std::size_t row = 0; row < trace.layer_experts.size(); ++row) {
    layers_of[trace.layer_experts[row]].push_back(trace.layer_id[row]);
  }
  const auto usual =
      std::max_element(layers_of.begin(), layers_of.end(), [](const auto& a, const auto& b) {
        return std::pair(a.second.size(), a.first) < std::pair(b.second.size(), b.first);
      });
  std::string text = where + ": ";
  std::size_t listed = 0;
  for (const auto& [experts, layers] : layers_of) {
    if (experts == usual->first || ++listed > kListedNumbers) continue;
    text += StrCat(layers.size() > 1 ? "layers " : "layer ", Ranges(layers),
                   layers.size() > 1 ? " have " : " has ", Plural(experts, "expert"), ", ");
  }
  if (listed > kListedNumbers) {
    text += StrCat("layers of ", Plural(listed - kListedNumbers, "other number"), ", ");
  }
  if (usual->second.size() > 1) return StrCat(text, "the other layers have ", usual->first);
  return StrCat(text, "layer ", usual->second.front(), " has ", usual->first);
}

}  // namespace

Result<TokenTrace> ParseLoads(std::string_view text, const std::string& where) {
  SW_TRY_ASSIGN(TokenTrace trace, ParseUnevenLoads(text, where));
  trace.path = where;
  SW_TRY(CheckEven(trace, where));
  return trace;
}

Result<TokenTrace> ReadUnevenLoads(const std::string& path) {
  SW_TRY_ASSIGN(const bool folder, os::IsDir(path));
  SW_TRY_ASSIGN(TokenTrace trace, folder ? ReadFolder(path) : ReadFile(path));
  trace.path = path;
  if (!trace.layer_experts.empty()) trace.notes.push_back(UnevenNote(trace, path));
  return trace;
}

Result<TokenTrace> ReadLoads(const std::string& path, std::uint64_t after) {
  std::optional<TokenTrace> trace;
  SW_TRY_ASSIGN(const bool folder, os::IsDir(path));
  if (after > 0 && !folder) {
    SW_TRY_ASSIGN(trace, ReadLogEnd(path, after));
  }
  if (!trace) {
    SW_TRY_ASSIGN(trace, ReadUnevenLoads(path));
  }
  SW_TRY(CheckEven(*trace, path));
  trace->path = path;
  trace->after = after;
  const auto needed = std::find_if(trace->records.begin(), trace->records.end(),
                                   [&](const auto& record) { return record.iteration > after; });
  if (needed - trace->records.begin() > 1) {
    trace->records.erase(trace->records.begin(), std::prev(needed));
  }
  return *std::move(trace);
}

Result<std::uint64_t> WholeCountOf(std::uint64_t value, const std::string& where) {
  if (value <= limits::kMoeTokens) return value;
  return Fail(Errc::kBadInput, where, ": more than ", limits::kMoeTokens, " tokens");
}

Result<std::uint64_t> CountOf(double value, const std::string& where) {
  if (std::isnan(value)) return Fail(Errc::kBadInput, where, ": not a number");
  if (value < 0) {
    std::string text;
    std::isfinite(value) ? json::AppendReal(&text, value) : void(text = "-inf");
    return Fail(Errc::kBadInput, where, ": negative: ", text);
  }
  if (value > static_cast<double>(limits::kMoeTokens)) {
    return Fail(Errc::kBadInput, where, ": more than ", limits::kMoeTokens, " tokens");
  }
  if (std::floor(value) != value) {
    std::string text;
    json::AppendReal(&text, value);
    return Fail(Errc::kBadInput, where, ": not a whole number: ", text,
                "; counts are expected: multiply averages by the number of steps that they cover");
  }
  return static_cast<std::uint64_t>(value);
}

Result<std::uint64_t> CountOf(const Json& value, const std::string& where) {
  if (value.is_number_unsigned()) return WholeCountOf(value.get<std::uint64_t>(), where);
  if (value.is_number_integer()) {
    return Fail(Errc::kBadInput, where, ": negative: ", value.get<std::int64_t>());
  }
  if (value.is_number_float()) return CountOf(value.get<double>(), where);
  return Fail(Errc::kBadInput, where, ": a count expected, found ", json::KindOf(value));
}

}  // namespace shardwright::token_counts
