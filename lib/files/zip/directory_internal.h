// SPDX-License-Identifier: Apache-2.0
#pragma once

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
std::uint16_t U16(std::span<const std::byte> bytes, std::size_t at);
std::uint32_t U32(std::span<const std::byte> bytes, std::size_t at);
std::uint64_t U64(std::span<const std::byte> bytes, std::size_t at);

}  // namespace shardwright::zip
