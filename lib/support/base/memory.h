// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "support/base/result.h"

namespace shardwright {

/// Makes `operator new` note where it finds no memory, in the whole process; what it then does is
/// what it did before. Again: nothing.
/// Local.
void WatchMemory();

/// Whether `operator new` has found no memory in this thread since WatchMemory().
/// Local.
bool MemoryWasWanting();

/// As long as one lives, want of memory in its thread ends the process as std::terminate() does,
/// with std::bad_alloc as what was thrown. For libraries that do not bear that exception.
/// Local.
class EndsWithoutMemory {
 public:
  EndsWithoutMemory();
  ~EndsWithoutMemory();
  EndsWithoutMemory(const EndsWithoutMemory&) = delete;
  EndsWithoutMemory& operator=(const EndsWithoutMemory&) = delete;
};

/// Memory in bytes that one text from outside may take once it is parsed, where it is not small:
/// 1 GiB, or as set by LimitTextMemory(). Any thread.
std::uint64_t TextMemory();

/// Sets TextMemory() for the whole process, at least 64 MiB. Any thread.
void LimitTextMemory(std::uint64_t bytes);

/// Counts the memory that one text from outside takes once it is parsed, before it is taken: at
/// most TextMemory(), or eight times the text where that is more, which texts of ordinary content
/// never need.
class TextBudget {
 public:
  /// \param bytes  of the text
  explicit TextBudget(std::uint64_t bytes);
  /// Counts `bytes` more; false if they exceed the budget.
  bool Take(std::uint64_t bytes) {
    if (bytes > left_) return false;
    left_ -= bytes;
    return true;
  }
  /// The error where Take has failed: kLimit.
  /// \param where  starts the message
  tl::unexpected<Error> Exceeded(const std::string& where) const;

 private:
  std::uint64_t bytes_;
  std::uint64_t most_;
  std::uint64_t left_;
};

/// Bytes that malloc takes for a block of `bytes`.
constexpr std::uint64_t BlockBytes(std::uint64_t bytes) {
  return bytes < 24 ? 32 : (bytes + 8 + 15) / 16 * 16;
}

}  // namespace shardwright
