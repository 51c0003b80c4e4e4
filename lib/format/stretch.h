#pragma once

#include <cstdint>

namespace shardwright::format {

/// An item of a file whose items are compressed: where it lies in the file, and where it would lie
/// if none of them were and they followed one another. Offsets of storages (skeleton.h) and of
/// members of a map are those of the second kind.
struct Stretch {
  std::uint64_t stored_first = 0;
  std::uint64_t stored_bytes = 0;
  std::uint64_t first = 0;
  std::uint64_t bytes = 0;
  bool zstd = false;  ///< false: it is stored as it is, and stored_bytes == bytes

  bool operator==(const Stretch&) const = default;
};

}  // namespace shardwright::format
