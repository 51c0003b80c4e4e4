// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>

namespace shardwright::os {

struct FreeBuffer {
  void operator()(std::byte* bytes) const { std::free(bytes); }
};

/// Owner of uninitialized memory.
using Buffer = std::unique_ptr<std::byte[], FreeBuffer>;

/// Allocates memory. Uses huge pages for 2 MiB or more, if the system has them, because
/// reading files into huge pages is about 20 % faster.
/// \returns null if there is no memory left
inline Buffer MakeBuffer(std::uint64_t bytes) {
  constexpr std::uint64_t kHugePage = std::uint64_t{2} << 20;
  if (bytes < kHugePage) {
    return Buffer(static_cast<std::byte*>(std::malloc(bytes > 0 ? bytes : 1)));
  }
  void* memory = nullptr;
  if (posix_memalign(&memory, kHugePage, bytes) != 0) return nullptr;
  // Advises whole huge pages only, so that the remainder does not occupy another one. The
  // advice is optional, so its result is ignored.
  (void)madvise(memory, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);
  return Buffer(static_cast<std::byte*>(memory));
}

}  // namespace shardwright::os
