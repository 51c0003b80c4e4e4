// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "files/torch_pt/reader.h"
#include "legacy_parts.h"
#include "support/os/fault.h"

namespace shardwright::torch_pt {
namespace {

using pickle::Glob;
using pickle::Pickle;
using pickle::Str;

class LegacyStream : public FileTest, public LegacyParts {
 public:
  Result<Document> Read() {
    Write(Bytes());
    SW_TRY_ASSIGN(const os::File file, os::File::OpenRead(path()));
    SW_TRY_ASSIGN(metadata, ReadMetadata(file));
    return Parse(metadata);
  }
  ContainerMetadata metadata;
};

TEST_F(LegacyStream, LocatesStorages) {
  const Result<Document> document = Read();
  ASSERT_TRUE(document.has_value()) << document.error().message;
  const std::uint64_t first = metadata.last - data.size();
  ASSERT_EQ(document->storages.size(), 2U);
  EXPECT_EQ(document->storages[0].dtype, DType::kF32);
  EXPECT_EQ(document->storages[0].offset, first + 8 + 16 + 8);
  EXPECT_EQ(document->storages[0].bytes, 12U);
  EXPECT_EQ(document->storages[1].offset, first + 8);
  EXPECT_EQ(document->storages[1].bytes, 16U);
  EXPECT_EQ(document->storages[1].crc32, std::nullopt);
}

TEST_F(LegacyStream, LargePickle) {
  object = Pickle("](" + LegacyTensor("77", "FloatStorage", 3) +
                  LegacyTensor("5", "LongStorage", 2) + Str(std::string(300'000, 's')) + "e");
  const Result<Document> document = Read();
  ASSERT_TRUE(document.has_value()) << document.error().message;
  EXPECT_EQ(document->root->items[2]->text.size(), 300'000U);
}

TEST_F(LegacyStream, Refuses) {
  const auto refuse = [&](std::string LegacyStream::*part, std::string value, Errc code,
                          std::string_view words) {
    std::string old = std::exchange(this->*part, std::move(value));
    ExpectFails(Read(), code, words);
    this->*part = std::move(old);
  };
  using L = LegacyStream;
  refuse(&L::version, Pickle("K\1"), Errc::kUnsupported, "version 1");
  refuse(&L::machine, Pickle("N"), Errc::kBadInput, "byte order");
  refuse(&L::machine, Pickle("}" + Str("little_endian") + "\x89s"), Errc::kUnsupported,
         "big-endian");
  refuse(&L::keys, Pickle("N"), Errc::kBadInput, "list of storage keys");
  refuse(&L::keys, Pickle("](" + Str("5") + Str("5") + "e"), Errc::kBadInput, "5 appears twice");
  refuse(&L::keys, Pickle("](" + Str("5") + Str("6") + "e"), Errc::kBadInput,
         "6 appears twice or in no tensor");
  refuse(&L::keys, Pickle("]" + Str("5") + "a"), Errc::kBadInput, "77 is missing");
  refuse(&L::data, data + "x", Errc::kBadInput, "1 bytes after the last storage");
  refuse(&L::data, Le(3, 8) + data.substr(8), Errc::kBadInput,
         "2 elements expected from the pickle, found 3");
  refuse(&L::object, Pickle(LegacyTensor("5", "LongStorage", 2, ")")), Errc::kUnsupported,
         "view of another");
  refuse(&L::object, Pickle(Glob("os", "system") + "K\1\x85R"), Errc::kBadInput, "refused");
}

TEST_F(LegacyStream, Truncated) {
  const std::string whole = Bytes();
  for (std::size_t bytes = 15; bytes < whole.size(); bytes += 5) {
    Write(whole.substr(0, bytes));
    const Result<os::File> file = os::File::OpenRead(path());
    const Result<ContainerMetadata> read = ReadMetadata(*file);
    ASSERT_FALSE(read.has_value()) << bytes;
    EXPECT_EQ(read.error().code, Errc::kBadInput) << read.error().message;
    EXPECT_TRUE(read.error().message.starts_with(path()));
  }
}

// From a stream that is damaged anywhere, the reader accepts only valid values, and errors name the
// file.
TEST_F(LegacyStream, EveryChangedByteIsRefusedOrHarmless) {
  const std::string whole = Bytes();
  int refused = 0;
  for (std::size_t at = 0; at < whole.size(); ++at) {
    std::string changed = whole;
    changed[at] = static_cast<char>(changed[at] ^ (at % 2 == 0 ? 1 : 0x80));
    Write(changed);
    const auto file = os::File::OpenRead(path());
    ASSERT_TRUE(file);
    auto read = ReadMetadata(*file);
    if (!read) {
      ++refused;
      EXPECT_EQ(read.error().message.rfind(path(), 0), 0U) << at << read.error().message;
      EXPECT_NE(read.error().code, Errc::kInternal) << at;
      continue;
    }
    const auto document = Parse(*read);
    if (!document) continue;
    for (const auto& storage : document->storages) {
      EXPECT_LE(storage.offset + storage.bytes, changed.size()) << at;
    }
  }
  EXPECT_GT(refused, 100);
}

TEST_F(LegacyStream, EveryReadThatFailsIsTold) {
  ASSERT_TRUE(Read());
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
