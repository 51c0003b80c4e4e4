// SPDX-License-Identifier: Apache-2.0
// lib/partial/gradient_log: gradients that an optimizer used, so that its steps can be made again.
// A writer (log_writer.h) appends what a trainer's process used of a module in an iteration to
// segments in the folder logs/ of a store; a reader (log_reader.h) proves them and gives the chain
// of a module from one iteration to another, or says why there is none. lib/partial/optimizer_steps
// makes the steps. Source: docs/formats/log.md.

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

/// Caps, checked before memory is taken.
inline constexpr std::uint64_t kLogMetaBytes = std::uint64_t{16} << 20;
inline constexpr std::uint64_t kLogPieceBytes = std::uint64_t{64} << 20;

/// A step as a log has it, and whose square roots it needs.
struct LogStep {
  optimizer_steps::Step step;
  std::optional<exec::Digest> roots;  ///< of a file of PutRoots; absent: rounded correctly
  friend bool operator==(const LogStep&, const LogStep&) = default;
};

/// A range of the gradient of a parameter.
struct LogPiece {
  std::string param;
  std::uint64_t elems = 0;  ///< of the whole parameter
  std::uint64_t first = 0;
  std::uint64_t count = 0;
  DType dtype = DType::kF32;
  std::uint32_t step = 0;    ///< in LogRecord::steps; a skipped one has no bytes
  std::uint64_t bytes = 0;   ///< as stored
  bool zstd = false;         ///< one frame
  exec::Digest digest{};     ///< of the plain bytes
  std::uint64_t offset = 0;  ///< in the file; worked out, not stored
  friend bool operator==(const LogPiece&, const LogPiece&) = default;
};

/// What a writer had of a module in an iteration.
struct LogRecord {
  std::uint64_t iteration = 0;
  std::uint64_t recovery = 0;  ///< the store's last recovery when it was made; 0: none
  std::string module;
  std::vector<LogStep> steps;
  std::vector<LogPiece> pieces;
  friend bool operator==(const LogRecord&, const LogRecord&) = default;
};

/// The text in front of the gradients of a record, and back.
/// \error kBadInput, kUnsupported  what is wrong with it
std::string ToText(const LogRecord& record);
Result<LogRecord> ParseLogRecord(std::string_view text, const std::string& where);

/// A list of steps, each as in that text.
/// \error as ParseLogRecord
Result<std::vector<LogStep>> ParseLogSteps(std::string_view text, const std::string& where);

/// The digest of the file that PutRoots makes.
exec::Digest DigestOf(const optimizer_steps::RootTable& roots);

/// Puts a table of square roots into the folder of a log, unless it is there.
/// \returns its digest, for LogStep
/// \error kIo
/// Local.
Result<exec::Digest> PutRoots(const std::string& folder, const optimizer_steps::RootTable& roots);

/// \error kNotFound; kBadInput  damaged
/// Local.
Result<optimizer_steps::RootTable> GetRoots(const std::string& folder, const exec::Digest& digest);

}  // namespace shardwright::partial
