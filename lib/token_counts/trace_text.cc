// SPDX-License-Identifier: Apache-2.0
// Reads token counts from texts. The first character and the keys determine the format:
//
// 1. "[": a list of counts (one layer), of layers, or of records of layers.
// 2. "{" on every line: JSONL, one record per line, ours or vLLM's.
// 3. "{": one object: a record, SGLang's logical_count, or the counts that a plan was made for.
// 4. Anything else is CSV.

#include <algorithm>
#include <string>
#include <unordered_set>
#include <utility>

#include "support/base/bytes.h"
#include "support/base/limits.h"
#include "support/base/text.h"
#include "token_counts/trace_internal.h"

namespace shardwright::token_counts {
namespace {

Result<std::vector<std::uint64_t>> CountsOf(const Json& row, std::uint64_t layer,
                                            const std::string& where) {
  if (!row.is_array()) {
    return Fail(Errc::kBadInput, where, ": layer ", layer, ": a list of counts expected, found ",
                json::KindOf(row));
  }
  std::vector<std::uint64_t> counts;
  counts.reserve(row.size());
  for (const Json& value : row) {
    // Handles plain counts first, without building the place for messages.
    if (value.is_number_unsigned() && value.get<std::uint64_t>() <= limits::kMoeTokens) {
      counts.push_back(value.get<std::uint64_t>());
      continue;
    }
    SW_TRY_ASSIGN(const std::uint64_t count,
                  CountOf(value, where + ": " + CellName(layer, counts.size())));
    counts.push_back(count);
  }
  return counts;
}

int DepthOf(const Json& list) {
  int depth = 0;
  for (const Json* at = &list; at->is_array(); at = &at->front()) {
    ++depth;
    if (at->empty()) break;
  }
  return depth;
}

/// Adds records, layers or one layer, depending on the nesting of the lists.
Status AddLists(const Json& lists, const std::string& where, bool skip_idle, TokenTrace* trace) {
  const int depth = DepthOf(lists);
  if (depth < 1 || depth > 3) {
    return Fail(Errc::kBadInput, where, ": lists of layers of counts expected, found ",
                (depth == 0 ? json::KindOf(lists) : std::to_string(depth) + " levels of lists"));
  }
  if (depth < 3) {
    RecordBuilder record(where);
    SW_TRY(AddMatrix(depth == 2 ? lists : Json::array({lists}), where, &record));
    return Append(trace, 0, record, where);
  }
  std::uint64_t step = 0;
  for (const Json& matrix : lists) {
    const std::string place = where + ": record " + std::to_string(step);
    RecordBuilder record(place);
    SW_TRY(AddMatrix(matrix, place, &record));
    SW_TRY(Append(trace, step++, record, place));
    const auto& tokens = trace->records.back().tokens;
    const bool idle = std::all_of(tokens.begin(), tokens.end(), [](auto t) { return t == 0; });
    if (skip_idle && idle) trace->records.pop_back();
  }
  return {};
}

/// Adds vLLM's counts of physical experts. `map` has the logical expert of each.
Status AddPhysical(const Json& load, const Json& map, const std::string& where,
                   RecordBuilder* record) {
  if (!load.is_array() || !map.is_array() || load.size() != map.size()) {
    return Fail(Errc::kBadInput, where,
                ": counts and map of physical experts: lists of equal length expected");
  }
  std::uint64_t experts = 0;
  std::vector<std::vector<std::int64_t>> ids(map.size());
  for (std::size_t l = 0; l < map.size(); ++l) {
    if (!map[l].is_array() || !load[l].is_array() || map[l].size() != load[l].size()) {
      return Fail(Errc::kBadInput, where, ": layer ", l,
                  ": counts and map of physical experts differ in length");
    }
    for (const Json& id : map[l]) {
      const bool unused = id.is_number_integer() && id.get<std::int64_t>() == -1;
      std::uint64_t expert = 0;
      if (!unused) {
        SW_TRY_ASSIGN(expert, json::WholeOf(id, 0, limits::kMoeExperts - 1,
                                            where + ": p2l_map of layer " + std::to_string(l)));
        experts = std::max(experts, expert + 1);
      }
      ids[l].push_back(unused ? -1 : static_cast<std::int64_t>(expert));
    }
  }
  for (std::size_t l = 0; l < map.size(); ++l) {
    SW_TRY_ASSIGN(const auto physical, CountsOf(load[l], l, where));
    std::vector<std::uint64_t> counts(experts, 0);
    for (std::size_t p = 0; p < physical.size(); ++p) {
      if (ids[l][p] >= 0) counts[static_cast<std::size_t>(ids[l][p])] += physical[p];
    }
    SW_TRY(record->Add(l, std::move(counts)));
  }
  return {};
}

Status AddVllm(const Json& object, const std::string& where, TokenTrace* trace) {
  trace->format = "vllm";
  trace->serving = true;
  const Json& type = object["record_type"];
  if (type == "eplb_load_meta") return {};
  const Json* load = json::Find(object, "expert_load");
  const Json* map = json::Find(object, "p2l_map");
  if (type != "eplb_load_stats" || load == nullptr || map == nullptr) {
    return Fail(Errc::kBadInput, where, ": record_type ", type.dump(),
                ": eplb_load_stats with expert_load and p2l_map expected");
  }
  std::uint64_t step = trace->records.size();
  if (const Json* given = json::Find(object, "step")) {
    SW_TRY_ASSIGN(step, json::WholeOf(*given, 0, limits::kMoeTokens, where + ": step"));
  }
  RecordBuilder record(where);
  SW_TRY(AddPhysical(*load, *map, where, &record));
  return Append(trace, step, record, where);
}

/// Adds the token counts for which one of our plans was made.
Status AddPlanLoads(const Json& layers, const std::string& where, TokenTrace* trace) {
  RecordBuilder record(where);
  for (const Json& layer : layers) {
    const Json* number = json::Find(layer, "layer");
    const Json* loads = json::Find(layer, "loads");
    if (number == nullptr || loads == nullptr) {
      return Fail(Errc::kBadInput, where, ": layers: objects with layer and loads expected");
    }
    SW_TRY_ASSIGN(const std::uint64_t id,
                  json::WholeOf(*number, 0, limits::kMoeLayers - 1, where + ": layer"));
    if (record.rows().contains(id)) {
      return Fail(Errc::kBadInput, where, ": layer ", id, " occurs twice");
    }
    SW_TRY_ASSIGN(auto counts, CountsOf(*loads, id, where));
    SW_TRY(record.Add(id, std::move(counts)));
  }
  return Append(trace, 0, record, where);
}

Status AddObject(const Json& object, const std::string& where, TokenTrace* trace) {
  if (object.contains("record_type")) return AddVllm(object, where, trace);
  if (const Json* tokens = json::Find(object, "tokens")) {
    if (trace->format == "vllm") {
      return Fail(Errc::kBadInput, where, ": a vLLM record with a record_type expected");
    }
    std::uint64_t iteration = trace->records.size();
    if (const Json* given = json::Find(object, "iteration")) {
      SW_TRY_ASSIGN(iteration, json::WholeOf(*given, 0, limits::kMoeTokens, where + ": iteration"));
    }
    RecordBuilder record(where);
    SW_TRY(AddMatrix(*tokens, where + ": tokens", &record));
    return Append(trace, iteration, record, where);
  }
  if (const Json* counts = json::Find(object, "logical_count")) {
    trace->format = "sglang";
    trace->serving = true;
    return AddLists(*counts, where + ": logical_count", true, trace);
  }
  for (const char* key : {"loads", "expert_load", "expert_load_view", "tokens_per_expert",
                          "token_counts", "expert_counts"}) {
    const Json* loads = json::Find(object, key);
    if (loads == nullptr) continue;
    const std::string place = where + ": " + key;
    const Json* map = json::Find(object, "physical_to_logical_map");
    if (map == nullptr) map = json::Find(object, "p2l_map");
    if (map == nullptr) return AddLists(*loads, place, false, trace);
    RecordBuilder record(place);
    SW_TRY(AddPhysical(*loads, *map, place, &record));
    return Append(trace, trace->records.size(), record, place);
  }
  const Json* layers = json::Find(object, "layers");
  if (layers != nullptr && layers->is_array()) return AddPlanLoads(*layers, where, trace);
  if (object.contains("physical_to_logical_map")) {
    return Fail(Errc::kBadInput, where,
                ": a placement (physical_to_logical_map) without token counts: pass it to --old");
  }
  return Fail(Errc::kBadInput, where,
              ": no token counts: expected one of tokens, logical_count, expert_load, loads, "
              "tokens_per_expert, token_counts, expert_counts and layers");
}

/// Handles logs of restarted runs. If a training log repeats an iteration, training has resumed
/// there: drops the earlier records from that iteration on. If a serving engine restarts, it
/// counts its steps from the beginning: renumbers them to follow the earlier ones.
class Restarts {
 public:
  /// Checks the newest record of the trace. \param place place of its line
  void Added(const std::string& place, TokenTrace* trace) {
    std::vector<TokenTrace::Record>& records = trace->records;
    if (trace->serving) return Renumber(place, trace);
    const std::uint64_t iteration = records.back().iteration;
    if (seen_.insert(iteration).second) return;
    TokenTrace::Record newest = std::move(records.back());
    records.pop_back();
    std::erase_if(records, [&](const TokenTrace::Record& one) {
      if (one.iteration < iteration) return false;
      seen_.erase(one.iteration);
      return true;
    });
    seen_.insert(iteration);
    records.push_back(std::move(newest));
    WarnOfRestart(trace, place, iteration);
  }

