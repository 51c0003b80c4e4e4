// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace shardwright::zstd {

/// One item of a file with compressed items. It has two byte ranges: the stored one, as it is in
/// the file, and the plain one, in a file in which all items are decompressed and stored one after
/// the other. Offsets of storages (metadata.h) and of members of a shard map are plain offsets.
struct CompressedItem {
  std::uint64_t stored_first = 0;
  std::uint64_t stored_bytes = 0;
  std::uint64_t first = 0;
  std::uint64_t bytes = 0;
  bool zstd = false;  ///< if false, the item is not compressed and stored_bytes == bytes

  bool operator==(const CompressedItem&) const = default;
};

}  // namespace shardwright::zstd
