// SPDX-License-Identifier: Apache-2.0
#include "partial/store/read_blobs.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "engine/plan/plan.h"
#include "partial/store/write_blobs.h"
#include "support/os/dir.h"

namespace shardwright::partial {
namespace {

std::vector<exec::SourcePath> PlainPaths(const std::vector<BlobSource>& files) {
  std::vector<exec::SourcePath> paths;
  paths.reserve(files.size());
  for (const BlobSource& file : files) paths.push_back({file.path, file.identity});
  return paths;
}

std::vector<std::string> Names(const std::vector<BlobSource>& files) {
  std::vector<std::string> names;
  names.reserve(files.size());
  for (const BlobSource& file : files) names.push_back(file.path);
  return names;
}

tl::unexpected<Error> BadBlob(const std::string& path, const std::string& what) {
  return Fail(Errc::kBadInput, path, ": ", what);
}

}  // namespace

StoreBytes::StoreBytes(const layout::ShardMap& map, const std::vector<BlobSource>& files,
                       std::uint32_t first_other, exec::ByteSource* other)
    : map_(map),
      first_other_(first_other),
      plain_(map, PlainPaths(files)),
      packed_(map, Names(files)),
      other_(other) {
  zstd_.reserve(files.size());
  for (const BlobSource& file : files) {
    zstd_.push_back(file.zstd);
    remote_.push_back(file.remote);
  }
}

Status StoreBytes::Read(std::uint32_t member, std::uint64_t offset, std::span<std::byte> out) {
  if (member >= first_other_ && other_ != nullptr) {
    return other_->Read(member - first_other_, offset, out);
  }
  if (const ReadRemote& remote = remote_[map_.members[member].file]) {
    remote_bytes_.fetch_add(out.size(), std::memory_order_relaxed);
    return remote(map_.members[member].offset + offset, out);
  }
  if (zstd_[map_.members[member].file]) return packed_.Read(member, offset, out);
  return plain_.Read(member, offset, out);
}

std::uint64_t StoreBytes::bytes_read() const {
  return plain_.bytes_read() + packed_.bytes_read() + remote_bytes_.load() +
         (other_ == nullptr ? 0 : other_->bytes_read());
}

std::uint64_t StoreBytes::files_read() const {
  return plain_.files_read() + packed_.files_read() +
         (other_ == nullptr ? 0 : other_->files_read());
}

Result<BlobSource> FindBlob(const std::string& path, const BlobRef& ref) {
  auto file = os::File::OpenRead(path);
  if (!file && file.error().sys == ENOENT) {
    return BadBlob(path, StrCat("a blob of ", ref.bytes, " bytes is missing"));
  }
  if (!file) return tl::unexpected<Error>(std::move(file).error());
  SW_TRY_ASSIGN(const os::Identity identity, file->Stat());
  if (!ref.zstd && identity.bytes != ref.bytes) {
    return BadBlob(path, StrCat(ref.bytes, " bytes expected, found ", identity.bytes));
  }
  if (ref.zstd && !exec::IsZpack(path, ref.bytes)) {
    return BadBlob(path, StrCat("not a compressed blob of ", ref.bytes, " bytes"));
  }
  return BlobSource{path, identity, ref.zstd, {}};
}

Status VerifyBlob(const std::string& path, const BlobRef& ref,
                  std::span<const std::uint64_t> payloads) {
  SW_TRY_ASSIGN(const BlobSource source, FindBlob(path, ref));
  layout::ShardMap map;
  map.files.push_back(path);
  map.members.push_back({0, 0, ref.bytes, ref.crc32, "blob"});
  StoreBytes bytes(map, {source}, 1, nullptr);
  return VerifyBlob(bytes, 0, path, ref, payloads);
}

Status VerifyBlob(exec::ByteSource& source, std::uint32_t member, const std::string& path,
                  const BlobRef& ref, std::span<const std::uint64_t> payloads) {
  std::vector<exec::UnitSum> sums;
  std::vector<std::byte> buffer;
  std::uint64_t at = 0;
  for (const std::uint64_t payload : payloads) {
    for (std::uint64_t done = 0; done < payload;) {
      const std::uint64_t count = std::min(plan::kUnitBytes, payload - done);
      if (count > ref.bytes - at) return BadBlob(path, "the blob is smaller than its tensors");
      buffer.resize(count);
      SW_TRY(source.Read(member, at, buffer));
      sums.push_back(exec::SumOf(buffer));
      at += count;
      done += count;
    }
  }
  const BlobRef found = Summarize(sums);
  if (found.digest != ref.digest || found.bytes != ref.bytes) {
    return BadBlob(
        path, "digest " + exec::Hex(ref.digest) + " expected, found " + exec::Hex(found.digest));
  }
  return {};
}

}  // namespace shardwright::partial
