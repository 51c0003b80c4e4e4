// SPDX-License-Identifier: Apache-2.0
#include "support/cli/console.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <utility>

#include "support/text/text.h"

namespace shardwright::cli {
namespace {

constexpr const char* kRed = "\x1b[1;31m";
constexpr const char* kYellow = "\x1b[1;33m";
constexpr const char* kPlain = "\x1b[0m";

/// Indents lines after line breaks of the text, so that no part of it looks like a new message.
std::string Indented(std::string_view text) {
  std::string out;
  while (true) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    out += text::Printable(text.substr(0, end));
    if (end == text.size()) return out;
    text.remove_prefix(end + 1);
    if (!text.empty()) out += "\n  ";
  }
}

/// Opens a file to append to; -1 and errno on failure. A symbolic link, such as /dev/stderr,
/// must belong to this user or root. Otherwise another user could choose the file.
int OpenToAppend(const std::string& name) {
  struct stat there {};
  const bool link = lstat(name.c_str(), &there) == 0 && S_ISLNK(there.st_mode);
  if (link && there.st_uid != geteuid() && there.st_uid != 0) {
    errno = ELOOP;
    return -1;
  }
  const int follow = link ? 0 : O_NOFOLLOW;
  return open(name.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | follow, 0666);
}

}  // namespace

Console::Console(Options options) : options_(std::move(options)) {}

Console::~Console() {
  ClearPaint();
  if (log_fd_ >= 0) close(log_fd_);
}

Status Console::OpenLog(const std::string& path) {
  constexpr std::string_view kRank = "{rank}";
  std::string name = path;
  std::size_t at = name.find(kRank);
  if (at == std::string::npos && options_.rank != 0) return {};
  for (; at != std::string::npos; at = name.find(kRank, at)) {
    name.replace(at, kRank.size(), std::to_string(options_.rank));
  }
  const int fd = OpenToAppend(name);
  if (fd < 0) {
    const int error = errno;
    const std::string why = error == ELOOP
                                ? "a symbolic link that another user owns, or that links to itself"
                                : std::string(std::strerror(error));
    return FailErrno(Errc::kIo, error, "log ", name, ": cannot open: ", why);
  }
  const std::lock_guard lock(mutex_);
  log_fd_ = fd;
  return {};
}

void Console::Error(std::string_view text) {
  Show("error", kRed, text);
  Log("error", text);
}

void Console::Warning(std::string_view text, bool logged) {
  if (options_.verbosity >= 0) Show("warning", kYellow, text);
  if (!logged) Log("warning", text);
}

void Console::Note(std::string_view text, int level) {
  if (options_.verbosity >= level) Say(text);
  Log("note", text);
}

void Console::Say(std::string_view text) { Show("", "", text); }

void Console::Raw(std::string_view line) {
  const std::lock_guard lock(mutex_);
  WriteErr(std::string(line) + "\n");
}

void Console::Log(std::string_view kind, std::string_view text) {
  const std::lock_guard lock(mutex_);
  LogLocked(kind, text);
}

void Console::Paint(std::string_view text) {
  const std::lock_guard lock(mutex_);
  painted_ = true;
  WriteErr("\r" + options_.command + ": " + text::Printable(text) + "\x1b[K");
}

void Console::ClearPaint() {
  const std::lock_guard lock(mutex_);
  if (std::exchange(painted_, false)) WriteErr("\r\x1b[K");
}

int Console::log_errno() const {
  const std::lock_guard lock(mutex_);
  return log_errno_;
}

void Console::Show(std::string_view tag, const char* tag_color, std::string_view text) {
  std::string line = options_.command + ": ";
  if (!tag.empty()) {
    if (options_.color) line += tag_color;
    line.append(tag).append(":");
    if (options_.color) line += kPlain;
    line += " ";
  }
  line += Indented(text) + "\n";
  const std::lock_guard lock(mutex_);
  if (std::exchange(painted_, false)) line.insert(0, "\r\x1b[K");
  WriteErr(line);
}

void Console::LogLocked(std::string_view kind, std::string_view text) {
  if (log_fd_ < 0 || log_errno_ != 0) return;
  const std::string line = TimestampUtc() + " " + options_.command + "[" +
                           std::to_string(options_.rank) + "] " + std::string(kind) + ": " +
                           Indented(text) + "\n";
  log_errno_ = WriteAll(log_fd_, line);
}

void Console::WriteErr(std::string_view text) {
  // Ignores errors of standard error: the report and the exit code still have the outcome.
  [[maybe_unused]] const int error = WriteAll(STDERR_FILENO, text);
}

bool WantColor(ColorMode mode) {
  if (mode != ColorMode::kAuto) return mode == ColorMode::kAlways;
  const char* no_color = std::getenv("NO_COLOR");
  if (no_color != nullptr && *no_color != '\0') return false;
  return IsTerminal(STDERR_FILENO);
}

bool IsTerminal(int fd) {
  const char* term = std::getenv("TERM");
  return isatty(fd) == 1 && term != nullptr && std::strcmp(term, "dumb") != 0;
}

std::size_t TerminalColumns(int fd) {
  constexpr std::size_t kWidest = 100;
  if (isatty(fd) != 1) return 0;
  winsize size{};
  if (ioctl(fd, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 80;
  return std::min<std::size_t>(size.ws_col, kWidest);
}

std::string TimestampUtc() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(now).count();
  const std::time_t seconds = static_cast<std::time_t>(ms / 1000);
  std::tm parts{};
  gmtime_r(&seconds, &parts);
  char date[32];
  std::strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%S", &parts);
  char text[48];
  std::snprintf(text, sizeof text, "%s.%03dZ", date, static_cast<int>(ms % 1000));
  return text;
}

int WriteAll(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = write(fd, text.data(), text.size());
    if (written < 0) {
      if (errno == EINTR) continue;
      return errno;
    }
    text.remove_prefix(static_cast<std::size_t>(written));
  }
  return 0;
}

}  // namespace shardwright::cli
