// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <optional>
#include <string>
#include <utility>

#include "engine/device/host.h"

namespace shardwright::device {
namespace {

constexpr std::size_t kPage = 4096;  // at least the alignment of a buffer
constexpr int kSizeSeals = F_SEAL_SHRINK | F_SEAL_GROW;

std::string ErrnoText(int error) { return std::strerror(error); }

class OwnMemory final : public Buffer {
 public:
  OwnMemory(Place place, std::byte* data, std::uint64_t bytes)
      : place_(place), data_(data), bytes_(bytes) {}
  ~OwnMemory() override { std::free(data_); }

  Place place() const override { return place_; }
  std::byte* data() const override { return data_; }
  std::uint64_t size() const override { return bytes_; }

 private:
  const Place place_;
  std::byte* const data_;
  const std::uint64_t bytes_;
};

/// A mapped unnamed file.
class SharedMemory final : public Buffer {
 public:
  SharedMemory(int fd, std::byte* data, std::uint64_t bytes)
      : fd_(fd), data_(data), bytes_(bytes) {}
  ~SharedMemory() override {
    ::munmap(data_, bytes_);
    ::close(fd_);
  }

  Place place() const override { return Place::kShared; }
  std::byte* data() const override { return data_; }
  std::uint64_t size() const override { return bytes_; }
  int descriptor() const { return fd_; }

 private:
  const int fd_;
  std::byte* const data_;
  const std::uint64_t bytes_;
};

tl::unexpected<Error> NoMemory(std::uint64_t bytes, const std::string& why) {
  const Result<std::uint64_t> left = FreeHostBytes();
  return Fail(Errc::kLimit, "no memory for ", bytes, " bytes: ",
              (left ? StrCat(*left, " bytes are free") : std::string("free memory unknown")),
              (why.empty() ? "" : ": " + why));
}

/// Maps a file and takes ownership of its descriptor, also on failure.
Result<std::unique_ptr<Buffer>> Map(int fd, std::uint64_t bytes, bool may_be_sealed) {
  void* at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED && may_be_sealed && (errno == EPERM || errno == EACCES)) {
    at = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0);
  }
  if (at == MAP_FAILED) {
    const int error = errno;
    ::close(fd);
    return NoMemory(bytes, ErrnoText(error));
  }
  // Only a hint, so its result does not matter.
  (void)::madvise(at, bytes, MADV_HUGEPAGE);
  return std::unique_ptr<Buffer>(
      std::make_unique<SharedMemory>(fd, static_cast<std::byte*>(at), bytes));
}

Result<std::unique_ptr<Buffer>> AllocateShared(std::uint64_t bytes) {
  const int fd = ::memfd_create(kSharedName, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return FailErrno(Errc::kIo, errno, "cannot create shared memory: ", ErrnoText(errno));
  // Writing threads allocate the pages in parallel; reserving them here would use one thread.
  if (::ftruncate(fd, static_cast<off_t>(bytes)) != 0 ||
      ::fcntl(fd, F_ADD_SEALS, kSizeSeals) != 0) {
    const int error = errno;
    ::close(fd);
    return NoMemory(bytes, ErrnoText(error));
  }
  return Map(fd, bytes, false);
}

/// Reads a number from a system file: the one after `key`, or the first word if `key` is empty.
std::optional<std::uint64_t> NumberIn(const char* path, std::string_view key) {
  std::ifstream file(path);
  std::uint64_t number = 0;
  if (key.empty()) return file >> number ? std::optional(number) : std::nullopt;
  std::string word;
  while (file >> word) {
    if (word == key) return file >> number ? std::optional(number) : std::nullopt;
  }
  return std::nullopt;
}

}  // namespace

Result<std::uint64_t> FreeHostBytes() {
  const auto available = NumberIn("/proc/meminfo", "MemAvailable:");
  if (!available) return Fail(Errc::kIo, "/proc/meminfo: MemAvailable is missing or not a number");
  std::uint64_t bytes = *available * 1024;
  const auto limit = NumberIn("/sys/fs/cgroup/memory.max", "");
  const auto used = NumberIn("/sys/fs/cgroup/memory.current", "");
  if (limit && used) bytes = std::min(bytes, *limit - std::min(*limit, *used));
  return bytes;
}

Result<std::unique_ptr<Buffer>> AllocateHost(Place place, std::uint64_t bytes) {
  SW_TRY_ASSIGN(const std::uint64_t left, FreeHostBytes());
  if (bytes > left) return NoMemory(bytes, "");
  if (place == Place::kShared) return AllocateShared(bytes);
  void* memory = nullptr;
  if (::posix_memalign(&memory, kPage, bytes) != 0) return NoMemory(bytes, "");
  return std::unique_ptr<Buffer>(
      std::make_unique<OwnMemory>(place, static_cast<std::byte*>(memory), bytes));
}

Result<Handle> ExportHost(const Buffer& buffer) {
  const auto* shared = dynamic_cast<const SharedMemory*>(&buffer);
  if (shared == nullptr) return Fail(Errc::kInternal, "only shared memory can be exported");
  Handle handle;
  handle.bytes = shared->size();
  handle.descriptor = shared->descriptor();
  return handle;
}

Result<std::unique_ptr<Buffer>> ImportHost(const Handle& handle) {
  if (handle.kind != Kind::kHost) {
    if (handle.descriptor >= 0) ::close(handle.descriptor);
    return Fail(Errc::kBadInput, "shared memory: host handle expected, found a handle of ",
                Name(handle.kind));
  }
  struct stat found {};
  if (handle.descriptor < 0 || ::fstat(handle.descriptor, &found) != 0) {
    return Fail(Errc::kIo, "shared memory: the handle has no valid descriptor");
  }
  const auto there = static_cast<std::uint64_t>(found.st_size);
  const int seals = ::fcntl(handle.descriptor, F_GET_SEALS);
  std::string wrong;
  if (handle.bytes == 0 || there != handle.bytes) {
    wrong = StrCat(handle.bytes, " bytes expected, found ", there);
  } else if (seals < 0 || (seals & kSizeSeals) != kSizeSeals) {
    wrong = "its size is not sealed";
  } else if (struct statfs system{};
             ::fstatfs(handle.descriptor, &system) != 0 || system.f_type != TMPFS_MAGIC) {
    // The system may run out of huge pages when they are read, which would kill the reader.
    wrong = "pages of the default size expected";
  }
  if (!wrong.empty()) {
    ::close(handle.descriptor);
    return Fail(Errc::kBadInput, "shared memory: ", wrong);
  }
  return Map(handle.descriptor, handle.bytes, true);
}

}  // namespace shardwright::device
