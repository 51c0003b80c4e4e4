// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <mutex>
#include <string>
#include <string_view>

#include "support/base/result.h"
#include "support/cli/flags.h"

namespace shardwright::cli {

/// Standard error and the log file of one rank. Every line is written with one write, so
/// that lines of several ranks and threads do not mix. Thread-safe. If standard error
/// cannot be written, text is lost, but the run continues.
class Console {
 public:
  struct Options {
    std::string command;  ///< prefix of every line
    int verbosity = 0;    ///< as in CommonFlags
    bool color = false;
    int rank = 0;
  };

  explicit Console(Options options);
  Console(const Console&) = delete;
  Console& operator=(const Console&) = delete;
  ~Console();

  /// Appends to a log file from now on. {rank} in `path` stands for the rank. Without
  /// {rank}, only rank 0 writes a log.
  /// \error kIo if the file cannot be opened, or is a symbolic link of another user
  Status OpenLog(const std::string& path);

  /// Prints "command: error: text", at any verbosity.
  void Error(std::string_view text);
  /// Prints "command: warning: text" unless -q is given. Logs it unless it is already logged.
  void Warning(std::string_view text, bool logged = false);
  /// Prints "command: text" if the verbosity is at least `level`. Always logs it.
  void Note(std::string_view text, int level);
  /// Prints progress that the user asked for, "command: text", at any verbosity. Does not log it.
  void Say(std::string_view text);
  /// Prints `line` unchanged, for programs that read standard error.
  void Raw(std::string_view line);
  /// Writes to the log only.
  void Log(std::string_view kind, std::string_view text);

  /// Replaces the progress line at the bottom of a terminal.
  void Paint(std::string_view text);
  /// Removes the progress line.
  void ClearPaint();

  /// Returns errno of the first failed write to the log, 0 if none has failed.
  int log_errno() const;

 private:
  void Show(std::string_view tag, const char* tag_color, std::string_view text);
  void LogLocked(std::string_view kind, std::string_view text);
  void WriteErr(std::string_view text);

  const Options options_;
  mutable std::mutex mutex_;
  bool painted_ = false;
  int log_fd_ = -1;
  int log_errno_ = 0;
};

/// Returns whether to use colors on standard error: `mode`, then NO_COLOR, TERM and the terminal.
/// Local.
bool WantColor(ColorMode mode);

/// True if `fd` is a terminal that can repaint a line.
/// Local.
bool IsTerminal(int fd);

/// Returns the columns of the terminal `fd`, at most 100, or 0 if it is not a terminal.
/// Local.
std::size_t TerminalColumns(int fd);

/// Returns the current time as "2025-01-31T23:59:59.123Z".
/// Local.
std::string TimestampUtc();

/// Writes all of `text`, and continues after interrupts and short writes.
/// \returns 0, or errno of the failed write
/// Local.
int WriteAll(int fd, std::string_view text);

}  // namespace shardwright::cli
