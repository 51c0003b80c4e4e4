// SPDX-License-Identifier: Apache-2.0
// What the operating system tells a process of itself and of its machine.

#pragma once

#include <sys/types.h>

#include <cstddef>
#include <string>
#include <string_view>

#include "support/base/result.h"

namespace shardwright {

/// The name of this machine as it knows itself; "localhost" if it has none. Local.
std::string HostName();

/// The id that the kernel has given to its last start; empty if it cannot be read. Local.
std::string BootId();

/// What comes before the last slash of a path; empty if there is none. Local.
std::string FolderOf(std::string_view path);

/// The folder of the program that a process runs; empty if it cannot be told. Local.
std::string FolderOfProgram(pid_t process);

/// For programs that run for weeks. The C library keeps what threads have freed, the most that was
/// ever in use, in up to eight heaps for each processor; two are enough for threads that rarely ask
/// it for memory. Call it before there are threads.
void KeepFewHeaps();

/// Random bytes of the system, as twice as many lowercase hexadecimal digits.
/// \error kInternal  the system gives none
/// Local.
Result<std::string> RandomHex(std::size_t bytes);

}  // namespace shardwright
