// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/exec/byte_source.h"
#include "engine/exec/zpack.h"
#include "engine/layout/shard_map.h"
#include "partial/store/manifest.h"
#include "support/base/result.h"
#include "support/os/file.h"

namespace shardwright::partial {

/// Fills `out` from a blob that is not in the store. Thread-safe.
using ReadRemote = std::function<Status(std::uint64_t offset, std::span<std::byte> out)>;

/// A file that a map's members lie in.
struct BlobSource {
  std::string path;
  os::Identity identity;
  bool zstd = false;
  ReadRemote remote;  ///< empty: a file of the store
};

/// Reads members out of the blobs of a store, compressed or not, and members from `first_other` on
/// out of another source. Thread-safe.
class StoreBytes final : public exec::ByteSource {
 public:
  /// \pre `map` and `other` outlive it; files are by index of the map, as far as they are the
  ///      store's; `other` (may be null) counts its members from 0
  StoreBytes(const layout::ShardMap& map, const std::vector<BlobSource>& files,
             std::uint32_t first_other, exec::ByteSource* other);

  Status Read(std::uint32_t member, std::uint64_t offset, std::span<std::byte> out) override;
  std::uint64_t bytes_read() const override;
  std::uint64_t files_read() const override;

 private:
  const layout::ShardMap& map_;
  std::vector<bool> zstd_;          // by file
  std::vector<ReadRemote> remote_;  // by file
  std::atomic<std::uint64_t> remote_bytes_ = 0;
  std::uint32_t first_other_;
  exec::FileBytes plain_;
  exec::ZpackBytes packed_;
  exec::ByteSource* other_;
};

/// Opens a blob as far as its size tells: a plain file has the blob's bytes, a compressed one says
/// that it does.
/// \error kBadInput  it is absent or of another size: names both sides
/// Local.
Result<BlobSource> FindBlob(const std::string& path, const BlobRef& ref);

/// Reads a blob and compares its digest.
/// \param payloads  bytes of the tensors in it, in order: they begin units of their own
/// \error kBadInput  absent, another size, another digest: names both sides
/// Local.
Status VerifyBlob(const std::string& path, const BlobRef& ref,
                  std::span<const std::uint64_t> payloads);

/// The same for a blob that is a member of a source. \param path  names it in messages
Status VerifyBlob(exec::ByteSource& source, std::uint32_t member, const std::string& path,
                  const BlobRef& ref, std::span<const std::uint64_t> payloads);

}  // namespace shardwright::partial
