// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <mutex>
#include <string>
#include <string_view>

#include "support/base/result.h"
#include "support/cli/flags.h"

namespace shardwright::cli {

/// Standard error and the log file of one rank: whole lines, one write each, so that the lines of
/// several ranks and threads do not mix. Thread-safe. Losing standard error loses text, never the
/// run.
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

  /// Appends to a log from now on. {rank} in `path` stands for the rank; without it only rank 0
  /// keeps a log.
  /// \error kIo when the file cannot be opened, or is a link of another user
  Status OpenLog(const std::string& path);

  /// "command: error: text", always shown.
  void Error(std::string_view text);
  /// "command: warning: text", hidden by -q; logged unless `logged` says it already was.
  void Warning(std::string_view text, bool logged = false);
  /// "command: text" when the verbosity is at least `level`; always logged.
  void Note(std::string_view text, int level);
  /// "command: text" on the terminal only, whatever the verbosity: progress somebody asked for.
  void Say(std::string_view text);
  /// `line` as it is, for readers that are programs.
  void Raw(std::string_view line);
  /// Writes to the log only.
  void Log(std::string_view kind, std::string_view text);

  /// Replaces the line being painted at the bottom of a terminal.
  void Paint(std::string_view text);
  /// Removes that line.
  void ClearPaint();

  /// errno of the first write to the log that failed, 0 while none has.
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

/// True if standard error should carry colours: `mode`, then NO_COLOR, TERM and the terminal.
/// Local.
bool WantColor(ColorMode mode);

/// True if `fd` is a terminal that can repaint a line.
/// Local.
bool IsTerminal(int fd);

/// Columns of the terminal `fd`, at most 100; 0 if it is not a terminal.
/// Local.
std::size_t TerminalColumns(int fd);

/// Now as "2025-01-31T23:59:59.123Z".
/// Local.
std::string TimestampUtc();

/// Writes all of `text`, going on after interrupts and short writes.
/// \returns 0, or the errno that stopped it
/// Local.
int WriteAll(int fd, std::string_view text);

}  // namespace shardwright::cli
