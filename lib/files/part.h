// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "files/read_ahead.h"
#include "support/base/result.h"
#include "support/os/file.h"

namespace shardwright::files {

/// A file, or a byte range that is read like a file of its own, because some formats store
/// many containers in one file. Offsets count from its beginning. Refers to the file.
class Part {
 public:
  /// Selects the whole file.
  explicit Part(const os::File& file) : file_(file) {}
  /// Selects [first, first + bytes) of the file.
  Part(const os::File& file, std::uint64_t first, std::uint64_t bytes)
      : file_(file), first_(first), bytes_(bytes) {}

  /// Selects a range of bytes that have all been read already. \pre `loaded` outlives it
  Part(const os::File& file, std::uint64_t first, std::span<const std::byte> loaded)
      : file_(file), first_(first), bytes_(loaded.size()), loaded_(loaded) {}

  /// Selects a range of which only the beginning and the end have
  /// been read. `first` is its position for messages and storages.
  /// \pre both outlive it, `head` is not empty
  Part(const os::File& file, std::uint64_t first, std::uint64_t bytes,
       std::span<const std::byte> head, std::span<const std::byte> tail)
      : file_(file), first_(first), bytes_(bytes), loaded_(head), tail_(tail) {}

  /// Selects a range of the file that is read through `ahead`, which covers the same range.
  /// \pre `ahead` outlives it
  Part(const os::File& file, std::uint64_t first, std::uint64_t bytes, ReadAhead& ahead)
      : file_(file), first_(first), bytes_(bytes), ahead_(&ahead) {}

  std::uint64_t first() const { return first_; }
  const std::string& path() const { return file_.path(); }
  /// \error kNotFound  the file's size is unknown; kBadInput  the file ends within the range
  Result<std::uint64_t> Bytes() const;
  /// Implements os::File::ReadAt. \error kBadInput  the range ends earlier
  Status ReadAt(std::uint64_t offset, std::span<std::byte> out) const;

 private:
  const os::File& file_;
  std::uint64_t first_ = 0;
  std::optional<std::uint64_t> bytes_;  // absent: up to the end of the file
  std::span<const std::byte> loaded_;   // from its beginning; empty if nothing was read
  std::span<const std::byte> tail_;
  ReadAhead* ahead_ = nullptr;
};

}  // namespace shardwright::files
