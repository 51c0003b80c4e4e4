// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "files/part.h"
#include "support/base/result.h"

namespace shardwright::zip {

/// A member as described in the central directory.
struct Entry {
  std::string name;
  std::uint16_t flags = 0;
  std::uint16_t method = 0;
  std::uint32_t crc32 = 0;
  std::uint64_t compressed_bytes = 0;
  std::uint64_t bytes = 0;
  std::uint64_t header_offset = 0;
};

struct Directory {
  std::vector<Entry> entries;  ///< in directory order
  std::uint64_t offset = 0;    ///< start of the directory: members end before it
};

/// Finds and parses the central directory.
/// \error as ReadContainer; messages without the file's name
Result<Directory> ReadDirectory(const files::Part& file, std::uint64_t file_bytes);

/// Read little-endian numbers of a header. \pre at + size is inside
inline std::uint16_t U16(std::span<const std::byte> bytes, std::size_t at) {
  return static_cast<std::uint16_t>(std::to_integer<unsigned>(bytes[at]) |
                                    std::to_integer<unsigned>(bytes[at + 1]) << 8);
}

inline std::uint32_t U32(std::span<const std::byte> bytes, std::size_t at) {
  return U16(bytes, at) | static_cast<std::uint32_t>(U16(bytes, at + 2)) << 16;
}

inline std::uint64_t U64(std::span<const std::byte> bytes, std::size_t at) {
  return U32(bytes, at) | static_cast<std::uint64_t>(U32(bytes, at + 4)) << 32;
}

}  // namespace shardwright::zip
