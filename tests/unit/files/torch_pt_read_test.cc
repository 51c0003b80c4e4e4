// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "files/torch_pt/reader.h"
#include "pickles.h"
#include "support/os/fault.h"

namespace shardwright::torch_pt {
namespace {

using pickle::Glob;
using pickle::Pickle;
using pickle::StorageOf;
using pickle::Str;
using pickle::TensorOf;

class TorchPt : public FileTest {
 protected:
  Result<ContainerMetadata> Read(std::string_view bytes) {
    Write(bytes);
    SW_TRY_ASSIGN(const os::File file, os::File::OpenRead(path()));
    return ReadMetadata(file);
  }
  void ExpectRefused(const ZipFile& file, Errc code, std::string_view words) {
    const Result<ContainerMetadata> read = Read(Build(file));
    ExpectFails(read, code, words);
    if (!read) {
      EXPECT_TRUE(read.error().message.starts_with(path())) << read.error().message;
    }
  }
  // One tensor of three floats.
  static ZipFile One() {
    ZipFile file;
    file.members = {Plain("r/data.pkl", Pickle(TensorOf(3, 0, {3}, {1}))),
                    Plain("r/byteorder", "little"), Plain("r/data/0", std::string(12, 'x')),
                    Plain("r/version", "3\n")};
    return file;
  }
};

TEST_F(TorchPt, ReadsAContainer) {
  const std::string bytes = Build(One());
  const Result<ContainerMetadata> metadata = Read(bytes);
  ASSERT_TRUE(metadata.has_value()) << metadata.error().message;
  EXPECT_EQ(metadata->last, bytes.size());
  ASSERT_EQ(metadata->storages.size(), 1U);
  EXPECT_EQ(metadata->storages[0].offset, bytes.find("xxxx"));
  const Result<Document> document = Parse(*metadata);
  ASSERT_TRUE(document.has_value()) << document.error().message;
  ASSERT_EQ(document->storages.size(), 1U);
  const Document::StorageRef& storage = document->storages[0];
  EXPECT_EQ(storage.dtype, DType::kF32);
  EXPECT_EQ(storage.bytes, 12U);
  EXPECT_EQ(storage.offset, metadata->storages[0].offset);
  EXPECT_EQ(storage.crc32, CrcOf(std::string(12, 'x')));
  EXPECT_EQ(storage.member, "data/0");
  EXPECT_EQ(document->root->tensor->shape, (Shape{3}));
}

// One of several streams in a file: its places are those in the file.
TEST_F(TorchPt, ReadsAContainerInsideAFile) {
  const std::string bytes = Build(One());
  const std::string before(100, 'b');
  Write(before + bytes + bytes);
  const auto file = os::File::OpenRead(path());
  ASSERT_TRUE(file.has_value());
  for (const std::uint64_t first : {before.size(), before.size() + bytes.size()}) {
    const auto metadata = ReadMetadata(files::Part(*file, first, bytes.size()));
    ASSERT_TRUE(metadata.has_value()) << metadata.error().message;
    EXPECT_EQ(metadata->first, first);
    EXPECT_EQ(metadata->last, first + bytes.size());
    EXPECT_EQ(metadata->storages.at(0).offset, first + bytes.find("xxxx"));
    EXPECT_TRUE(Parse(*metadata).has_value());
  }
  ExpectFails(ReadMetadata(files::Part(*file, 0, bytes.size())), Errc::kBadInput,
              "not a torch.save file");
  ExpectFails(ReadMetadata(files::Part(*file, before.size() + 1, 2 * bytes.size())),
              Errc::kBadInput, "the file ends at");
}

TEST_F(TorchPt, ChecksumThatWasNotComputed) {
  ZipFile file = One();
  file.members[2].no_crc = true;
  EXPECT_EQ(Read(Build(file))->storages[0].crc32, std::nullopt);
  file.members[2].content.clear();
  EXPECT_EQ(Read(Build(file))->storages[0].crc32, 0U);
}

TEST_F(TorchPt, OtherKindsOfFiles) {
  ExpectFails(Read(""), Errc::kBadInput, "not a torch.save file");
  ExpectFails(Read("hello, world"), Errc::kBadInput, "not a torch.save file");
  ExpectFails(Read(Pickle("N")), Errc::kBadInput, "not a torch.save file");
  ExpectFails(Read("PYTORCH1xxxx"), Errc::kUnsupported, "preview");
  ExpectFails(Read(Le(2, 8) + "{}"), Errc::kUnsupported, "safetensors");
  ExpectFails(Read(std::string(257, '\0') + "ustar" + std::string(250, '\0')), Errc::kUnsupported,
              "tar");
  ExpectFails(Read("x" + Build(One())), Errc::kBadInput, "not a torch.save file");
}

TEST_F(TorchPt, MissingMembers) {
  ZipFile file = One();
  file.members.erase(file.members.begin());
  ExpectRefused(file, Errc::kBadInput, "no member data.pkl");
  file = One();
  file.members.pop_back();
  ExpectRefused(file, Errc::kBadInput, "no member version");
  file.members.push_back(Plain("r/.data/version", "3\n"));
  EXPECT_TRUE(Read(Build(file)).has_value());
}

TEST_F(TorchPt, Version) {
  for (const std::string text : {"1", "3\n", "10\n"}) {
    ZipFile file = One();
    file.members[3].content = text;
    EXPECT_TRUE(Read(Build(file)).has_value()) << text;
  }
  for (const std::string text : {"", "0", "11", "-1", "x", "3 ", "3\n\n", "99999999999"}) {
    ZipFile file = One();
    file.members[3].content = text;
    ExpectRefused(file, Errc::kBadInput, "not a number from 1 to 10");
  }
}

TEST_F(TorchPt, ByteOrder) {
  ZipFile file = One();
  file.members[1].content = "big";
  ExpectRefused(file, Errc::kUnsupported, "big-endian");
  file.members[1].content = "little\n";
  ExpectRefused(file, Errc::kBadInput, "neither little nor big");
  file.members.erase(file.members.begin() + 1);
  EXPECT_TRUE(Read(Build(file)).has_value());
}

TEST_F(TorchPt, TorchScript) {
  ZipFile file = One();
  file.members.push_back(Plain("r/constants.pkl", "x"));
  ExpectRefused(file, Errc::kUnsupported, "TorchScript");
}

TEST_F(TorchPt, FoldersAndRoots) {
  ZipFile file = One();
  file.members.push_back(Plain("other/x", ""));
  ExpectRefused(file, Errc::kBadInput, "not in folder r/");
  file = One();
  file.members[0].name = "data.pkl";
  ExpectRefused(file, Errc::kBadInput, "in no folder");
  file = One();
  file.members.push_back(Plain("r/data/", ""));
  EXPECT_TRUE(Read(Build(file)).has_value());
  file.members.back().content = "x";
  ExpectRefused(file, Errc::kBadInput, "has content");
}

TEST_F(TorchPt, KeysOfStorages) {
  for (const std::string key : {"0/1", "a b", "\xC3\xBC"}) {
    ZipFile file = One();
    file.members[2].name = "r/data/" + key;
    ExpectRefused(file, Errc::kBadInput, "unsafe name");
  }
  ZipFile file = One();
  file.members[2].name = "r/data/" + std::string(129, 'k');
  ExpectRefused(file, Errc::kBadInput, "unsafe name");
}

TEST_F(TorchPt, CompressedMembers) {
  for (std::size_t i : {0U, 1U, 2U, 3U}) {
    ZipFile file = One();
    file.members[i].method = 8;
    ExpectRefused(file, Errc::kUnsupported, "compressed (method 8)");
  }
}

TEST_F(TorchPt, DamagedSmallMembers) {
  for (std::size_t i : {0U, 1U, 3U}) {
    ZipFile file = One();
    file.members[i].flags = 0x0808;
    file.members[i].crc_flip = 1;
    ExpectRefused(file, Errc::kBadInput, "wrong CRC-32");
  }
}

TEST_F(TorchPt, StorageThatDoesNotFitItsMember) {
  const auto parse = [&](const ZipFile& file) -> Result<Document> {
    SW_TRY_ASSIGN(const ContainerMetadata metadata, Read(Build(file)));
    return Parse(metadata);
  };
  ZipFile file = One();
  file.members[2].content += "y";
  ExpectFails(parse(file), Errc::kBadInput,
              "data/0: 12 bytes expected for 3 elements of float32, found 13");
  file.members[2].content.resize(11);
  ExpectFails(parse(file), Errc::kBadInput, "found 11");
  file.members.erase(file.members.begin() + 2);
  ExpectFails(parse(file), Errc::kBadInput, "storage data/0 is missing");
  file = One();
  file.members[0].content = Pickle("i");
  ExpectFails(parse(file), Errc::kBadInput, "data.pkl: byte 2: unsupported opcode 0x69");
}

TEST_F(TorchPt, EveryChangedByteIsRefusedOrHarmless) {
  for (const bool zip64 : {false, true}) {
    ZipFile made = One();
    made.zip64 = zip64;
    const std::string whole = Build(made);
    int refused = 0;
    for (std::size_t at = 0; at < whole.size(); ++at) {
      for (const char change : {'\x01', '\x80'}) {
        std::string changed = whole;
        changed[at] = static_cast<char>(changed[at] ^ change);
        const Result<ContainerMetadata> read = Read(changed);
        if (!read) {
          ++refused;
          EXPECT_EQ(read.error().message.rfind(path(), 0), 0U) << at << read.error().message;
          EXPECT_NE(read.error().code, Errc::kInternal) << at;
          continue;
        }
        for (const auto& storage : read->storages) {
          EXPECT_LE(storage.offset + storage.bytes, changed.size()) << at;
        }
      }
    }
    EXPECT_GT(refused, 300);
  }
}

TEST_F(TorchPt, EveryReadThatFailsIsTold) {
  Write(Build(One()));
  const auto file = os::File::OpenRead(path());
  ASSERT_TRUE(file);
  for (const std::string what : {"read", "stat"}) {
    bool fired = true;
    for (int call = 1; fired; ++call) {
      const os::ScopedFault fault(*os::ParseFault(what + ":" + std::to_string(call) + ":eio"));
      const auto read = ReadMetadata(*file);
      fired = fault.fired();
      EXPECT_EQ(static_cast<bool>(read), !fired) << what << call;
      if (!read) {
        EXPECT_EQ(read.error().sys, EIO) << read.error().message;
      }
      ASSERT_LT(call, 100);
    }
  }
}

}  // namespace
}  // namespace shardwright::torch_pt
