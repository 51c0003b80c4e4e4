// SPDX-License-Identifier: Apache-2.0
// lib/support/os/locks: the text of a lock file (owner.h).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace shardwright::os {

inline constexpr std::string_view kLockFirstWord = "process ";  ///< of every lock file's text

/// The owner that a lock file names.
struct LockOwner {
  std::uint64_t process = 0;
  std::string host;
  std::string boot;           ///< empty in the lock files of older versions
  std::uint64_t started = 0;  ///< in clock ticks since the boot
};

/// Returns the text of a lock file of this process. \param note  purpose of the owner
std::string DescribeOwner(const std::string& note);

/// Inverse of DescribeOwner. Returns nullopt if the text was truncated.
std::optional<LockOwner> ParseOwner(std::string_view text);

}  // namespace shardwright::os
