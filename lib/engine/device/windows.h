// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/device/device.h"
#include "support/base/result.h"
#include "support/comm/comm.h"

namespace shardwright::device {

/// Memory of each rank that all ranks of a node map: other ranks read the bytes of a rank
/// in place, without a copy. The ranks must synchronize writes and reads themselves.
class Windows {
 public:
  /// Allocates `bytes` bytes on this rank; other ranks may
  /// pass other sizes. Pages are allocated at the first write.
  /// \returns null if a rank cannot map the memory of another one: it is on another
  ///        node or in another container, the system forbids it, or memory is exhausted
  /// Collective.
  static Result<std::unique_ptr<Windows>> Open(comm::Comm& comm, std::uint64_t bytes);

  std::span<std::byte> mine() const;
  std::span<const std::byte> of(int rank) const;

 private:
  explicit Windows(std::size_t rank) : rank_(rank) {}

  const std::size_t rank_;
  std::vector<std::unique_ptr<Buffer>> memory_;  // by rank
};

}  // namespace shardwright::device