 private:
  void Renumber(const std::string& place, TokenTrace* trace) {
    std::uint64_t& iteration = trace->records.back().iteration;
    const std::uint64_t step = iteration;
    iteration += offset_;
    if (trace->records.size() > 1 && step <= newest_) {
      const std::uint64_t next = trace->records[trace->records.size() - 2].iteration + 1;
      offset_ += next - std::min(next, iteration);
      iteration = std::max(next, iteration);
      trace->warnings.push_back(StrCat(place, ": step ", step, " after step ", newest_,
                                       ", as after a restart of the server: it counts as step ",
                                       iteration));
    }
    newest_ = step;
  }

  std::unordered_set<std::uint64_t> seen_;
  std::uint64_t offset_ = 0;  // added to a server's steps
  std::uint64_t newest_ = 0;  // server's own number of its last step
};

/// Returns whether a line starts an object without ending it, as a killed writer leaves it.
bool IsCutShort(std::string_view line) {
  line = Trimmed(line);
  if (!line.starts_with('{')) return false;
  std::int64_t depth = 0;
  bool in_string = false;
  for (std::size_t i = 0; i < line.size(); ++i) {
    const char c = line[i];
    if (in_string) {
      if (c == '\\') ++i;
      in_string = c != '"';
      continue;
    }
    in_string = c == '"';
    if (c == '{' || c == '[') ++depth;
    if (c == '}' || c == ']') --depth;
  }
  return in_string || depth > 0;
}

/// Returns whether the object of a line has an iteration. Otherwise its position defines it.
bool SaysIteration(const Json& object) {
  return object.contains("iteration") || object.contains("step");
}

/// Reads the lines of a log in parts.
class LogLines {
 public:
  /// \param begin  as AddLines
  LogLines(const std::string& where, std::optional<std::uint64_t> begin, TokenTrace* trace)
      : where_(where), by_byte_(begin.has_value()), next_(begin.value_or(0)), trace_(trace) {
    trace->format = "jsonl";
  }

