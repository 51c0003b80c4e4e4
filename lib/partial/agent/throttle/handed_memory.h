// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "support/base/result.h"

namespace shardwright::partial {

/// Read-only mapping of memory that a trainer shares.
class HandedMemory {
 public:
  /// \param fd  closed by Map. Must be sealed against shrinking, which could crash readers
  /// \error kBadInput  wrong size, or not sealed; kIo
  static Result<HandedMemory> Map(int fd, std::uint64_t bytes);
  HandedMemory(HandedMemory&& other) noexcept;
  HandedMemory& operator=(HandedMemory&&) = delete;
  ~HandedMemory();

  std::span<const std::byte> bytes() const { return {at_, bytes_}; }

 private:
  HandedMemory(const std::byte* at, std::uint64_t bytes) : at_(at), bytes_(bytes) {}
  const std::byte* at_ = nullptr;
  std::uint64_t bytes_ = 0;
};

}  // namespace shardwright::partial
