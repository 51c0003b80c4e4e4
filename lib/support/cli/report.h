// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "support/base/result.h"
#include "support/cli/run_sink.h"

namespace shardwright::cli {

/// Version of the report's schema: docs/report.md. Additions keep it, anything else raises it.
inline constexpr int kReportSchemaVersion = 1;

/// A warning and the ranks that gave it.
struct MergedWarning {
  std::string message;
  std::vector<int> ranks;  ///< sorted, not empty
};

/// The facts of all ranks in one.
struct MergedFacts {
  RankFacts total;  ///< sums of bytes and files, longest passes, largest memory; no warnings
  std::vector<MergedWarning> warnings;
};

/// Everything a report says apart from the command's own result.
struct Report {
  std::string command;
  std::vector<std::string> argv;
  std::string started;  ///< TimestampUtc
  std::string ended;
  double seconds = 0;
  int ranks = 1;
  std::optional<unsigned> threads;            ///< nothing if the command does not take --threads
  std::optional<std::uint64_t> memory_bytes;  ///< nothing if it does not take --memory
  std::optional<std::uint64_t> seed;          ///< nothing if it does not take --seed
  bool dry_run = false;
  Status status;
  MergedFacts facts;
};

/// Adds the ranks up. Warnings with equal texts become one, in the order of the first rank that
/// gave them.
/// Local.
MergedFacts Merge(std::span<const RankFacts> ranks);

/// A rank's facts on their way to rank 0 and back.
/// \error kInternal if `text` was not made by PackFacts
/// Local.
std::string PackFacts(const RankFacts& facts);
Result<RankFacts> UnpackFacts(std::string_view text);

/// The report as text that ends with a line feed. Bytes that are not UTF-8 are replaced.
/// \param result  the command's own object, null if it has none
/// Local.
std::string ReportText(const Report& report, const nlohmann::json& result);

/// Writes `text` to `path` so that a reader finds the old file or the whole new one: beside it,
/// synced, renamed. A pipe or device is written to as it is.
/// \error kIo naming the file
/// Local.
Status WriteReportFile(const std::string& path, const std::string& text);

/// Says early that WriteReportFile cannot work.
/// \error kIo naming the folder
/// Local.
Status CheckReportFile(const std::string& path);

}  // namespace shardwright::cli
