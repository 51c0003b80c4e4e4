// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "support/base/result.h"

namespace shardwright {

/// Makes `operator new` record failed allocations of each thread, in the whole process. Its
/// other behavior does not change. Calls after the first one have no effect.
/// Local.
void WatchMemory();

/// Returns whether `operator new` has failed to get memory in this thread since WatchMemory().
/// Local.
bool MemoryWasWanting();

/// While such an object exists, running out of memory in its thread ends the process through
/// std::terminate(), with std::bad_alloc as the exception. For libraries that cannot handle it.
/// Local.
class EndsWithoutMemory {
 public:
  EndsWithoutMemory();
  ~EndsWithoutMemory();
  EndsWithoutMemory(const EndsWithoutMemory&) = delete;
  EndsWithoutMemory& operator=(const EndsWithoutMemory&) = delete;
};

/// Returns the memory limit in bytes for one parsed JSON or MessagePack text: 1 GiB, or the value
/// set by LimitTextMemory(). A text may always take eight times its own size. Any thread.
std::uint64_t TextMemory();

/// Sets TextMemory() for the whole process, at least 64 MiB. Any thread.
void LimitTextMemory(std::uint64_t bytes);

/// Counts the memory that a parsed text will take, before the parser allocates it. The
/// budget is the larger of TextMemory() and eight times the size of the text. Ordinary
/// texts need less than eight times their size.
class TextBudget {
 public:
  /// \param bytes  size of the text
  explicit TextBudget(std::uint64_t bytes);
  /// Counts `bytes` more. Returns false if they exceed the budget.
  bool Take(std::uint64_t bytes) {
    if (bytes > left_) return false;
    left_ -= bytes;
    return true;
  }
  /// Returns the error for a failed Take: kLimit.
  /// \param where  beginning of the message, such as the file
  tl::unexpected<Error> Exceeded(const std::string& where) const;

 private:
  std::uint64_t bytes_;
  std::uint64_t most_;
  std::uint64_t left_;
};

/// Returns the number of bytes that malloc uses for a block of `bytes`.
constexpr std::uint64_t BlockBytes(std::uint64_t bytes) {
  return bytes < 24 ? 32 : (bytes + 8 + 15) / 16 * 16;
}

}  // namespace shardwright
