// SPDX-License-Identifier: Apache-2.0
// Reads token counts from texts. The first character and the keys determine the format:
//
// 1. "[": a list of counts (one layer), of layers, or of records of layers.
// 2. "{" on every line: JSONL, one record per line, ours or vLLM's.
// 3. "{": one object: a record, SGLang's logical_count, or the counts that a plan was made for.
// 4. Anything else is CSV.

#include <algorithm>
#include <string>
#include <utility>

#include "support/base/checked.h"
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

/// Adds counts of physical experts. `map` has the logical expert of each; -1: none.
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
                                            where + ": map of layer " + std::to_string(l)));
        experts = std::max(experts, expert + 1);
      }
      ids[l].push_back(unused ? -1 : static_cast<std::int64_t>(expert));
    }
  }
  for (std::size_t l = 0; l < map.size(); ++l) {
    SW_TRY_ASSIGN(const auto physical, CountsOf(load[l], l, where));
    std::vector<std::uint64_t> counts(experts, 0);
    for (std::size_t p = 0; p < physical.size(); ++p) {
      if (ids[l][p] < 0) continue;
      std::uint64_t& sum = counts[static_cast<std::size_t>(ids[l][p])];
      SW_TRY_ASSIGN(sum, CheckedAdd(sum, physical[p]));
    }
    SW_TRY(record->Add(l, std::move(counts)));
  }
  return {};
}

/// Adds records, layers or one layer, depending on the nesting of the lists.
/// \param map  logical experts of the physical ones, by layer; null for counts of logical experts
/// \param first  iteration of the first record
Status AddLists(const Json& lists, const Json* map, std::uint64_t first, const std::string& where,
                TokenTrace* trace) {
  const int depth = DepthOf(lists);
  if (depth < 1 || depth > 3) {
    return Fail(Errc::kBadInput, where, ": lists of layers of counts expected, found ",
                (depth == 0 ? json::KindOf(lists) : std::to_string(depth) + " levels of lists"));
  }
  const auto add = [&](const Json& matrix, std::uint64_t iteration, const std::string& place) {
    RecordBuilder record(place);
    const Status added = map != nullptr ? AddPhysical(matrix, *map, place, &record)
                                        : AddMatrix(matrix, place, &record);
    return added ? Append(trace, iteration, record, place) : added;
  };
  if (depth < 3) return add(depth == 2 ? lists : Json::array({lists}), first, where);
  for (std::size_t i = 0; i < lists.size(); ++i) {
    SW_TRY(add(lists[i], first + i, where + ": record " + std::to_string(i)));
    const auto& tokens = trace->records.back().tokens;
    const bool idle = std::all_of(tokens.begin(), tokens.end(), [](auto t) { return t == 0; });
    if (idle && trace->format == "sglang") trace->records.pop_back();
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
  SW_TRY_ASSIGN(const std::uint64_t step, FirstIteration(object, *trace, where));
  RecordBuilder record(where);
  SW_TRY(AddPhysical(*load, *map, where, &record));
  return Append(trace, step, record, where);
}

/// Adds the token counts for which one of our plans was made.
Status AddPlanLoads(const Json& layers, std::uint64_t iteration, const std::string& where,
                    TokenTrace* trace) {
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
  return Append(trace, iteration, record, where);
}

}  // namespace

Result<std::uint64_t> FirstIteration(const Json& object, const TokenTrace& trace,
                                     const std::string& where) {
  for (const char* key : {"iteration", "step"}) {
    const Json* given = json::Find(object, key);
    if (given == nullptr) continue;
    return json::WholeOf(*given, 0, limits::kMoeTokens, where + ": " + key);
  }
  if (trace.records.empty()) return std::uint64_t{0};
  if (trace.format == "sglang") return trace.records.back().iteration + 1;
  return trace.first_sums - 1 + trace.records.size();
}

Status AddObject(const Json& object, const std::string& where, TokenTrace* trace) {
  if (object.contains("record_type")) return AddVllm(object, where, trace);
  if (trace->format == "vllm") {
    return Fail(Errc::kBadInput, where, ": a vLLM record with a record_type expected");
  }
  SW_TRY_ASSIGN(const std::uint64_t iteration, FirstIteration(object, *trace, where));
  if (const Json* counts = json::Find(object, "logical_count")) {
    trace->format = "sglang";
    trace->serving = true;
    return AddLists(*counts, nullptr, iteration, where + ": logical_count", trace);
  }
  for (const char* key : {"tokens", "loads", "expert_load", "expert_load_view", "tokens_per_expert",
                          "token_counts", "expert_counts"}) {
    const Json* loads = json::Find(object, key);
    if (loads == nullptr) continue;
    const Json* map = json::Find(object, "physical_to_logical_map");
    if (map == nullptr) map = json::Find(object, "p2l_map");
    return AddLists(*loads, map, iteration, where + ": " + key, trace);
  }
  const Json* layers = json::Find(object, "layers");
  if (layers != nullptr && layers->is_array()) {
    return AddPlanLoads(*layers, iteration, where, trace);
  }
  if (object.contains("physical_to_logical_map")) {
    return Fail(Errc::kBadInput, where,
                ": a placement (physical_to_logical_map) without token counts: pass it to --old");
  }
  return Fail(Errc::kBadInput, where,
              ": no token counts: expected one of tokens, logical_count, expert_load, loads, "
              "tokens_per_expert, token_counts, expert_counts and layers");
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
  if (text.starts_with(kByteOrderMark)) text.remove_prefix(kByteOrderMark.size());
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
    SW_TRY(AddLists(json, nullptr, 0, where, &trace));
  } else {
    SW_TRY(AddObject(json, where, &trace));
  }
  SW_TRY(Finish(&trace, where));
  return trace;
}

}  // namespace shardwright::token_counts
