// SPDX-License-Identifier: Apache-2.0
// lib/files/zip: zip containers.
// Reads the directory and every local header and compares them. torch stores its
// members uncompressed, so their bytes can be read in place. support/base/crc32.h
// combines the checksums of pieces into the checksum of the whole.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "files/part.h"
#include "support/base/result.h"
#include "support/os/file.h"

namespace shardwright::zip {

/// One member of a container.
struct Member {
  std::string_view name;  ///< in Container::text
  std::uint64_t header_offset = 0;
  std::uint64_t payload_offset = 0;
  std::uint64_t bytes = 0;   ///< of the content; as many in the file if it is stored
  std::uint16_t method = 0;  ///< 0 is stored
  std::uint32_t crc32 = 0;   ///< 0 may mean that it was not computed
};

/// A container with the positions of all members. Local headers match the directory,
/// members do not overlap, and names are safe and differ in more than case.
struct Container {
  Container() = default;
  Container(const Container&) = delete;
  Container& operator=(const Container&) = delete;
  Container(Container&&) = default;
  Container& operator=(Container&&) = default;
  ~Container() = default;

  std::vector<std::byte> text;   ///< has the names of members
  std::vector<Member> members;   ///< in file order
  std::uint64_t file_bytes = 0;  ///< of the file, or of the part that was read

  /// Returns null if the name does not exist. Linear.
  const Member* Find(std::string_view name) const;
};

/// Reads the central directory and every local header; payloads stay unread.
/// \error kBadInput  truncated, malformed, overlapping or unsafe
///        (docs/formats/pt.md); kLimit  more members than limits::kZipRecords
/// Local; many threads may read different files.
Result<Container> ReadContainer(const files::Part& file);
inline Result<Container> ReadContainer(const os::File& file) {
  return ReadContainer(files::Part(file));
}

/// \error kUnsupported  the member is compressed, so its payload cannot be read in place
Status CheckStored(const Member& member);

/// Returns the bytes of one member and verifies its CRC (except a stored CRC of 0).
/// \error kBadInput  wrong CRC; kLimit  more than `max_bytes`; kUnsupported  compressed
Result<std::string> ReadMember(const files::Part& file, const Member& member,
                               std::uint64_t max_bytes);
inline Result<std::string> ReadMember(const os::File& file, const Member& member,
                                      std::uint64_t max_bytes) {
  return ReadMember(files::Part(file), member, max_bytes);
}

}  // namespace shardwright::zip
