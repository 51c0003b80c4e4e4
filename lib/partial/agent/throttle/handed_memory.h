// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "support/base/result.h"

namespace shardwright::partial {

/// Memory that a trainer shares, read only.
class HandedMemory {
 public:
  /// \param fd  is closed. Sealed against shrinking: who maps it could be ended by that
  /// \error kBadInput  another size, or not sealed; kIo
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
