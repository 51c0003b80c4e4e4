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

/// Version of the report's schema (docs/report.md). Only incompatible changes increase it.
inline constexpr int kReportSchemaVersion = 2;

/// A warning and the ranks that reported it.
struct MergedWarning {
  std::string message;
  std::vector<int> ranks;  ///< sorted, not empty
};

/// The measurements and warnings of all ranks, combined.
struct MergedStats {
  RankStats total;  ///< added bytes and files, longest passes, largest memory; no warnings
  std::vector<MergedWarning> warnings;
};

/// Contents of a report apart from the command's own result.
struct Report {
  std::string command;
  std::vector<std::string> argv;
  std::string started;  ///< TimestampUtc
  std::string ended;
  double seconds = 0;
  int ranks = 1;
  std::optional<unsigned> threads;            ///< nullopt if the command does not take --threads
  std::optional<std::uint64_t> memory_bytes;  ///< nullopt if it does not take --memory
  std::optional<std::uint64_t> seed;          ///< nullopt if it does not take --seed
  bool dry_run = false;
  Status status;
  MergedStats facts;
};

/// Combines the reports of all ranks. Warnings with equal texts become one, in the order
/// of the first rank that reported each.
/// Local.
MergedStats Merge(std::span<const RankStats> ranks);

/// Serializes the report of one rank for the transfer to rank 0. UnpackStats is the inverse.
/// \error kInternal if `text` was not made by PackStats
/// Local.
std::string PackStats(const RankStats& facts);
Result<RankStats> UnpackStats(std::string_view text);

/// Returns the report as JSON text that ends with a line feed. Invalid UTF-8 is replaced.
/// \param result  the command's own object, null if it has none
/// Local.
std::string ReportText(const Report& report, const nlohmann::json& result);

/// Writes `text` to `path` atomically: it writes and syncs a temporary file in the same folder
/// and renames it. Writes directly to `path` if it is a pipe or a device.
/// \error kIo with the name of the file
/// Local.
Status WriteReportFile(const std::string& path, const std::string& text);

/// Checks before a run whether WriteReportFile can succeed.
/// \error kIo with the name of the folder
/// Local.
Status CheckReportFile(const std::string& path);

}  // namespace shardwright::cli
