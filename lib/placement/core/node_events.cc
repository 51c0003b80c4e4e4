// SPDX-License-Identifier: Apache-2.0
#include "placement/core/node_events.h"

#include <algorithm>
#include <map>
#include <utility>

#include "support/base/checked.h"
#include "support/base/limits.h"
#include "support/os/dir.h"

namespace shardwright::placement {
namespace {

constexpr std::size_t kNameBytes = 255;

Result<NodeEvent> ParseLine(std::string_view line, const std::string& where) {
  const std::size_t first = line.find(',');
  const std::size_t second = first == std::string_view::npos ? first : line.find(',', first + 1);
  if (second == std::string_view::npos) {
    return Fail(Errc::kBadInput, where, ": milliseconds,add|remove,node expected");
  }
  NodeEvent event;
  const std::string_view time = line.substr(0, first);
  const auto milliseconds = NumberIn<std::uint64_t>(time);
  if (!milliseconds) {
    return Fail(Errc::kBadInput, where, ": \"", time.substr(0, 24),
                "\" is not a number of milliseconds");
  }
  event.time_ms = *milliseconds;
  const std::string_view what = line.substr(first + 1, second - first - 1);
  if (what != "add" && what != "remove") {
    return Fail(Errc::kBadInput, where, ": \"", what.substr(0, 24), "\" is neither add nor remove");
  }
  event.add = what == "add";
  event.node = line.substr(second + 1);
  if (event.node.empty() || event.node.size() > kNameBytes ||
      event.node.find(',') != std::string::npos) {
    return Fail(Errc::kBadInput, where, ": the name of one node expected");
  }
  return event;
}

}  // namespace

Result<std::vector<NodeEvent>> ParseNodeEvents(std::string_view text, const std::string& where) {
  std::vector<NodeEvent> events;
  std::map<std::string, bool> present;
  std::uint64_t number = 0;
  while (!text.empty()) {
    std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(text.size(), line.size() + 1));
    ++number;
    while (!line.empty() && (line.back() == '\r' || line.back() == ' ')) line.remove_suffix(1);
    if (line.empty() || line.front() == '#') continue;
    const std::string place = where + ":" + std::to_string(number);
    SW_TRY_ASSIGN(NodeEvent event, ParseLine(line, place));
    if (events.size() >= limits::kMoeEvents) {
      return Fail(Errc::kLimit, place, ": more than ", limits::kMoeEvents, " events");
    }
    if (!events.empty() && event.time_ms < events.back().time_ms) {
      return Fail(Errc::kBadInput, place, ": time runs backward: ", event.time_ms, " after ",
                  events.back().time_ms);
    }
    // A node that is removed before any addition was present from the start.
    const auto [at, unseen] = present.try_emplace(event.node, !event.add);
    if (at->second == event.add) {
      return Fail(Errc::kBadInput, place, ": node \"", event.node, "\" ",
                  (event.add ? "exists already and cannot be added"
                             : "does not exist and cannot be removed"));
    }
    at->second = event.add;
    events.push_back(std::move(event));
  }
  if (events.empty()) return Fail(Errc::kBadInput, where, ": contains no events");
  return events;
}

Result<std::vector<NodeEvent>> ReadNodeEvents(const std::string& path) {
  SW_TRY_ASSIGN(const std::string text, os::ReadWholeText(path, limits::kJsonBytes));
  return ParseNodeEvents(text, path);
}

}  // namespace shardwright::placement
