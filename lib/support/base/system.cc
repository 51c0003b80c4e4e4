// SPDX-License-Identifier: Apache-2.0
#include "support/base/system.h"

#include <limits.h>
#include <malloc.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <iterator>
#include <system_error>

namespace shardwright {

std::string HostName() {
  std::array<char, 256> name = {};
  if (gethostname(name.data(), name.size() - 1) != 0 || name[0] == '\0') return "localhost";
  return name.data();
}

std::string BootId() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return id;
}

std::string FolderOf(std::string_view path) {
  const std::size_t slash = path.rfind('/');
  return slash == std::string_view::npos ? std::string() : std::string(path.substr(0, slash));
}

std::string FolderOfProgram(pid_t process) {
  std::array<char, PATH_MAX> path = {};
  const std::string link = "/proc/" + std::to_string(process) + "/exe";
  const ssize_t length = readlink(link.c_str(), path.data(), path.size());
  if (length <= 0) return {};
  return FolderOf({path.data(), static_cast<std::size_t>(length)});
}

std::uint64_t ProcessStart(std::uint64_t process) {
  std::ifstream file("/proc/" + std::to_string(process) + "/stat");
  const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  // The fields after the name, which may contain any byte: the state, and 18 before the start.
  std::size_t at = text.rfind(')');
  if (at == std::string::npos || at + 2 >= text.size() || text[at + 2] == 'Z') return 0;
  constexpr int kFieldsBefore = 20;
  for (int i = 0; i < kFieldsBefore; ++i) {
    at = text.find(' ', at + 1);
    if (at == std::string::npos) return 0;
  }
  std::uint64_t number = 0;
  const char* const last = text.data() + text.size();
  return std::from_chars(text.data() + at + 1, last, number).ec == std::errc() ? number : 0;
}

void KeepFewHeaps() { ::mallopt(M_ARENA_MAX, 2); }

std::int64_t ClockNanoseconds(clockid_t clock) {
  timespec now{};
  if (::clock_gettime(clock, &now) != 0) return 0;
  return std::int64_t{1'000'000'000} * now.tv_sec + now.tv_nsec;
}

Result<std::string> RandomHex(std::size_t bytes) {
  std::string random(bytes, '\0');
  if (getrandom(random.data(), bytes, 0) != static_cast<ssize_t>(bytes)) {
    return FailErrno(Errc::kInternal, errno, "the system provides no random bytes");
  }
  std::string text;
  text.reserve(2 * bytes);
  for (const char one : random) {
    const auto byte = static_cast<unsigned char>(one);
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  explicit_bzero(random.data(), random.size());
  return text;
}

}  // namespace shardwright
