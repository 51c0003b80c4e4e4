// SPDX-License-Identifier: Apache-2.0
// lib/files/zip: zip containers.
// The directory and the local header of every member, compared with each other; torch stores its
// members uncompressed, so their bytes can be read in place. crc32.h makes the checksum of a whole
// out of those of its pieces.

#pragma once

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
  std::string name;
  std::uint64_t header_offset = 0;
  std::uint64_t payload_offset = 0;
  std::uint64_t bytes = 0;   ///< of the content; as many lie in the file if it is stored
  std::uint16_t method = 0;  ///< 0 is stored
  std::uint32_t crc32 = 0;   ///< 0 may mean that it was not computed
};

/// A container whose every member has been located: local headers agree with the directory, nothing
/// overlaps, names are safe and differ in more than case.
struct Container {
  std::vector<Member> members;   ///< in file order
  std::uint64_t file_bytes = 0;  ///< of the file, or of the part that was read

  /// Null if there is none. Linear.
  const Member* Find(std::string_view name) const;
};

/// Reads the central directory and every local header; payloads stay unread.
/// \error kBadInput  truncated, malformed, overlapping or unsafe (docs/formats/pt.md); kLimit  more
///        members than limits::kZipRecords
/// Local; many threads may read different files.
Result<Container> ReadContainer(const files::Part& file);
inline Result<Container> ReadContainer(const os::File& file) {
  return ReadContainer(files::Part(file));
}

/// \error kUnsupported if a member is compressed: its payload cannot be read in place
Status CheckStored(const Member& member);

/// The bytes of one member, its CRC verified (a stored CRC of 0 is not checked).
/// \error kBadInput on a wrong CRC; kLimit beyond `max_bytes`; kUnsupported if compressed
Result<std::string> ReadMember(const files::Part& file, const Member& member,
                               std::uint64_t max_bytes);
inline Result<std::string> ReadMember(const os::File& file, const Member& member,
                                      std::uint64_t max_bytes) {
  return ReadMember(files::Part(file), member, max_bytes);
}

}  // namespace shardwright::zip
