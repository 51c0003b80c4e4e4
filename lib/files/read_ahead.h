// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "support/base/result.h"
#include "support/os/file.h"

namespace shardwright::files {

/// Reads the headers of a container in few calls, because each call is a round trip
/// on a network file system. Reads a small container at once and the beginning and
/// end of a larger one. Extends other small reads in the middle to include the
/// following bytes. Caches the bytes it has read. For one thread. Refers to the file.
class ReadAhead {
 public:
  /// Sizes in bytes.
  struct Windows {
    std::uint64_t whole;  ///< containers up to this size are read at once
    std::uint64_t head;   ///< read at the beginning of others
    std::uint64_t tail;   ///< read at their end
  };
  /// For files: the head has most pickles, the tail most directories.
  static constexpr Windows kFile = {std::uint64_t{96} << 10, std::uint64_t{64} << 10,
                                    std::uint64_t{16} << 10};
  /// For one tensor among many containers in a file.
  static constexpr Windows kItem = {std::uint64_t{8} << 10, std::uint64_t{2} << 10,
                                    std::uint64_t{2} << 10};

  /// Reads the container at [first, first + bytes) of the file.
  ReadAhead(const os::File& file, std::uint64_t first, std::uint64_t bytes, Windows windows)
      : file_(file), first_(first), bytes_(bytes), windows_(windows) {}

  /// Implements os::File::ReadAt; `offset` counts from the start of the container.
  /// \pre [offset, offset + out.size()) is inside the container
  Status ReadAt(std::uint64_t offset, std::span<std::byte> out);

 private:
  struct Block {
    std::uint64_t first = 0;
    std::vector<std::byte> bytes;
  };
  const Block* Find(std::uint64_t offset, std::uint64_t bytes) const;

  const os::File& file_;
  std::uint64_t first_;
  std::uint64_t bytes_;
  Windows windows_;
  std::vector<Block> blocks_;  // ascending
};

/// Reads small parts of a file, adjacent ones together in one call. For one thread.
class SmallParts {
 public:
  struct Range {
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
  };

  /// Returns true if a part is small enough to be read together with others.
  static bool IsSmall(const Range& part);

  /// \param parts  ascending, inside the file, which must outlive this
  SmallParts(const os::File& file, std::vector<Range> parts)
      : file_(file), parts_(std::move(parts)) {}

  /// Returns the bytes of a part, valid until the next call. \pre IsSmall
  Result<std::span<const std::byte>> At(std::size_t index);

 private:
  const os::File& file_;
  std::vector<Range> parts_;
  std::uint64_t first_ = 0;
  std::vector<std::byte> loaded_;
};

}  // namespace shardwright::files
