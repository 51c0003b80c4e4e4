#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/result.h"
#include "os/file.h"

struct ZSTD_DCtx_s;

namespace shardwright::format {

/// Gives the plain bytes of a stretch of a file that is compressed: zstd frames, one after another.
/// From front to back only, and with little memory, whatever comes out of it. One thread at a time.
class ZstdStream {
 public:
  ZstdStream();

  /// Goes to the beginning of a stretch. \pre the file stays open as long as it is read
  void Begin(const os::File& file, std::uint64_t first, std::uint64_t bytes);

  /// Fills `out` with the next plain bytes, as far as there are some.
  /// \returns how many: less than asked for only at the end of the stream
  /// \error kBadInput  it is damaged, or ends within a frame; as os::File::ReadAt
  Result<std::size_t> Read(std::span<std::byte> out);

  /// How many plain bytes were given since the beginning.
  std::uint64_t given() const { return given_; }

 private:
  struct Free {
    void operator()(ZSTD_DCtx_s* context) const;
  };
  Status Refill();

  std::unique_ptr<ZSTD_DCtx_s, Free> context_;
  const os::File* file_ = nullptr;
  std::uint64_t next_ = 0;  // stored bytes that were not read yet begin here
  std::uint64_t end_ = 0;
  std::vector<std::byte> stored_;
  std::size_t used_ = 0;  // of stored_
  bool in_frame_ = false;
  std::uint64_t given_ = 0;
};

}  // namespace shardwright::format
