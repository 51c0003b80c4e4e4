// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "builders.h"
#include "files/zip/reader.h"
#include "support/os/file.h"

namespace shardwright::zip {
namespace {

class Zip : public FileTest {
 protected:
  Result<Container> Read(const ZipFile& file) { return ReadBytes(Build(file)); }
  Result<Container> ReadBytes(std::string_view bytes) {
    Write(bytes);
    SW_TRY_ASSIGN(const os::File opened, os::File::OpenRead(path()));
    return ReadContainer(opened);
  }
  void ExpectRefused(const ZipFile& file, std::string_view words) {
    const Result<Container> read = Read(file);
    ExpectFails(read, Errc::kBadInput, words);
    if (!read) {
      EXPECT_TRUE(read.error().message.starts_with(path())) << read.error().message;
    }
  }
  // One member that `change` corrupts, between two good ones.
  template <class Change>
  void ExpectMemberRefused(std::string_view words, Change change) {
    ZipFile file;
    file.members = {Plain("a/first", "1"), Plain("a/second", "0123456789"), Plain("a/third", "3")};
    change(file.members[1]);
    ExpectRefused(file, words);
  }
  static ZipFile Three() {
    ZipFile file;
    file.members = {Plain("a/first", "1"), Plain("a/second", "22"), Plain("a/third", "")};
    return file;
  }
};

TEST_F(Zip, LocatesMembers) {
  for (bool zip64 : {false, true}) {
    ZipFile file = Three();
    file.zip64 = zip64;
    file.members[1].extra = Le(0x4246, 2) + Le(3, 2) + "ZZZ";
    file.members[1].flags = 0x0808;
    const Result<Container> read = Read(file);
    ASSERT_TRUE(read.has_value()) << read.error().message;
    ASSERT_EQ(read->members.size(), 3U);
    EXPECT_EQ(read->members[0].payload_offset, 37U);
    EXPECT_EQ(read->members[1].header_offset, 38U);
    EXPECT_EQ(read->members[1].payload_offset, 38U + 30 + 8 + 7);
    EXPECT_EQ(read->members[1].bytes, 2U);
    EXPECT_EQ(read->members[1].crc32, CrcOf("22"));
    EXPECT_EQ(read->Find("a/third"), &read->members[2]);
    EXPECT_EQ(read->Find("a/THIRD"), nullptr);
  }
}

TEST_F(Zip, DirectoryOrderIsFree) {
  // The directory lists the second member first: members come back in file order.
  ZipFile file = Three();
  std::string bytes = Build(file);
  const std::size_t entry = bytes.find(Le(0x02014B50, 4));
  const std::string first = bytes.substr(entry, 46 + 7);
  const std::string second = bytes.substr(entry + first.size(), 46 + 8);
  bytes.replace(entry, first.size() + second.size(), second + first);
  const Result<Container> read = ReadBytes(bytes);
  ASSERT_TRUE(read.has_value()) << read.error().message;
  EXPECT_EQ(read->members[0].name, "a/first");
}

TEST_F(Zip, ManySmallAndLargeMembers) {
  ZipFile file;
  for (int i = 0; i < 3000; ++i) {
    const std::size_t bytes = i % 100 == 0 ? 50'000 : static_cast<std::size_t>(i) % 7;
    file.members.push_back(Plain("a/data/" + std::to_string(i), std::string(bytes, 'x')));
    file.members.back().extra = std::string(static_cast<std::size_t>(i) % 5 * 60, 'e');
  }
  const Result<Container> read = Read(file);
  ASSERT_TRUE(read.has_value()) << read.error().message;
  const Result<os::File> opened = os::File::OpenRead(path());
  for (const Member& member : read->members) {
    const Result<std::string> content = ReadMember(*opened, member, 100'000);
    ASSERT_TRUE(content.has_value()) << content.error().message;
    EXPECT_EQ(content->find_first_not_of('x'), std::string::npos);
  }
}

TEST_F(Zip, Truncated) {
  const std::string whole = Build(Three());
  for (std::size_t bytes = 0; bytes < whole.size(); bytes += 3) {
    const Result<Container> read = ReadBytes(std::string_view(whole).substr(0, bytes));
    ExpectFails(read, Errc::kBadInput, "central directory not found");
  }
}

TEST_F(Zip, BytesBehindTheEnd) {
  ZipFile file = Three();
  file.after = "x";
  ExpectRefused(file, "bytes after its end");
}

// An archive with a comment that is an archive of its first member alone: it has two end records.
TEST_F(Zip, LastEndRecordCounts) {
  const std::string whole = Build(Three());
  const std::size_t directory = whole.find(Le(0x02014B50, 4));
  const auto commented = [&](const std::string& comment) {
    return whole.substr(0, whole.size() - 2) + Le(comment.size(), 2) + comment;
  };
  const auto inner = [&](std::uint64_t comment_bytes) {
    return whole.substr(directory, 46 + 7) + Le(0x06054B50, 4) + Le(0, 4) + Le(1, 2) + Le(1, 2) +
           Le(46 + 7, 4) + Le(whole.size(), 4) + Le(comment_bytes, 2);
  };
  Result<Container> read = ReadBytes(commented("PK"));
  ASSERT_TRUE(read.has_value()) << read.error().message;
  EXPECT_EQ(read->members.size(), 3U);
  read = ReadBytes(commented(inner(0)));
  ASSERT_TRUE(read.has_value()) << read.error().message;
  EXPECT_EQ(read->members.size(), 1U);
  // torch and Python accept it, and do not read its comment.
  for (const std::string& comment : {inner(0) + "x", inner(1), inner(1) + std::string(3000, 'x')}) {
    ExpectFails(ReadBytes(commented(comment)), Errc::kBadInput, "bytes after its end");
  }
}

TEST_F(Zip, NoMembers) { ExpectRefused(ZipFile{}, "without members"); }

TEST_F(Zip, DirectoryElsewhere) {
  for (bool zip64 : {false, true}) {
    for (std::int64_t delta : {-1, 1, 1000, -100}) {
      ZipFile file = Three();
      file.zip64 = zip64;
      file.directory_delta = delta;
      ExpectRefused(file, "does not end at");
      file.directory_delta = 0;
      file.size_delta = delta;
      ExpectRefused(file, "does not end at");
    }
  }
}

TEST_F(Zip, WrongNumberOfEntries) {
  ZipFile file = Three();
  file.entries_delta = -1;
  ExpectRefused(file, "more than its members");
  file.entries_delta = 1;
  ExpectRefused(file, "central directory");
  // The reader rejects more entries than fit the directory before it allocates anything.
  file.entries_delta = 60'000;
  ExpectRefused(file, "cannot hold");
}

TEST_F(Zip, NewerVersions) {
  std::string bytes = Build(Three());
  const std::size_t needed = bytes.rfind(Le(0x02014B50, 4)) + 6;
  bytes[needed] = 63;
  EXPECT_TRUE(ReadBytes(bytes));
  bytes[needed] = 64;
  ExpectFails(ReadBytes(bytes), Errc::kUnsupported, "needs version 6.4 of zip");
}

TEST_F(Zip, TooManyEntries) {
  ZipFile file = Three();
  file.zip64 = true;
  file.entries_delta = std::int64_t{1} << 40;
  file.end_entries_delta = 0xFFFF - 3 - (std::int64_t{1} << 40);
  ExpectFails(Read(file), Errc::kLimit, "members in");
}

TEST_F(Zip, SeveralDisks) {
  for (bool zip64 : {false, true}) {
    ZipFile file = Three();
    file.zip64 = zip64;
    file.disks = 1;
    ExpectRefused(file, "multi-disk");
  }
  ZipFile file = Three();
  file.zip64 = true;
  file.locator_disks = 2;
  ExpectRefused(file, "multi-disk");
  ExpectMemberRefused("multi-disk", [](ZipMember& m) { m.disk = 3; });
}

TEST_F(Zip, BrokenZip64EndRecord) {
  ZipFile file = Three();
  file.zip64 = true;
  file.end64_delta = 1'000'000;
  ExpectRefused(file, "outside the file");
  file.end64_delta = -1;
  ExpectRefused(file, "not found");
  file.end64_delta = 0;
  file.end64_size = 45;
  ExpectRefused(file, "size of the zip64 end record");
  file.end64_size = 44;
  file.end_entries_delta = 1;
  ExpectRefused(file, "disagree");
}

TEST_F(Zip, EncryptedMember) {
  for (unsigned flags : {0x0801U, 0x0840U, 0x2800U}) {
    ExpectMemberRefused("encrypted",
                        [&](ZipMember& m) { m.flags = static_cast<std::uint16_t>(flags); });
  }
}

TEST_F(Zip, CompressedMemberIsKnownButNotRead) {
  ZipFile file = Three();
  file.members[1].method = 8;
  file.members[1].bytes_delta = 1'000'000'000;  // size after decompression
  file.members[1].stored_bytes_delta = static_cast<std::uint32_t>(-1'000'000'000);
  file.members[1].flags = 0x0808;
  const Result<Container> read = Read(file);
  ASSERT_TRUE(read.has_value()) << read.error().message;
  ExpectFails(CheckStored(read->members[1]), Errc::kUnsupported, "compressed (method 8)");
  const Result<os::File> opened = os::File::OpenRead(path());
  ExpectFails(ReadMember(*opened, read->members[1], ~0ULL), Errc::kUnsupported, "compressed");
}

TEST_F(Zip, StoredMemberWithTwoSizes) {
  ExpectMemberRefused("two sizes differ", [](ZipMember& m) { m.stored_bytes_delta = 1; });
}

TEST_F(Zip, OverlappingMembers) {
  ExpectMemberRefused("overlap", [](ZipMember& m) { m.bytes_delta = 1; });
  ExpectMemberRefused("overlap", [](ZipMember& m) { m.bytes_delta = 0x7FFFFFFF; });
  // An extra field that pushes the payload into the next member.
  ZipFile file;
  file.members = {Plain("a/first", "1234"), Plain("a/second", "")};
  std::string bytes = Build(file);
  bytes[28] = 5;
  ExpectFails(ReadBytes(bytes), Errc::kBadInput, "overlap the data at");
  // Many entries for one member: how a small file becomes a large one.
  ExpectMemberRefused("overlaps", [](ZipMember& m) { m.offset_delta = -38; });
}

TEST_F(Zip, MemberInsideTheDirectory) {
  ZipFile file = Three();
  file.members[2].bytes_delta = 10;
  ExpectRefused(file, "overlaps");
  file.members[2].bytes_delta = 0;
  file.members[2].offset_delta = 100;
  ExpectRefused(file, "overlaps");
}

TEST_F(Zip, LocalHeaderDiffers) {
  ExpectMemberRefused("no local header", [](ZipMember& m) { m.local_signature = 0x04034B51; });
  ExpectMemberRefused("overlap", [](ZipMember& m) { m.offset_delta = -1; });
  ExpectMemberRefused("on the name", [](ZipMember& m) { m.local_name = "a/Second"; });
  ExpectMemberRefused("on the name", [](ZipMember& m) { m.local_name = "a/seconds"; });
  ExpectMemberRefused("flags or method", [](ZipMember& m) { m.local_flags = 0; });
  ExpectMemberRefused("size or CRC", [](ZipMember& m) { m.local_bytes_flip = 1; });
  ExpectMemberRefused("size or CRC", [](ZipMember& m) { m.crc_flip = 1; });
}

TEST_F(Zip, NameTwice) {
  ExpectMemberRefused("appears twice", [](ZipMember& m) { m.name = "a/first"; });
  ExpectMemberRefused("appears twice", [](ZipMember& m) { m.name = "A/FIRST"; });
  ExpectMemberRefused("appears twice", [](ZipMember& m) { m.name = "a/First"; });
}

TEST_F(Zip, NamesThatBeginWithOthers) {
  ZipFile file;
  file.members = {Plain("a/", ""), Plain("a/xy", "1"), Plain("a/x", "2"), Plain("a/x/y", "3")};
  const Result<Container> read = Read(file);
  ASSERT_TRUE(read.has_value()) << read.error().message;
  ASSERT_EQ(read->members.size(), 4U);
  for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(read->members[i].name, file.members[i].name);
}

TEST_F(Zip, UnsafeNames) {
  for (const std::string& name :
       {std::string(), std::string("/a"), std::string("a/../b"), std::string(".."),
        std::string("a\\b"), std::string("c:b"), std::string("a/\0b", 4), std::string("a//b"),
        std::string("./a"), std::string("a/\xFF"), std::string("a\nb"), std::string("a/b/.."),
        std::string("a/.")}) {
    ExpectMemberRefused("unsafe name", [&](ZipMember& m) { m.name = name; });
  }
}

TEST_F(Zip, Zip64FieldsOfAnEntry) {
  // Sizes and offset by way of the zip64 field, in their fixed order.
  ZipFile file = Three();
  ZipMember& member = file.members[1];
  member.bytes_delta = 0xFFFFFFFF - 2;
  member.offset_delta = 0xFFFFFFFF - 38;
  member.flags = 0x0808;
  const std::string three = Le(2, 8) + Le(2, 8) + Le(38, 8);
  member.central_extra = Le(0x9999, 2) + Le(1, 2) + "x" + Le(1, 2) + Le(24, 2) + three;
  const Result<Container> read = Read(file);
  ASSERT_TRUE(read.has_value()) << read.error().message;
  EXPECT_EQ(read->members[1].bytes, 2U);
  EXPECT_EQ(read->members[1].header_offset, 38U);
  const auto refuse = [&](std::string extra, std::string_view words) {
    member.central_extra = std::move(extra);
    ExpectRefused(file, words);
  };
  refuse("", "zip64 field missing");
  refuse(Le(1, 2) + Le(16, 2) + three.substr(0, 16), "too short");
  refuse(Le(1, 2) + Le(25, 2) + three, "malformed extra");
  refuse("xyz", "malformed extra");
  refuse(Le(1, 2) + Le(24, 2) + three + Le(1, 2) + Le(0, 2), "two zip64 fields");
  refuse(Le(1, 2) + Le(24, 2) + Le(1ULL << 63, 8) + three.substr(8), "above 2^63");
}

TEST_F(Zip, NameInAnExtraField) {
  ZipFile file = Three();
  const auto field = [](unsigned version, std::uint32_t crc, std::string_view name) {
    return Le(0x9999, 2) + Le(0, 2) + Le(0x7075, 2) + Le(5 + name.size(), 2) + Le(version, 1) +
           Le(crc, 4) + std::string(name);
  };
  const std::uint32_t crc = CrcOf("a/second");
  for (const std::string& extra :
       {field(1, crc, "a/second"), field(1, 0, "a/second"), Le(0x7075, 2) + Le(4, 2) + "abcd"}) {
    file.members[1].central_extra = extra;
    const Result<Container> read = Read(file);
    EXPECT_TRUE(read.has_value()) << read.error().message;
  }
  for (const std::string& extra : {field(1, crc, "a/other"), field(1, crc, ""),
                                   field(1, CrcOf("a/other"), "a/other"), field(2, crc, "../up")}) {
    file.members[1].central_extra = extra;
    ExpectRefused(file, "member a/second: an extra field gives another name");
  }
}

TEST_F(Zip, ChecksumOfAMember) {
  ZipFile file = Three();
  file.members[1].flags = 0x0808;
  file.members[1].crc_flip = 4;
  Result<Container> read = Read(file);
  ASSERT_TRUE(read.has_value());
  Result<os::File> opened = os::File::OpenRead(path());
  ExpectFails(ReadMember(*opened, read->members[1], 10), Errc::kBadInput, "wrong CRC-32");
  ExpectFails(ReadMember(*opened, read->members[1], 1), Errc::kLimit, "2 bytes, at most 1");
  // A stored 0 means that no CRC was computed.
  file.members[1].crc_flip = 0;
  file.members[1].no_crc = true;
  read = Read(file);
  opened = os::File::OpenRead(path());
  EXPECT_EQ(*ReadMember(*opened, read->members[1], 10), "22");
}

}  // namespace
}  // namespace shardwright::zip
