// SPDX-License-Identifier: Apache-2.0
#include "support/cli/exit_code.h"

#include <array>

namespace shardwright::cli {
namespace {

struct Row {
  Errc code;
  std::string_view name;
  std::string_view meaning;
};

constexpr std::array<Row, 11> kRows = {{
    {Errc::kInternal, "internal", "internal error"},
    {Errc::kUsage, "usage", "usage error"},
    {Errc::kNotFound, "not_found",
     "input, or parent directory of the output, not found or unreadable"},
    {Errc::kBadInput, "bad_input", "input corrupt or unsafe"},
    {Errc::kMismatch, "mismatch", "a check failed"},
    {Errc::kBusy, "busy", "output exists, is in use or belongs to another user"},
    {Errc::kIo, "io", "write failed (I/O error, no space, quota)"},
    {Errc::kLimit, "limit", "memory or size limit exceeded"},
    {Errc::kUnsupported, "unsupported", "unsupported layout or version"},
    {Errc::kInfeasible, "infeasible", "no feasible plan"},
    {Errc::kStopped, "stopped", "stopped on request; the same command continues"},
}};

}  // namespace

int ExitCode(const Status& status) { return status ? 0 : static_cast<int>(status.error().code); }

std::string_view ErrcName(Errc code) {
  for (const Row& row : kRows) {
    if (row.code == code) return row.name;
  }
  return "internal";
}

std::vector<std::pair<int, std::string_view>> ExitMeanings() {
  std::vector<std::pair<int, std::string_view>> all = {{0, "done"}};
  for (const Row& row : kRows) all.emplace_back(static_cast<int>(row.code), row.meaning);
  return all;
}

std::string_view RunState(const Status& status) {
  if (status) return "done";
  return status.error().code == Errc::kStopped ? "stopped" : "failed";
}

}  // namespace shardwright::cli
