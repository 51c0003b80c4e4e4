#include "cli/exit_code.h"

#include <array>

namespace shardwright::cli {
namespace {

struct Row {
  Errc code;
  std::string_view name;
};

constexpr std::array<Row, 11> kRows = {{
    {Errc::kInternal, "internal"},
    {Errc::kUsage, "usage"},
    {Errc::kNotFound, "not_found"},
    {Errc::kBadInput, "bad_input"},
    {Errc::kMismatch, "mismatch"},
    {Errc::kBusy, "busy"},
    {Errc::kIo, "io"},
    {Errc::kLimit, "limit"},
    {Errc::kUnsupported, "unsupported"},
    {Errc::kInfeasible, "infeasible"},
    {Errc::kStopped, "stopped"},
}};

}  // namespace

int ExitCode(const Status& status) { return status ? 0 : static_cast<int>(status.error().code); }

std::string_view ErrcName(Errc code) {
  for (const Row& row : kRows) {
    if (row.code == code) return row.name;
  }
  return "internal";
}

std::string_view RunState(const Status& status) {
  if (status) return "done";
  return status.error().code == Errc::kStopped ? "stopped" : "failed";
}

}  // namespace shardwright::cli