  /// Appends a record for each line of a part.
  /// \param ends  true for the last part
  /// \pre every part except the last ends with a line break
  Status Add(std::string_view text, bool ends) {
    while (!text.empty()) {
      const std::string_view line = text.substr(0, text.find('\n'));
      const bool last = ends && line.size() == text.size();  // has no line break
      text.remove_prefix(std::min(text.size(), line.size() + 1));
      SW_TRY(AddLine(line, last));
      if (trace_->torn) return {};
    }
    return {};
  }

 private:
  Status AddLine(std::string_view line, bool last) {
    const std::uint64_t at = next_;
    next_ += line.size() + 1;
    ++number_;
    if (Trimmed(line).empty()) return {};
    const std::string place = where_ + (by_byte_ ? ": line at byte " + std::to_string(at)
                                                 : ":" + std::to_string(number_));
    const Result<Json> object = json::Parse(line, place);
    if (!object && last && IsCutShort(line)) {
      WarnOfTornLine(trace_, place);
      return {};
    }
    if (!object) return tl::unexpected<Error>(object.error());
    if (!object->is_object()) {
      return Fail(Errc::kBadInput, place, ": an object expected, found ", json::KindOf(*object));
    }
    const std::uint64_t records = trace_->first_sums + trace_->records.size();
    SW_TRY(AddObject(*object, place, trace_));
    const bool added = trace_->first_sums + trace_->records.size() == records + 1;
    if (added && SaysIteration(*object)) restarts_.Added(place, trace_);
    return {};
  }

