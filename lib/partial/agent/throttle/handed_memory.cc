// SPDX-License-Identifier: Apache-2.0
#include "partial/agent/throttle/handed_memory.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <utility>

namespace shardwright::partial {

Result<HandedMemory> HandedMemory::Map(int fd, std::uint64_t bytes) {
  struct stat found {};
  const bool sealed = (::fcntl(fd, F_GET_SEALS) & F_SEAL_SHRINK) != 0;  // -1 has all bits set
  // Accepts tmpfs only: huge pages may be unavailable at the time of reading.
  struct statfs system {};
  const bool fits = ::fstat(fd, &found) == 0 && S_ISREG(found.st_mode) &&
                    static_cast<std::uint64_t>(found.st_size) == bytes && bytes > 0 &&
                    ::fstatfs(fd, &system) == 0 && system.f_type == TMPFS_MAGIC;
  if (!fits || !sealed || ::fcntl(fd, F_GET_SEALS) < 0) {
    ::close(fd);
    return BadInput("shared memory of a trainer: file of ", bytes,
                    " bytes in memory, sealed against shrinking, expected");
  }
  void* const at = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0);
  ::close(fd);
  if (at == MAP_FAILED) return Fail(Errc::kIo, "shared memory of a trainer: cannot be mapped");
  return HandedMemory(static_cast<const std::byte*>(at), bytes);
}

HandedMemory::HandedMemory(HandedMemory&& other) noexcept
    : at_(std::exchange(other.at_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

HandedMemory::~HandedMemory() {
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast): it is mapped for reading
  if (at_ != nullptr) ::munmap(const_cast<std::byte*>(at_), bytes_);
}

}  // namespace shardwright::partial
