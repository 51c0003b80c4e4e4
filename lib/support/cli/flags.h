// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "support/base/result.h"
#include "support/base/run_options.h"

namespace shardwright::cli {

/// A shared flag that only some commands have. All commands have -h, --version, -v, -q,
/// --json, --progress, --log-file and --color.
enum class Shared : std::uint8_t {
  kDryRun,    ///< -n, --dry-run
  kForce,     ///< --force
  kResume,    ///< --resume, --no-resume
  kVerify,    ///< --verify
  kThreads,   ///< --threads
  kMemory,    ///< --memory
  kList,      ///< --list
  kExplain,   ///< --explain
  kSeed,      ///< --seed
  kMode,      ///< --mode
  kTakeOver,  ///< --take-over
};

enum class ProgressMode : std::uint8_t { kAuto, kTty, kPlain, kJson, kOff };
enum class ColorMode : std::uint8_t { kAuto, kAlways, kNever };

inline constexpr std::uint64_t kRankTimeout = 300;  ///< seconds

/// Values of the shared flags, combined from the arguments, the environment and the defaults.
struct CommonFlags {
  int verbosity = 0;                ///< -1 with -q, otherwise the number of -v
  std::optional<std::string> json;  ///< path of the report, "-" for stdout
  ProgressMode progress = ProgressMode::kAuto;
  ColorMode color = ColorMode::kAuto;
  std::string log_file;  ///< empty without a log; {rank} is not yet expanded
  bool dry_run = false;
  bool force = false;
  Resume resume = Resume::kIfSame;
  bool take_over = false;
  bool list = false;
  std::optional<std::string> explain;  ///< name of the tensor
  Verify verify = Verify::kChecksums;
  unsigned threads = 1;            ///< per rank, at least 1
  std::uint64_t memory_bytes = 0;  ///< per rank
  std::uint64_t seed = 0;
  std::uint64_t rank_timeout_s = kRankTimeout;  ///< 0: ranks are not watched
  std::optional<unsigned> mode;  ///< permissions of new files; absent: the umask applies

  /// Returns whether --list or --explain is given: they describe INPUT and write nothing.
  bool describes() const { return list || explain.has_value(); }
};

/// Parses a whole number in [first, last], decimal digits only.
/// \error kUsage with the text and the range
/// Local.
Result<std::uint64_t> ParseCount(std::string_view text, std::uint64_t first, std::uint64_t last);

/// Parses octal file permissions, such as 0640. The owner must be able to read and write.
/// The group and others may read, read and write, or do neither.
/// \error kUsage with the text
/// Local.
Result<unsigned> ParseMode(std::string_view text);

/// Returns the umask for these permissions of new files. New directories get the same
/// permissions, plus the right to enter for all users with read permission.
/// Pure.
unsigned UmaskOf(unsigned mode);

/// Formats a number for help and messages.
std::string RealText(double value);

/// Parses a finite decimal number in [first, last].
/// \error kUsage with the text and the range
/// Local.
Result<double> ParseReal(std::string_view text, double first, double last);

/// Parses the value of --memory: a size of at least kMemoryMinBytes.
/// \error kUsage
/// Local.
Result<std::uint64_t> ParseMemory(std::string_view text);

/// Parse the value of --progress, --color or --verify.
/// \error kUsage with the word and the valid ones
/// Local.
Result<ProgressMode> ParseProgressMode(std::string_view text);
Result<ColorMode> ParseColorMode(std::string_view text);
Result<Verify> ParseVerify(std::string_view text);

}  // namespace shardwright::cli
