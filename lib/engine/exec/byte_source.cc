// SPDX-License-Identifier: Apache-2.0
#include "engine/exec/byte_source.h"

#include <tbb/tbb_allocator.h>

#include <algorithm>

#include "support/os/directory.h"

namespace shardwright::exec {
namespace {

// TBB loads its allocator with dlopen at the first allocation, and dlopen may crash
// when the process is out of memory. Allocate once before main to load it in time.
[[maybe_unused]] const bool kAllocatorFound = [] {
  tbb::tbb_allocator<char> allocator;
  allocator.deallocate(allocator.allocate(1), 1);
  return true;
}();

}  // namespace

bool IsUnchanged(const SourcePath& source, const os::Identity& now) {
  const os::Identity& then = source.identity;
  if (now.bytes == then.bytes && now.mtime_ns == then.mtime_ns) return true;
  // Accept a longer version of the same file: the catalogued part of a log is still its beginning.
  // A replaced file has another inode, and a longer file of another kind may differ everywhere.
  return source.may_grow && now.inode == then.inode && now.bytes > then.bytes;
}

Result<os::File> OpenUnchanged(const SourcePath& source, bool* grown) {
  SW_TRY_ASSIGN(os::File file, source.real.empty()
                                   ? os::File::OpenRead(source.path)
                                   : os::Directory::OpenReal(source.real, source.path));
  SW_TRY_ASSIGN(const os::Identity now, file.Stat());
  if (grown != nullptr) *grown = now.bytes > source.identity.bytes;
  if (!IsUnchanged(source, now)) {
    std::string what = "its modification time differs";
    if (now.bytes != source.identity.bytes) {
      what = StrCat(source.identity.bytes, " bytes expected, found ", now.bytes);
    }
    return Fail(Errc::kNotFound, source.path, ": changed since it was catalogued: ", what);
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
  const std::vector<zstd::CompressedItem>& stretches = paths_[at.file].stretches;
  if (stretches.empty()) {
    SW_TRY(file->ReadAt(at.offset + offset, out));
  } else {
    SW_TRY(ReadByteRanges(file, stretches, at.offset + offset, out));
  }
  bytes_.fetch_add(out.size(), std::memory_order_relaxed);
  return {};
}

Status FileBytes::ReadByteRanges(const std::shared_ptr<const os::File>& file,
                                 const std::vector<zstd::CompressedItem>& stretches,
                                 std::uint64_t first, std::span<std::byte> out) {
  constexpr std::size_t kSkipBytes = std::size_t{256} << 10;
  // Use the item that begins at or before `first`. No member spans two items.
  const auto after = std::upper_bound(
      stretches.begin(), stretches.end(), first,
      [](std::uint64_t value, const zstd::CompressedItem& one) { return value < one.first; });
  SW_CHECK(after != stretches.begin());
  const zstd::CompressedItem& stretch = *std::prev(after);
  const std::uint64_t offset = first - stretch.first;
  if (offset > stretch.bytes || out.size() > stretch.bytes - offset) {
    return Fail(Errc::kBadInput, file->path(), ": read past the end of an item");
  }
  if (!stretch.zstd) return file->ReadAt(stretch.stored_first + offset, out);
  Reading& reading = readings_.local();
  if (reading.stretch != &stretch || reading.file != file || reading.stream.given() > offset) {
    reading.stretch = nullptr;
    reading.file = file;
    reading.stream.Begin(*reading.file, stretch.stored_first, stretch.stored_bytes);
    reading.stretch = &stretch;
  }
  const auto take = [&](std::span<std::byte> to) -> Status {
    Result<std::size_t> got = reading.stream.Read(to);
    if (got && *got == to.size()) return {};
    reading.stretch = nullptr;
    if (!got) return tl::unexpected<Error>(std::move(got).error());
    return Fail(Errc::kBadInput, file->path(), ": a compressed item ends early");
  };
  while (reading.stream.given() < offset) {
    reading.skipped.resize(static_cast<std::size_t>(
        std::min<std::uint64_t>(kSkipBytes, offset - reading.stream.given())));
    SW_TRY(take(reading.skipped));
  }
  return take(out);
}

Result<bool> FileBytes::Recheck(std::uint32_t file) {
  bool grown = false;
  SW_TRY(OpenUnchanged(paths_[file], &grown));
  return grown;
}

}  // namespace shardwright::exec
