#pragma once

#include <string>

#include "base/result.h"

namespace shardwright::os {

/// A file system as a whole, for making many new files durable with one call.
class FileSystem {
 public:
  FileSystem() = default;
  FileSystem(FileSystem&& other) noexcept;
  FileSystem& operator=(FileSystem&& other) noexcept;
  ~FileSystem();

  /// The file system of an existing directory. Open it before writing: Sync reports the write
  /// errors that happen after this.
  /// \error kIo
  static Result<FileSystem> Of(const std::string& directory);

  /// True if the kernel tells of failed writes when a whole file system is synced (Linux 5.8 or
  /// newer); before, only a sync of each file does.
  static bool TellsErrors();

  /// Flushes everything this machine has written to the file system, files of other programs too. A
  /// failure is final.
  /// \error kIo, with errno
  Status Sync() const;

 private:
  int fd_ = -1;
  std::string path_;
};

}  // namespace shardwright::os
