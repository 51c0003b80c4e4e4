// SPDX-License-Identifier: Apache-2.0
#include "partial/planner/forecast/fault_list.h"

#include <algorithm>
#include <cstdint>

#include "support/base/checked.h"
#include "support/base/limits.h"
#include "support/base/text.h"
#include "support/os/dir.h"

namespace shardwright::partial {
namespace {

constexpr std::uint64_t kMostBytes = std::uint64_t{256} << 20;

/// Parses a line such as "3" or "3 0,2": an iteration and lost nodes. False: invalid.
bool ParseLine(std::string_view line, SimulatedFault* fault) {
  const std::size_t gap = line.find_first_of(" \t");
  const auto iteration = NumberIn<std::uint64_t>(line.substr(0, gap));
  if (!iteration) return false;
  fault->iteration = *iteration;
  if (gap == std::string_view::npos) return true;
  std::string_view rest = Trimmed(line.substr(gap));
  for (;;) {
    const std::size_t comma = rest.find(',');
    const auto node = NumberIn<std::uint32_t>(Trimmed(rest.substr(0, comma)));
    if (!node) return false;
    const bool twice =
        std::find(fault->nodes.begin(), fault->nodes.end(), *node) != fault->nodes.end();
    if (twice) return false;
    fault->nodes.push_back(*node);
    if (comma == std::string_view::npos) return true;
    rest.remove_prefix(comma + 1);
  }
}

}  // namespace

Result<std::vector<SimulatedFault>> ParseFaults(std::string_view text, const std::string& where) {
  std::vector<SimulatedFault> faults;
  std::uint64_t number = 0;
  while (!text.empty()) {
    ++number;
    const std::size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    line = Trimmed(line.substr(0, line.find('#')));
    if (line.empty()) continue;
    const std::string place = StrCat(where, ": line ", number);
    SimulatedFault fault;
    if (!ParseLine(line, &fault)) {
      return Fail(Errc::kBadInput, place,
                  ": expected an iteration, optionally with nodes, such as \"40\" or \"40 0,2\", "
                  "each node once");
    }
    if (!faults.empty() && fault.iteration < faults.back().iteration) {
      return Fail(Errc::kBadInput, place, ": iteration ", fault.iteration, " follows iteration ",
                  faults.back().iteration);
    }
    if (faults.size() >= limits::kMoeEvents) {
      return Fail(Errc::kLimit, place, ": expected at most ", limits::kMoeEvents,
                  " faults, found more");
    }
    faults.push_back(std::move(fault));
  }
  return faults;
}

Result<std::vector<SimulatedFault>> ReadFaults(const std::string& path) {
  SW_TRY_ASSIGN(const std::string text, os::ReadWholeText(path, kMostBytes));
  return ParseFaults(text, path);
}

}  // namespace shardwright::partial
