// SPDX-License-Identifier: Apache-2.0
// lib/partial/gradient_log: gradients that an optimizer used, to repeat its steps
// later. A writer (log_writer.h) appends the gradients of a module in each iteration
// to segments in the folder logs/ of a store. A reader (log_reader.h) verifies them
// and returns a module's chain from one iteration to another, or the reason why there
// is none. lib/partial/optimizer_steps repeats the steps. Source: docs/formats/log.md.

#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/exec/integrity.h"
#include "engine/tensor/dtype.h"
#include "partial/optimizer_steps/square_roots.h"
#include "partial/optimizer_steps/step.h"
#include "support/base/result.h"

namespace shardwright::partial {

inline constexpr std::uint32_t kLogVersion = 1;

/// Limits, checked before memory is allocated.
inline constexpr std::uint64_t kLogMetaBytes = std::uint64_t{16} << 20;
inline constexpr std::uint64_t kLogPieceBytes = std::uint64_t{64} << 20;

/// A step in a log, with the table of square roots that it needs.
struct LogStep {
  optimizer_steps::Step step;
  std::optional<exec::Digest> roots;  ///< file written by PutRoots; absent: rounded correctly
  friend bool operator==(const LogStep&, const LogStep&) = default;
};

/// A range of the gradient of a parameter.
struct LogPiece {
  std::string param;
  std::uint64_t elems = 0;  ///< of the whole parameter
  std::uint64_t first = 0;
  std::uint64_t count = 0;
  DType dtype = DType::kF32;
  std::uint32_t step = 0;    ///< index into LogRecord::steps; skipped ones have no bytes
  std::uint64_t bytes = 0;   ///< as stored
  bool zstd = false;         ///< compressed as one frame
  exec::Digest digest{};     ///< of the uncompressed bytes
  std::uint64_t offset = 0;  ///< in the file; computed, not stored
  friend bool operator==(const LogPiece&, const LogPiece&) = default;
};

/// Gradients of a module that a writer had in an iteration.
struct LogRecord {
  std::uint64_t iteration = 0;
  std::uint64_t recovery = 0;  ///< the store's last recovery at that time; 0: none
  std::string module;
  std::vector<LogStep> steps;
  std::vector<LogPiece> pieces;
  friend bool operator==(const LogRecord&, const LogRecord&) = default;
};

/// Convert the text in front of the gradients of a record.
/// \error kBadInput, kUnsupported  describes the invalid field
std::string ToText(const LogRecord& record);
Result<LogRecord> ParseLogRecord(std::string_view text, const std::string& where);

/// Parses a list of steps in the format of that text.
/// \error as ParseLogRecord
Result<std::vector<LogStep>> ParseLogSteps(std::string_view text, const std::string& where);

/// Returns the digest of the file that PutRoots writes.
exec::Digest DigestOf(const optimizer_steps::RootTable& roots);

/// Writes a table of square roots into the folder of a log unless it exists.
/// \returns its digest, for LogStep::roots
/// \error kIo
/// Local.
Result<exec::Digest> PutRoots(const std::string& folder, const optimizer_steps::RootTable& roots);

/// \error kNotFound; kBadInput  damaged file
/// Local.
Result<optimizer_steps::RootTable> GetRoots(const std::string& folder, const exec::Digest& digest);

}  // namespace shardwright::partial
