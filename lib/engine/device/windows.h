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

/// Memory of each rank that all ranks of a node see: what a rank puts into its own the others read
/// where it lies. Who reads when is for the ranks to agree on.
class Windows {
 public:
  /// Makes memory of `bytes` bytes on this rank, of any size on the others. Its pages are made when
  /// they are first written to.
  /// \returns null where not every rank sees that of all the others: on another node, in another
  ///          container, or where the system does not let it, or has no memory
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
