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

/// Opens the files of a scan, each with one call relative to the descriptor of its folder, and by a
/// path without links, so that what was checked is what is read. Thread-safe.
class FoundFiles {
 public:
  /// A file, open.
  struct Opened {
    os::File file;
    os::Identity identity;
    std::string real;  ///< its path without links
  };

  /// Opens a file that was found. A link is followed, if Found::stays only where IsLinkAllowed.
  /// \error kNotFound  as os::File::OpenRead; kBadInput  a link that leads out of its folder
  /// Local.
  Result<Opened> Open(const Found& found);

 private:
  /// A folder that files are opened from.
  struct Folder {
    std::string real;  ///< its path without links
    os::Directory directory;
  };
  /// Null where it cannot be opened: then the files' own paths say why.
  std::shared_ptr<const Folder> FolderOf(const std::string& path);

  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<const Folder>> folders_;  // by path
};

}  // namespace shardwright::checkpoints
