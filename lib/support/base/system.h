// SPDX-License-Identifier: Apache-2.0
// Information about the current process and its machine from the operating system.

#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "support/base/result.h"

namespace shardwright {

/// Returns the host name of this machine, or "localhost" if it has none. Local.
std::string HostName();

/// Returns the kernel's id of the last boot, or an empty text if it cannot be read. Local.
std::string BootId();

/// Returns the part of a path before its last slash, empty if it has no slash. Local.
std::string FolderOf(std::string_view path);

/// Returns the folder of the program that a process runs, empty if it is unknown. Local.
std::string FolderOfProgram(pid_t process);

/// Returns the start of a running process in clock ticks since the boot; 0 if it has ended. Local.
std::uint64_t ProcessStart(std::uint64_t process);

/// Limits the C library to two malloc arenas, for programs that run for weeks. By default it makes
/// up to eight arenas per processor, and each keeps the most memory that was ever in use. Two are
/// enough for threads that rarely allocate. Call it before the first thread starts.
void KeepFewHeaps();

/// Returns the time of a clock, such as CLOCK_PROCESS_CPUTIME_ID, in nanoseconds; 0 if it cannot be
/// read.
/// Local.
std::int64_t ClockNanoseconds(clockid_t clock);

/// Returns random bytes of the system as lowercase hexadecimal digits, two per byte.
/// \error kInternal  the system provides no random bytes
/// Local.
Result<std::string> RandomHex(std::size_t bytes);

}  // namespace shardwright
