// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "support/base/result.h"
#include "support/os/file.h"

struct ZSTD_DCtx_s;

namespace shardwright::zstd {

/// Decompresses a byte range of a file that consists of consecutive zstd frames. Reads
/// from front to back only. Memory use does not depend on the decompressed size. Use
/// it from one thread at a time.
class Stream {
 public:
  Stream();

  /// Starts at the beginning of a byte range.
  /// \pre the file stays open until the last Read
  void Begin(const os::File& file, std::uint64_t first, std::uint64_t bytes);

  /// Writes the next decompressed bytes to `out`.
  /// \returns their number, less than the size of `out` only at the end of the stream
  /// \error kBadInput  the stream is damaged or ends within a frame
  /// \error as os::File::ReadAt
  Result<std::size_t> Read(std::span<std::byte> out);

  /// Number of decompressed bytes since Begin.
  std::uint64_t given() const { return given_; }

 private:
  struct Free {
    void operator()(ZSTD_DCtx_s* context) const;
  };
  Status Refill();

  std::unique_ptr<ZSTD_DCtx_s, Free> context_;
  const os::File* file_ = nullptr;
  std::uint64_t next_ = 0;  // offset of the first stored byte that is not read yet
  std::uint64_t end_ = 0;
  std::vector<std::byte> stored_;
  std::size_t used_ = 0;  // bytes of stored_ that are decompressed
  bool in_frame_ = false;
  std::uint64_t given_ = 0;
};

}  // namespace shardwright::zstd
