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

/// A file, or a stretch of one that is read as if it were a file by itself: some formats put many
/// containers into one file. Offsets count from where it begins. Refers to the file.
class Part {
 public:
  /// The whole file.
  explicit Part(const os::File& file) : file_(file) {}
  /// [first, first + bytes) of it.
  Part(const os::File& file, std::uint64_t first, std::uint64_t bytes)
      : file_(file), first_(first), bytes_(bytes) {}

  /// The same, of which all bytes have been read before. \pre `loaded` outlives it
  Part(const os::File& file, std::uint64_t first, std::span<const std::byte> loaded)
      : file_(file), first_(first), bytes_(loaded.size()), loaded_(loaded) {}

  /// A stretch of which its beginning and its end have been read, and nothing else can be; `first`
  /// is where messages and storages say that it begins.
  /// \pre both outlive it, `head` is not empty
  Part(const os::File& file, std::uint64_t first, std::uint64_t bytes,
       std::span<const std::byte> head, std::span<const std::byte> tail)
      : file_(file), first_(first), bytes_(bytes), loaded_(head), tail_(tail) {}

  /// A stretch that lies in the file, read through `ahead`, which reads the same stretch.
  /// \pre `ahead` outlives it
  Part(const os::File& file, std::uint64_t first, std::uint64_t bytes, ReadAhead& ahead)
      : file_(file), first_(first), bytes_(bytes), ahead_(&ahead) {}

  std::uint64_t first() const { return first_; }
  const std::string& path() const { return file_.path(); }
  /// \error kNotFound if the file cannot be asked; kBadInput if it ends before the stretch does
  Result<std::uint64_t> Bytes() const;
  /// As os::File::ReadAt. \error kBadInput if the stretch ends before
  Status ReadAt(std::uint64_t offset, std::span<std::byte> out) const;

 private:
  const os::File& file_;
  std::uint64_t first_ = 0;
  std::optional<std::uint64_t> bytes_;  // none: to the end of the file
  std::span<const std::byte> loaded_;   // from its beginning; empty: nothing was read before
  std::span<const std::byte> tail_;
  ReadAhead* ahead_ = nullptr;
};

}  // namespace shardwright::files
