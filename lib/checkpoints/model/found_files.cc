// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/model/found_files.h"

#include <cerrno>
#include <string_view>
#include <utility>

#include "checkpoints/model/links.h"
#include "support/os/dir.h"
#include "support/os/real_path.h"

namespace shardwright::checkpoints {
namespace {

/// Limit of open folders. A checkpoint usually has one, the tag folder, on each of its nodes.
constexpr std::size_t kFoldersOpen = 16;

/// Opens a file with a link in its path.
Result<FoundFiles::Opened> OpenLinked(const Found& found) {
  FoundFiles::Opened opened;
  if (found.stays) {
    SW_TRY_ASSIGN(opened.real, RealPathInFolder(found.path));
  } else {
    SW_TRY_ASSIGN(opened.real, os::ResolvePath(found.path));
  }
  // If the path is broken, opening it reports the reason.
  SW_TRY_ASSIGN(opened.file, opened.real.empty()
                                 ? os::File::OpenRead(found.path)
                                 : os::Directory::OpenReal(opened.real, found.path));
  SW_TRY_ASSIGN(opened.identity, opened.file.Stat());
  return opened;
}

}  // namespace

std::shared_ptr<const FoundFiles::Folder> FoundFiles::FolderOf(const std::string& path) {
  const std::lock_guard lock(mutex_);
  const auto known = folders_.find(path);
  if (known != folders_.end()) return known->second;
  if (folders_.size() >= kFoldersOpen) return nullptr;
  std::shared_ptr<const Folder> folder;
  std::string real = os::ResolvePath(path).value_or("");
  auto directory = os::Directory::Open(path);
  if (!real.empty() && directory) {
    folder = std::make_shared<const Folder>(Folder{std::move(real), *std::move(directory)});
  }
  folders_.emplace(path, folder);
  return folder;
}

Result<FoundFiles::Opened> FoundFiles::Open(const Found& found) {
  // Names of a checkpoint's files are relative to its folder.
  const std::string_view path = found.path;
  std::string name = found.name;
  if (path.size() <= name.size() || !path.ends_with(name) ||
      path[path.size() - name.size() - 1] != '/') {
    name = path.substr(path.rfind('/') + 1);
  }
  if (path.size() <= name.size() + 1) return OpenLinked(found);
  const auto folder = FolderOf(std::string(path.substr(0, path.size() - name.size() - 1)));
  if (folder == nullptr) return OpenLinked(found);
  Opened opened;
  auto file = folder->directory.OpenRead(name, &opened.identity);
  if (!file) {
    const bool link = file.error().sys == ELOOP || file.error().sys == ENOTDIR;
    return link ? OpenLinked(found) : tl::unexpected<Error>(std::move(file).error());
  }
  opened.file = *std::move(file);
  opened.real = folder->real;
  if (!opened.real.ends_with('/')) opened.real += '/';
  opened.real += name;
  return opened;
}

}  // namespace shardwright::checkpoints
