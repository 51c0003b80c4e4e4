#pragma once

#include <string>

#include "base/result.h"

namespace shardwright::os {

/// An exclusive lock between processes: flock on a file that holds a line about its owner. The
/// kernel drops it when the process ends, however it ends, so a file left by a killed run is no
/// obstacle.
class Lock {
 public:
  Lock() = default;
  Lock(Lock&& other) noexcept;
  Lock& operator=(Lock&& other) noexcept;
  ~Lock();

  /// Takes the lock or fails at once.
  /// \param note  what the owner does, for the message that others get
  /// \error kBusy if another process holds it, with the owner; kIo if the file cannot be made or
  ///        the file system has no locks
  /// Local.
  static Result<Lock> Take(const std::string& path, const std::string& note);

  /// Removes the file, then lets go. An error means that the file stays behind; the lock is free.
  /// \error kIo
  Status Release();

  bool held() const { return fd_ >= 0; }

 private:
  Lock(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}

  int fd_ = -1;
  std::string path_;
};

}  // namespace shardwright::os
