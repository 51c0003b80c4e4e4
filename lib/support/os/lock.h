// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "support/base/result.h"
#include "support/os/directory.h"

namespace shardwright::os {

/// Interval at which an owner updates the modification time of its lock file.
inline constexpr std::chrono::milliseconds kHeartbeat{20'000};

/// Age of a heartbeat from which on a lock of another machine may be taken over.
inline constexpr std::chrono::seconds kHeartbeatExpires{180};

/// An exclusive lock between processes: flock on a file that names its owner. The kernel drops it
/// when the process ends, however it ends, so a file left by a killed run is no obstacle.
///
/// Some file systems keep locks of each machine, or of each mount, apart. So the file also names
/// the owner's machine, its boot and its start, and the owner updates it every kHeartbeat. A file
/// that names a process of another machine, or a running process of this one, is not taken.
///
/// A lock file of another user is locked and never written.
class Lock {
 public:
  Lock();
  Lock(Lock&& other) noexcept;
  Lock& operator=(Lock&& other) noexcept;
  ~Lock();

  /// Takes the lock or fails; without take_over at once.
  /// \param note       what the owner does, for the message that others get
  /// \param take_over  remove the lock of another machine's process: waits until its heartbeat has
  ///                   expired, or fails once there is another one
  /// \param heartbeat  interval of the updates
  /// \error kBusy if another process holds or may hold it, with the owner, or the name leads to
  ///        anything but a lock file; kIo if the file cannot be made or the file system has no
  ///        locks
  /// Local.
  static Result<Lock> Take(const Directory& folder, const std::string& name,
                           const std::string& note, bool take_over = false,
                           std::chrono::milliseconds heartbeat = kHeartbeat);
  /// The same of a path, whose folder must exist.
  static Result<Lock> Take(const std::string& path, const std::string& note,
                           bool take_over = false);

  /// Proves that no other process has taken the lock over.
  /// \error kBusy, with the new owner
  Status Check() const;

  /// Removes the file, then lets go. An error means that the file stays behind; the lock is free.
  /// A file of another user, or of a process that has taken the lock over, may stay without an
  /// error.
  /// \error kIo
  Status Release();

  bool held() const { return held_ != nullptr; }

 private:
  class Held;
  explicit Lock(std::unique_ptr<Held> held);

  std::unique_ptr<Held> held_;
};

}  // namespace shardwright::os
