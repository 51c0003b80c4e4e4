// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "support/base/crc32.h"
#include "support/base/result.h"

namespace shardwright {

/// A number as `bytes` little-endian bytes.
inline std::string Le(std::uint64_t number, unsigned bytes) {
  std::string out;
  for (unsigned i = 0; i < bytes; ++i)
    out.push_back(i < 8 ? static_cast<char>(number >> (8 * i)) : '\0');
  return out;
}

inline std::uint32_t CrcOf(std::string_view text) {
  return Crc32(std::as_bytes(std::span(text.data(), text.size())));
}

/// Expects a failure with this code and a message that contains `words`.
template <class T>
void ExpectFails(const Result<T>& result, Errc code, std::string_view words) {
  ASSERT_FALSE(result.has_value()) << "expected: " << words;
  EXPECT_EQ(static_cast<int>(result.error().code), static_cast<int>(code))
      << result.error().message;
  EXPECT_NE(result.error().message.find(words), std::string::npos)
      << result.error().message << "\nexpected: " << words;
}

/// A folder that lives as long as a test.
class FileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (std::filesystem::temp_directory_path() / "sw-format-XXXXXX").string();
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    folder_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string path() const { return folder_ + "/file.pt"; }
  void Write(std::string_view content) const {
    std::ofstream(path(), std::ios::binary | std::ios::trunc) << content;
  }

 private:
  std::string folder_;
};

/// A member of a zip file under test. Fields that are not set are derived from the others. Tests
/// can set every wrong value that a reader must detect.
struct ZipMember {
  std::string name;
  std::string content;
  std::uint16_t flags = 0x0800;
  std::uint16_t method = 0;
  std::string extra;  // local
  std::string central_extra;
  std::string local_name = {};  // of the local header, if it differs
  std::uint32_t local_signature = 0x04034B50;
  std::int64_t bytes_delta = 0;          // added to the sizes in the directory
  std::int64_t offset_delta = 0;         // added to the offset in the directory
  std::uint32_t crc_flip = 0;            // xor of the CRC in the directory
  std::int32_t local_flags = -1;         // of the local header, if they differ
  std::uint32_t local_bytes_flip = 0;    // xor of the size in the local header
  std::uint32_t stored_bytes_delta = 0;  // added to the compressed size only
  std::uint16_t disk = 0;
  bool no_crc = false;
};

struct ZipFile {
  std::vector<ZipMember> members;
  bool zip64 = false;
  std::string before;                // bytes in front of the first member
  std::string between;               // bytes between members and directory
  std::string after;                 // bytes behind the end record
  std::int64_t entries_delta = 0;    // added to the number of entries
  std::int64_t directory_delta = 0;  // added to the directory's offset
  std::int64_t size_delta = 0;       // added to the directory's size
  std::uint16_t disks = 0;
  std::uint32_t locator_disks = 1;
  std::int64_t end64_delta = 0;  // added to the offset of the zip64 end record
  std::uint64_t end64_size = 44;
  std::int64_t end_entries_delta = 0;  // added in the 32-bit end record only
};

inline std::string Build(const ZipFile& file) {
  std::string out = file.before;
  std::string directory;
  for (const ZipMember& m : file.members) {
    const std::uint64_t offset = out.size();
    const std::uint32_t crc = m.no_crc ? 0 : CrcOf(m.content);
    const std::string& local_name = m.local_name.empty() ? m.name : m.local_name;
    const std::uint64_t bytes = m.content.size();
    const bool descriptor = (m.flags & 8) != 0;
    const std::uint64_t local_bytes = descriptor ? 0 : bytes ^ m.local_bytes_flip;
    const std::uint64_t flags =
        m.local_flags < 0 ? m.flags : static_cast<std::uint64_t>(m.local_flags);
    out += Le(m.local_signature, 4) + Le(0, 2) + Le(flags, 2) + Le(m.method, 2) + Le(0, 4) +
           Le(descriptor ? 0 : crc, 4) + Le(local_bytes, 4) + Le(local_bytes, 4) +
           Le(local_name.size(), 2) + Le(m.extra.size(), 2) + local_name + m.extra + m.content;
    if (descriptor) out += Le(0x08074B50, 4) + Le(crc, 4) + Le(bytes, 4) + Le(bytes, 4);
    const std::uint64_t told = bytes + static_cast<std::uint64_t>(m.bytes_delta);
    directory += Le(0x02014B50, 4) + Le(0, 4) + Le(m.flags, 2) + Le(m.method, 2) + Le(0, 4) +
                 Le(crc ^ m.crc_flip, 4) + Le(told + m.stored_bytes_delta, 4) + Le(told, 4) +
                 Le(m.name.size(), 2) + Le(m.central_extra.size(), 2) + Le(0, 2) + Le(m.disk, 2) +
                 Le(0, 6) + Le(offset + static_cast<std::uint64_t>(m.offset_delta), 4) + m.name +
                 m.central_extra;
  }
  out += file.between;
  const std::uint64_t at = out.size() + static_cast<std::uint64_t>(file.directory_delta);
  const std::uint64_t size = directory.size() + static_cast<std::uint64_t>(file.size_delta);
  const std::uint64_t count = file.members.size() + static_cast<std::uint64_t>(file.entries_delta);
  out += directory;
  if (file.zip64) {
    const std::uint64_t end64 = out.size() + static_cast<std::uint64_t>(file.end64_delta);
    out += Le(0x06064B50, 4) + Le(file.end64_size, 8) + Le(45, 2) + Le(45, 2) + Le(file.disks, 4) +
           Le(0, 4) + Le(count, 8) + Le(count, 8) + Le(size, 8) + Le(at, 8);
    out += Le(0x07064B50, 4) + Le(0, 4) + Le(end64, 8) + Le(file.locator_disks, 4);
  }
  const std::uint64_t told = count + static_cast<std::uint64_t>(file.end_entries_delta);
  out += Le(0x06054B50, 4) + Le(file.disks, 2) + Le(0, 2) + Le(told, 2) + Le(told, 2) +
         Le(size, 4) + Le(at, 4) + Le(0, 2) + file.after;
  return out;
}

/// A member as torch lays it out.
inline ZipMember Plain(std::string name, std::string content) {
  ZipMember member;
  member.name = std::move(name);
  member.content = std::move(content);
  return member;
}

}  // namespace shardwright
