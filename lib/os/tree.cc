#include <cerrno>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>

#include "os/dir.h"
#include "os/sys_internal.h"

namespace shardwright::os {

namespace {

Status TooDeep(const std::string& path) {
  return Fail(Errc::kLimit,
              path + ": directories nested deeper than " + std::to_string(kTreeDepth));
}

Status Walk(const std::string& path, int depth, Tree& tree) {
  if (depth > kTreeDepth) return TooDeep(path);
  SW_TRY_ASSIGN(const std::vector<Entry> entries, ListDir(path));
  for (const Entry& entry : entries) {
    const std::string child = path + "/" + entry.name;
    if (entry.type == EntryType::kDir) SW_TRY(Walk(child, depth + 1, tree));
    if (entry.type == EntryType::kFile) tree.files.push_back(child);
  }
  tree.dirs.push_back(path);
  return {};
}

Result<std::vector<std::string>> NamesOf(DIR* dir, const std::string& path) {
  std::vector<std::string> names;
  while (const dirent* const found = sys::ReadDir(dir)) {
    const std::string_view name = found->d_name;
    if (name != "." && name != "..") names.emplace_back(name);
  }
  if (errno != 0) return SysFail(Errc::kIo, path, "cannot list directory", errno);
  return names;
}

// Removes what an open directory holds. Names are resolved against descriptors that were opened
// with O_NOFOLLOW, so that no link put in the way can lead outside.
Status Empty(Fd fd, const std::string& path, int depth) {
  if (depth > kTreeDepth) return TooDeep(path);
  const std::unique_ptr<DIR, int (*)(DIR*)> dir(sys::OpenDir(std::move(fd)), &::closedir);
  if (dir == nullptr) return SysFail(Errc::kIo, path, "cannot list directory", errno);
  const int self = ::dirfd(dir.get());
  SW_TRY_ASSIGN(const std::vector<std::string> names, NamesOf(dir.get(), path));
  for (const std::string& name : names) {
    std::string child_path = path + "/";
    child_path += name;
    Fd child(sys::OpenAt(self, name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
    if (child.ok()) {
      SW_TRY(Empty(std::move(child), child_path, depth + 1));
      if (sys::RmdirAt(self, name.c_str()) != 0) {
        return SysFail(Errc::kIo, child_path, "cannot remove directory", errno);
      }
    } else if (errno != ENOTDIR && errno != ELOOP) {
      return SysFail(Errc::kIo, child_path, "cannot open directory to remove", errno);
    } else if (sys::UnlinkAt(self, name.c_str()) != 0) {
      return SysFail(Errc::kIo, child_path, "cannot remove", errno);
    }
  }
  return {};
}

}  // namespace

Result<Tree> WalkTree(const std::string& path) {
  Tree tree;
  SW_TRY(Walk(path, 0, tree));
  return tree;
}

Status RemoveTree(const std::string& path, const std::string& root) {
  SW_TRY_ASSIGN(const ParentName split, SplitOutput(path));
  const std::unique_ptr<char, decltype(&::free)> real(sys::RealPath(root), &::free);
  if (real == nullptr) return SysFail(Errc::kNotFound, root, "cannot resolve", errno);
  std::string prefix = real.get();
  if (prefix.back() != '/') prefix += '/';
  const std::string parent = split.parent == "/" ? "/" : split.parent + "/";
  if (parent.rfind(prefix, 0) != 0) {
    return Fail(Errc::kUsage, path + ": not removed: it is not inside " + EscapedName(root));
  }
  const std::string full = split.Path();
  Fd fd(sys::Open(full, O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
  if (!fd.ok()) {
    if (errno == ENOENT) return {};
    if (errno == ENOTDIR || errno == ELOOP) return RemoveFile(full);
    return SysFail(Errc::kIo, full, "cannot open directory to remove", errno);
  }
  SW_TRY(Empty(std::move(fd), full, 0));
  if (sys::RmdirAt(AT_FDCWD, full.c_str()) != 0) {
    return SysFail(Errc::kIo, full, "cannot remove directory", errno);
  }
  return {};
}

}  // namespace shardwright::os
