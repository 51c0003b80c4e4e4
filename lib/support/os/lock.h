// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "support/base/result.h"
#include "support/os/directory.h"

namespace shardwright::os {

/// Interval at which an owner updates the modification time of its lock file, in milliseconds.
inline constexpr std::chrono::milliseconds kHeartbeat{20'000};

/// Age in seconds after which another machine's heartbeat has expired and its lock may be removed.
inline constexpr std::chrono::seconds kHeartbeatExpires{180};

/// An exclusive lock between processes: flock on a file that names its owner. The kernel releases
/// it when the process ends for any reason, so a file of a killed run does not block others.
///
/// On some file systems locks work only within one machine or one mount. So the file also contains
/// the owner's machine, boot id and start time, and the owner updates it every kHeartbeat. Take
/// fails if the file names a process of another machine, or a running process of this one.
///
/// Another user's lock file is locked, but never written.
class Lock {
 public:
  Lock();
  Lock(Lock&& other) noexcept;
  Lock& operator=(Lock&& other) noexcept;
  ~Lock();

  /// Takes the lock or fails. Returns immediately unless take_over is set.
  /// \param note  purpose of the owner, for the messages of other processes
  /// \param take_over  remove a lock of another machine: wait until its heartbeat
  ///        expires, or fail if it is updated
  /// \param heartbeat  interval of the updates
  /// \error kBusy with the owner, if another process has or may have it, or if the name
  ///        leads to a file that is not a lock; kIo if the file cannot be created or
  ///        the file system has no locks
  /// Local.
  static Result<Lock> Take(const Directory& folder, const std::string& name,
                           const std::string& note, bool take_over = false,
                           std::chrono::milliseconds heartbeat = kHeartbeat);
  /// Takes the lock at a path. The folder of the path must exist.
  static Result<Lock> Take(const std::string& path, const std::string& note,
                           bool take_over = false);

  /// Returns whether a process has locked a file (flock). A missing file is not locked.
  /// \error kBusy  the file is another user's or a link; kIo
  /// Local.
  static Result<bool> IsLocked(const std::string& path);

  /// Checks that no other process has taken over the lock.
  /// \error kBusy with the new owner
  Status Check() const;

  /// Removes the file, then releases the lock. After an error the lock is free, but the
  /// file remains. If another user owns the file, or another process has taken over the
  /// lock, the file may remain without an error.
  /// \error kIo
  Status Release();

  bool held() const { return held_ != nullptr; }

 private:
  class State;
  explicit Lock(std::unique_ptr<State> held);

  std::unique_ptr<State> held_;
};

}  // namespace shardwright::os
