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

/// A file that contains members of a map.
struct BlobSource {
  std::string path;
  os::Identity identity;
  bool zstd = false;
  ReadRemote remote;  ///< empty: a file in the store
};

/// Reads members from the blobs of a store, compressed or not, and
/// members from `first_other` on from another source. Thread-safe.
class StoreBytes final : public exec::ByteSource {
 public:
  /// \pre `map` and `other` outlive it; files are indexed as in the map, as far as
  ///      they are the store's; `other` (may be null) counts its members from 0
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

/// Opens a blob and checks its size: the length of a plain file,
/// or the uncompressed length that a compressed file states.
/// \error kBadInput  missing or wrong size: names both sizes
/// Local.
Result<BlobSource> FindBlob(const std::string& path, const BlobRef& ref);

/// Reads a blob and verifies its digest.
/// \param payloads  sizes of its tensors in order; each starts a new unit of the digest
/// \error kBadInput  missing, wrong size or wrong digest: names both values
/// Local.
Status VerifyBlob(const std::string& path, const BlobRef& ref,
                  std::span<const std::uint64_t> payloads);

/// Verifies a blob that is a member of a source. \param path  name for messages
Status VerifyBlob(exec::ByteSource& source, std::uint32_t member, const std::string& path,
                  const BlobRef& ref, std::span<const std::uint64_t> payloads);

}  // namespace shardwright::partial
