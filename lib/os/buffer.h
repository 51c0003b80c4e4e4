#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace shardwright::os {

struct FreeBuffer {
  void operator()(std::byte* bytes) const;
};

/// Memory that nobody has written to yet.
using Buffer = std::unique_ptr<std::byte[], FreeBuffer>;

/// Memory for many bytes, on huge pages where the system has them: reading files into those is
/// faster by a fifth.
/// \returns null if there is no memory left
Buffer MakeBuffer(std::uint64_t bytes);

}  // namespace shardwright::os
