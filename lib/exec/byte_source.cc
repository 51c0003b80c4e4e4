#include "exec/byte_source.h"

namespace shardwright::exec {

Result<os::File> OpenUnchanged(const SourcePath& source, bool* grown) {
  SW_TRY_ASSIGN(os::File file, os::File::OpenRead(source.path));
  SW_TRY_ASSIGN(const os::Identity now, file.Stat());
  const bool longer = now.bytes > source.identity.bytes;
  if (grown != nullptr) *grown = longer;
  if (source.may_grow && longer) return file;
  if (now.bytes != source.identity.bytes || now.mtime_ns != source.identity.mtime_ns) {
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
