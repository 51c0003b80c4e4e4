#include "exec/byte_source.h"

namespace shardwright::exec {

bool IsUnchanged(const SourcePath& source, const os::Identity& now) {
  const os::Identity& then = source.identity;
  if (now.bytes == then.bytes && now.mtime_ns == then.mtime_ns) return true;
  // The same file made longer: what was found of a log is still its beginning. Written anew under
  // its name it is another file, and of any other kind a longer one may have nothing in common.
  return source.may_grow && now.inode == then.inode && now.bytes > then.bytes;
}

Result<os::File> OpenUnchanged(const SourcePath& source, bool* grown) {
  SW_TRY_ASSIGN(os::File file, os::File::OpenRead(source.path));
  SW_TRY_ASSIGN(const os::Identity now, file.Stat());
  if (grown != nullptr) *grown = now.bytes > source.identity.bytes;
  if (!IsUnchanged(source, now)) {
    return Fail(Errc::kNotFound, source.path + ": changed since it was catalogued: " +
                                     std::to_string(source.identity.bytes) + " bytes then, " +
                                     std::to_string(now.bytes) + " now");
  }
  return file;
}

FileBytes::FileBytes(const layout::ShardMap& map, std::vector<SourcePath> paths)
    : map_(map),
      paths_(std::move(paths)),
      pool_([this](std::uint32_t file) { return OpenUnchanged(paths_[file]); }) {}

Status FileBytes::Read(std::uint32_t member, std::uint64_t offset, std::span<std::byte> out) {
  const layout::Member& at = map_.members[member];
  SW_TRY_ASSIGN(const auto file, pool_.Get(at.file));
  SW_TRY(file->ReadAt(at.offset + offset, out));
  bytes_.fetch_add(out.size(), std::memory_order_relaxed);
  return {};
}

Result<bool> FileBytes::LookAgain(std::uint32_t file) {
  bool grown = false;
  SW_TRY(OpenUnchanged(paths_[file], &grown));
  return grown;
}

}  // namespace shardwright::exec
