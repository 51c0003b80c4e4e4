// SPDX-License-Identifier: Apache-2.0
#include "support/os/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "support/base/checked.h"
#include "support/os/sys_internal.h"

namespace shardwright::os {

namespace {

// Smaller files do not reserve their space: they are written soon after, in one extent.
constexpr std::uint64_t kReservedFrom = std::uint64_t{64} << 10;
constexpr auto kMaxOffset = static_cast<std::uint64_t>(std::numeric_limits<off_t>::max());

// Linux moves at most 2^31 - 4096 bytes per call. A power of two keeps later calls aligned.
constexpr std::size_t kMaxCall = std::size_t{1} << 30;

// With O_NONBLOCK, opening a pipe instead of a file does not wait for the pipe's other end.
constexpr int kOpenFlags = O_NONBLOCK | O_NOCTTY;

std::string CannotReserve(std::uint64_t bytes) {
  return "cannot reserve " + std::to_string(bytes) + " bytes";
}

bool FitsOffset(std::uint64_t offset, std::size_t bytes) {
  return offset <= kMaxOffset && bytes <= kMaxOffset - offset;
}

Result<struct stat> StatRegular(int fd, const std::string& path) {
  struct stat info {};
  if (sys::Stat(fd, &info) != 0) return SysFail(Errc::kNotFound, path, "cannot stat", errno);
  if (!S_ISREG(info.st_mode)) return Fail(Errc::kNotFound, path, ": not a regular file");
  return info;
}

Identity IdentityOf(const struct stat& info) {
  Identity identity;
  identity.bytes = static_cast<std::uint64_t>(info.st_size);
  identity.mtime_ns =
      std::int64_t{info.st_mtim.tv_sec} * 1'000'000'000 + std::int64_t{info.st_mtim.tv_nsec};
  identity.inode = info.st_ino;
  return identity;
}

}  // namespace

File::File(File&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), path_(std::move(other.path_)) {}

File& File::operator=(File&& other) noexcept {
  if (this != &other) {
    if (fd_ >= 0) ::close(fd_);
    fd_ = std::exchange(other.fd_, -1);
    path_ = std::move(other.path_);
  }
  return *this;
}

File::~File() {
  if (fd_ >= 0) ::close(fd_);
}

Result<File> FileFd::Opened(Fd fd, const Where& where, int flags, Identity* identity) {
  if (!fd.ok()) {
    const bool absent =
        errno == ENOENT || errno == ENOTDIR || errno == EISDIR || errno == ENXIO || errno == ELOOP;
    const bool reading = flags == O_RDONLY;
    return SysFail(reading || absent ? Errc::kNotFound : Errc::kIo, where.shown,
                   reading ? "cannot open" : "cannot open for writing", errno);
  }
  SW_TRY_ASSIGN(const struct stat info, StatRegular(fd.get(), where.shown));
  if (identity != nullptr) *identity = IdentityOf(info);
  return File(fd.Release(), where.shown);
}

Result<File> FileFd::OpenExisting(const Where& where, int flags, Identity* identity) {
  const int all = flags | where.open_flags() | kOpenFlags;
  return Opened(Fd(sys::OpenAt(where.dir, where.name.c_str(), all)), where, flags, identity);
}

Result<File> FileFd::OpenBelow(const Where& where, int flags, Identity* identity) {
  const int all = flags | O_NOFOLLOW | kOpenFlags;
  return Opened(Fd(sys::OpenBelow(where.dir, where.name.c_str(), all)), where, flags, identity);
}

Result<File> FileFd::Create(const Where& where, bool executable) {
  const int fd = sys::OpenAt(where.dir, where.name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW,
                             executable ? mode_t{0777} : 0666);
  if (fd < 0) {
    return CreateFail(where.dir, where.shown, "cannot create", errno);
  }
  return File(fd, where.shown);
}

Result<File> File::OpenRead(const std::string& path) {
  return FileFd::OpenExisting(Where(path), O_RDONLY);
}

Result<File> File::OpenWrite(const std::string& path) {
  return FileFd::OpenExisting(Where(path), O_RDWR);
}

Result<File> File::Create(const std::string& path, bool executable) {
  return FileFd::Create(Where(path), executable);
}

Result<Identity> File::Stat() const {
  SW_TRY_ASSIGN(const struct stat info, StatRegular(fd_, path_));
  return IdentityOf(info);
}

Result<bool> File::IsExecutable() const {
  SW_TRY_ASSIGN(const struct stat info, StatRegular(fd_, path_));
  return (info.st_mode & S_IXUSR) != 0;
}

Status File::ReadAt(std::uint64_t offset, std::span<std::byte> out) const {
  const auto ends_early = [&](std::uint64_t end) {
    return Fail(Errc::kBadInput, path_, ": ", out.size(), " bytes expected at offset ", offset,
                ", the file ends at ", end);
  };
  if (!FitsOffset(offset, out.size())) {
    SW_TRY_ASSIGN(const Identity identity, Stat());
    return ends_early(identity.bytes);
  }
  std::size_t done = 0;
  while (done < out.size()) {
    const ssize_t moved = sys::Read(fd_, out.data() + done, std::min(kMaxCall, out.size() - done),
                                    static_cast<off_t>(offset + done));
    if (moved < 0) {
      return SysFail(Errc::kNotFound, path_,
                     "cannot read at offset " + std::to_string(offset + done), errno);
    }
    if (moved == 0) return ends_early(offset + done);
    done += static_cast<std::size_t>(moved);
  }
  return {};
}

Status File::WriteAt(std::uint64_t offset, std::span<const std::byte> data) const {
  if (!FitsOffset(offset, data.size())) {
    return SysFail(Errc::kIo, path_, "cannot write at offset " + std::to_string(offset), EFBIG);
  }
  std::size_t done = 0;
  while (done < data.size()) {
    const ssize_t moved =
        sys::Write(fd_, data.data() + done, std::min(kMaxCall, data.size() - done),
                   static_cast<off_t>(offset + done));
    if (moved <= 0) {
      return SysFail(Errc::kIo, path_, "cannot write at offset " + std::to_string(offset + done),
                     moved == 0 ? EIO : errno);
    }
    done += static_cast<std::size_t>(moved);
  }
  return {};
}

Status File::Reserve(std::uint64_t bytes) const {
  if (bytes > kMaxOffset) return SysFail(Errc::kIo, path_, CannotReserve(bytes), EFBIG);
  if (bytes < kReservedFrom || sys::Allocate(fd_, static_cast<off_t>(bytes)) == 0) return {};
  if (errno == EOPNOTSUPP || errno == ENOSYS || errno == EINVAL) return {};
  return SysFail(Errc::kIo, path_, CannotReserve(bytes), errno);
}

Status File::Allocate(std::uint64_t bytes) const {
  SW_TRY(Reserve(bytes));
  // Sets the size if no space was reserved, and truncates a longer file.
  if (sys::Truncate(fd_, static_cast<off_t>(bytes)) == 0) return {};
  return SysFail(Errc::kIo, path_, CannotReserve(bytes), errno);
}

Status File::Sync() const {
  if (sys::Sync(fd_) != 0) return SysFail(Errc::kIo, path_, "cannot sync", errno);
  return {};
}

Status File::Close() {
  if (sys::Close(std::exchange(fd_, -1)) == 0) return {};
  return SysFail(Errc::kIo, path_, "cannot close", errno);
}

void File::StartWriteback(std::uint64_t offset, std::uint64_t bytes) const {
  // The pages at both ends have bytes of other writes, which would wait for them.
  const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  const std::uint64_t first = CeilDiv(offset, page) * page;
  const std::uint64_t last = (offset + bytes) / page * page;
  if (first < last) {
    sys::StartWriteback(fd_, static_cast<off_t>(first), static_cast<off_t>(last - first));
  }
}

bool File::DropCache() const {
  struct stat info {};
  if (::fstat(fd_, &info) != 0) return false;
  (void)::posix_fadvise(fd_, 0, 0, POSIX_FADV_DONTNEED);
  const auto bytes = static_cast<std::uint64_t>(info.st_size);
  const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> in_memory;
  for (std::uint64_t at = 0; at < bytes; at += kMaxCall) {
    const auto length = static_cast<std::size_t>(std::min<std::uint64_t>(kMaxCall, bytes - at));
    void* const window =
        ::mmap(nullptr, length, PROT_READ, MAP_SHARED, fd_, static_cast<off_t>(at));
    if (window == MAP_FAILED) return false;
    in_memory.resize(static_cast<std::size_t>((length + page - 1) / page));
    const bool known = ::mincore(window, length, in_memory.data()) == 0;
    ::munmap(window, length);
    const auto resident = [](unsigned char one) { return (one & 1) != 0; };
    if (!known || std::any_of(in_memory.begin(), in_memory.end(), resident)) return false;
  }
  return true;
}

}  // namespace shardwright::os
