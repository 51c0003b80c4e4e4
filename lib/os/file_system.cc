#include "os/file_system.h"

#include <fcntl.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <cstdio>
#include <utility>

#include "os/sys_internal.h"

namespace shardwright::os {

FileSystem::FileSystem(FileSystem&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), path_(std::move(other.path_)) {}

FileSystem& FileSystem::operator=(FileSystem&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(path_, other.path_);
  return *this;
}

FileSystem::~FileSystem() {
  if (fd_ >= 0) ::close(fd_);
}

Result<FileSystem> FileSystem::Of(const std::string& directory) {
  FileSystem system;
  system.fd_ = sys::Open(directory, O_RDONLY | O_DIRECTORY);
  system.path_ = directory;
  if (system.fd_ < 0) return SysFail(Errc::kIo, directory, "cannot open directory to sync", errno);
  return system;
}

bool FileSystem::TellsErrors() {
  utsname name{};
  int major = 0;
  int minor = 0;
  if (::uname(&name) != 0 || std::sscanf(name.release, "%d.%d", &major, &minor) != 2) return false;
  return major > 5 || (major == 5 && minor >= 8);
}

Status FileSystem::Sync() const {
  if (sys::SyncFileSystem(fd_) != 0)
    return SysFail(Errc::kIo, path_, "cannot sync the file system", errno);
  return {};
}

}  // namespace shardwright::os
