// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "support/base/result.h"
#include "support/base/verify.h"

namespace shardwright::cli {

/// A shared flag that not every command has; -h --version -v -q --json --progress --log-file and
/// --color come with all of them.
enum class Shared : std::uint8_t {
  kDryRun,    ///< -n, --dry-run
  kForce,     ///< --force
  kResume,    ///< --resume
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

/// The shared flags after flag, environment and default are combined.
struct CommonFlags {
  int verbosity = 0;                ///< -1 with -q, otherwise the number of -v
  std::optional<std::string> json;  ///< file of the report, "-" for stdout
  ProgressMode progress = ProgressMode::kAuto;
  ColorMode color = ColorMode::kAuto;
  std::string log_file;  ///< empty without a log; {rank} not yet expanded
  bool dry_run = false;
  bool force = false;
  bool resume = false;
  bool take_over = false;
  bool list = false;
  std::optional<std::string> explain;  ///< name of the tensor
  Verify verify = Verify::kSums;
  unsigned threads = 1;            ///< per rank, at least 1
  std::uint64_t memory_bytes = 0;  ///< per rank
  std::uint64_t seed = 0;
  std::optional<unsigned> mode;  ///< permissions of new files; the umask decides without it

  /// True for --list and --explain, which describe INPUT and write nothing.
  bool describes() const { return list || explain.has_value(); }
};

/// A whole number in [first, last], decimal digits only.
/// \error kUsage with the text and the range
/// Local.
Result<std::uint64_t> ParseCount(std::string_view text, std::uint64_t first, std::uint64_t last);

/// Permissions of files in octal, such as 0640: the owner reads and writes, the group and others
/// read, read and write, or neither.
/// \error kUsage with the text
/// Local.
Result<unsigned> ParseMode(std::string_view text);

/// The umask under which new files get these permissions, and new directories the same with the
/// right to enter for everyone who may read.
/// Pure.
unsigned UmaskOf(unsigned mode);

/// A number as help and messages show it.
std::string RealText(double value);

/// A finite decimal number in [first, last].
/// \error kUsage with the text and the range
/// Local.
Result<double> ParseReal(std::string_view text, double first, double last);

/// Value of --memory: a size of at least kMemoryMinBytes.
/// \error kUsage
/// Local.
Result<std::uint64_t> ParseMemory(std::string_view text);

/// Words of the enumerated flags.
/// \error kUsage naming the word and the ones that exist
/// Local.
Result<ProgressMode> ParseProgressMode(std::string_view text);
Result<ColorMode> ParseColorMode(std::string_view text);
Result<Verify> ParseVerify(std::string_view text);

}  // namespace shardwright::cli
