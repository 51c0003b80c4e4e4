// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "checkpoints/model/source.h"
#include "support/base/result.h"
#include "support/os/directory.h"
#include "support/os/file.h"

namespace shardwright::checkpoints {

/// Opens files that a scan found, each with one call relative to its folder's descriptor and by a
/// path without links. This guarantees that the checked file is the one that is read. Thread-safe.
class FoundFiles {
 public:
  /// An open file.
  struct Opened {
    os::File file;
    os::Identity identity;
    std::string real;  ///< its path without links
  };

  /// Opens a found file. With Found::stays, follows a link only if IsLinkAllowed permits it.
  /// \error kNotFound  as os::File::OpenRead; kBadInput  a link that leads out of its folder
  /// Local.
  Result<Opened> Open(const Found& found);

 private:
  /// An open folder, from which its files are opened.
  struct Folder {
    std::string real;  ///< its path without links
    os::Directory directory;
  };
  /// Returns null if the folder cannot be opened or too many are open; Open then uses full paths.
  std::shared_ptr<const Folder> FolderOf(const std::string& path);

  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<const Folder>> folders_;  // by path
};

}  // namespace shardwright::checkpoints
