// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <vector>

#include "files/part.h"
#include "support/base/result.h"

namespace shardwright::zip {

/// A member as described in the central directory.
struct Entry {
  std::string_view name;  ///< in Directory::bytes
  std::uint16_t flags = 0;
  std::uint16_t method = 0;
  std::uint32_t crc32 = 0;
  std::uint64_t compressed_bytes = 0;
  std::uint64_t bytes = 0;
  std::uint64_t header_offset = 0;
};

struct Directory {
  std::vector<std::byte> bytes;  ///< end of the file, with the whole directory
  std::vector<Entry> entries;    ///< in directory order
  std::uint64_t offset = 0;      ///< start of the directory: members end before it
};

/// Finds and parses the central directory.
/// \error as ReadContainer; messages without the file's name
Result<Directory> ReadDirectory(const files::Part& file, std::uint64_t file_bytes);

/// Reads a little-endian number of a header. \pre at + its size is inside
template <typename T>
T Number(std::span<const std::byte> bytes, std::size_t at) {
  static_assert(std::endian::native == std::endian::little);
  T number = 0;
  const std::byte* const last = &bytes[at + sizeof(T) - 1];  // the only check of the range
  std::memcpy(&number, last - (sizeof(T) - 1), sizeof(T));
  return number;
}

inline std::uint16_t U16(std::span<const std::byte> bytes, std::size_t at) {
  return Number<std::uint16_t>(bytes, at);
}

inline std::uint32_t U32(std::span<const std::byte> bytes, std::size_t at) {
  return Number<std::uint32_t>(bytes, at);
}

inline std::uint64_t U64(std::span<const std::byte> bytes, std::size_t at) {
  return Number<std::uint64_t>(bytes, at);
}

}  // namespace shardwright::zip
