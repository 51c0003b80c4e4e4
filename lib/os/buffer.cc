#include "os/buffer.h"

#include <sys/mman.h>

#include <cstdlib>

namespace shardwright::os {
namespace {

constexpr std::uint64_t kHugePage = std::uint64_t{2} << 20;

}  // namespace

void FreeBuffer::operator()(std::byte* bytes) const { std::free(bytes); }

Buffer MakeBuffer(std::uint64_t bytes) {
  if (bytes < kHugePage) {
    return Buffer(static_cast<std::byte*>(std::malloc(bytes > 0 ? bytes : 1)));
  }
  void* memory = nullptr;
  if (posix_memalign(&memory, kHugePage, bytes) != 0) return nullptr;
  // Only whole ones, so that the rest does not take one more. A wish: what it answers does not
  // matter.
  (void)madvise(memory, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);
  return Buffer(static_cast<std::byte*>(memory));
}

}  // namespace shardwright::os