  const std::string& where_;
  bool by_byte_;
  std::uint64_t next_;  // offset in bytes
  TokenTrace* trace_;
  std::uint64_t number_ = 0;
  Restarts restarts_;
};

/// Returns whether a text consists of one JSON object per line.
/// \pre the text has its complete first line
bool IsLog(std::string_view text) {
  const std::string_view body = Trimmed(text);
  return body.starts_with('{') && Trimmed(body.substr(0, body.find('\n'))).ends_with('}');
}

}  // namespace

Status AddLines(std::string_view text, const std::string& where, std::optional<std::uint64_t> begin,
                TokenTrace* trace) {
  return LogLines(where, begin, trace).Add(text, true);
}

Result<TokenTrace> ReadLongLog(const os::File& file, std::uint64_t bytes) {
  constexpr std::uint64_t kBlock = std::uint64_t{16} << 20;
  const std::string& where = file.path();
  TokenTrace trace;
  LogLines lines(where, std::nullopt, &trace);
  std::string text;  // not added yet
  for (std::uint64_t at = 0; at < bytes;) {
    const std::size_t kept = text.size();
    const std::uint64_t block = std::min(kBlock, bytes - at);
    if (kept + block > limits::kJsonBytes) {
      return Fail(Errc::kLimit, where, ": a line of more than ",
                  FormatBytes(limits::kJsonBytes - kBlock),
                  ": longer files must have one JSON object per line");
    }
    text.resize(kept + block);
    SW_TRY(file.ReadAt(at, std::as_writable_bytes(std::span(text).subspan(kept))));
    const bool first = at == kept;
    at += block;
    const bool ends = at == bytes;
    const std::size_t whole = ends ? text.size() : text.rfind('\n') + 1;
    if (whole == 0) continue;
    if (first && !IsLog(text)) {
      return Fail(Errc::kLimit, where, ": ", FormatBytes(bytes), " of text, at most ",
                  FormatBytes(limits::kJsonBytes),
                  ": longer files must have one JSON object per line");
    }
    SW_TRY(lines.Add(std::string_view(text).substr(0, whole), ends));
    text.erase(0, whole);
  }
  SW_TRY(Finish(&trace, where));
  trace.bytes_read = bytes;
  trace.files_read = 1;
  return trace;
}

Status AddMatrix(const Json& matrix, const std::string& where, RecordBuilder* record) {
  if (!matrix.is_array()) {
    return Fail(Errc::kBadInput, where, ": a list of layers expected, found ",
                json::KindOf(matrix));
  }
  std::uint64_t layer = 0;
  for (const Json& row : matrix) {
    SW_TRY_ASSIGN(auto counts, CountsOf(row, layer, where));
    SW_TRY(record->Add(layer++, std::move(counts)));
  }
  return {};
}

Result<TokenTrace> ParseUnevenLoads(std::string_view text, const std::string& where) {
  const std::string_view body = Trimmed(text);
  if (body.empty()) return Fail(Errc::kBadInput, where, ": is empty");
  if (body.front() != '{' && body.front() != '[') return ParseCsvLoads(text, where);
  TokenTrace trace;
  if (IsLog(body)) {
    SW_TRY(AddLines(text, where, std::nullopt, &trace));
    SW_TRY(Finish(&trace, where));
    return trace;
  }
  SW_TRY_ASSIGN(const Json json, json::Parse(text, where));
  trace.format = "json";
  if (json.is_array() && !json.empty() && json.front().is_object()) {
    return Fail(
        Errc::kBadInput, where,
        ": expected lists of counts, found a list of objects; write one object such as "
        "{\"iteration\": 1, \"tokens\": [[...], ...]} per line, without brackets and commas "
        "between the lines (JSONL), or the counts alone as [layer][expert] or "
        "[record][layer][expert]");
  }
  if (json.is_array()) {
    SW_TRY(AddLists(json, where, false, &trace));
  } else {
    SW_TRY(AddObject(json, where, &trace));
  }
  SW_TRY(Finish(&trace, where));
  return trace;
}

}  // namespace shardwright::token_counts
