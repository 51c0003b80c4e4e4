// SPDX-License-Identifier: Apache-2.0
#include "partial/store/write_blobs.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>

#include "engine/plan/plan.h"
#include "partial/store/read_blobs.h"
#include "support/base/crc32.h"
#include "support/base/sink.h"
#include "support/os/fault.h"
#include "unit/partial/store_fixture.h"

namespace shardwright::partial {
namespace {

/// Members of a source in memory.
class Memory final : public exec::ByteSource {
 public:
  explicit Memory(std::vector<std::string> texts) : members(std::move(texts)) {}
  Status Read(std::uint32_t member, std::uint64_t offset, std::span<std::byte> out) override {
    std::memcpy(out.data(), members[member].data() + offset, out.size());
    reads += out.size();
    return {};
  }
  std::uint64_t bytes_read() const override { return reads; }
  std::uint64_t files_read() const override { return 1; }
  std::atomic<std::uint64_t> reads = 0;
  std::vector<std::string> members;
};

/// Two blobs: one of three units, one small, each a copy of a member.
class WriteBlobsTest : public StoreTest {
 protected:
  WriteBlobsTest() {
    std::string large(2 * plan::kUnitBytes + 100, '\0');
    for (std::size_t i = 0; i < large.size(); ++i) large[i] = static_cast<char>(i * 7 + i / 999);
    bytes_ = std::make_unique<Memory>(std::vector<std::string>{large, "small"});
    map_.files = {"source"};
    for (const std::string& member : bytes_->members) {
      map_.members.push_back({.file = 0,
                              .offset = 0,
                              .bytes = member.size(),
                              .crc32 = Crc32(os::AsBytes(member)),
                              .name = "m"});
      plan::OutputFile file;
      file.path = "blob";
      file.bytes = member.size();
      plan::Payload payload;
      payload.kind = plan::Payload::Kind::kMember;
      payload.bytes = member.size();
      payload.member = static_cast<std::uint32_t>(target_.files.size());
      file.payloads.push_back(payload);
      target_.files.push_back(std::move(file));
    }
  }

  Result<std::vector<BlobResult>> Write(const Store& store, std::vector<BlobJob> jobs,
                                        bool zstd = false) {
    const auto plan = plan::Plan::Make(map_, target_);
    EXPECT_TRUE(plan);
    std::filesystem::create_directories(At("store/incoming-x"));
    exec::SourceSums sums(map_.members.size());
    NullSink sink;
    bytes_->reads = 0;
    BlobOptions options;
    options.incoming = At("store/incoming-x");
    options.zstd = zstd;
    options.threads = 2;
    auto done = WriteBlobs(store, *plan, *bytes_, jobs, options, &sums, sink);
    left_ = Contents("store/incoming-x").size();
    std::filesystem::remove_all(At("store/incoming-x"));
    return done;
  }

  std::size_t left_ = 0;  // files of the last Write that have no name in the store
  std::unique_ptr<Memory> bytes_;
  layout::ShardMap map_;
  plan::Target target_;
};

TEST_F(WriteBlobsTest, NamesContentByItsTreeDigest) {
  const Store store = Make();
  for (const bool zstd : {false, true}) {
    std::filesystem::remove_all(At("store/blobs"));
    std::filesystem::create_directories(At("store/blobs"));
    const auto done = Write(store, {{0, {}}, {1, {}}}, zstd);
    ASSERT_TRUE(done) << done.error().message;
    const std::string& large = bytes_->members[0];
    std::vector<exec::Digest> units;
    for (std::size_t at = 0; at < large.size(); at += plan::kUnitBytes) {
      units.push_back(exec::DigestOf(os::AsBytes(large.substr(at, plan::kUnitBytes))));
    }
    const BlobRef& ref = (*done)[0].ref;
    EXPECT_EQ(ref.digest, exec::FileDigest(units, exec::DigestOf({})));
    EXPECT_EQ(ref.crc32, Crc32(os::AsBytes(large)));
    EXPECT_EQ(ref.head, units[0]);
    EXPECT_EQ(ref.bytes, large.size());
    EXPECT_EQ(ref.zstd, zstd);
    const std::vector<std::uint64_t> payloads{large.size()};
    EXPECT_TRUE(VerifyBlob(store.BlobPath(ref), ref, payloads));
    EXPECT_EQ(std::filesystem::file_size(store.BlobPath(ref)) == large.size(), !zstd);
    EXPECT_EQ(store.ListBlobs()->size(), 2U);
    EXPECT_EQ(left_, 0U);
  }
}

// After a power failure a blob that a manifest names is there, whole.
TEST_F(WriteBlobsTest, BlobsAreDurableBeforeTheirNamesAndTheseAtTheEnd) {
  const Store store = Make();
  {
    const os::ScopedFault fault({.target = "rename", .first = 1, .error = EIO});
    EXPECT_FALSE(Write(store, {{0, {}}, {1, {}}}));
    EXPECT_EQ(fault.Count(os::Op::kSync), 2U);  // each blob
  }
  EXPECT_TRUE(store.ListBlobs()->empty());
  const os::ScopedFault count;
  const auto done = Write(store, {{0, {}}, {1, {}}});
  ASSERT_TRUE(done);
  EXPECT_NE((*done)[0].ref.digest[0], (*done)[1].ref.digest[0]);  // so each in its folder
  EXPECT_EQ(count.Count(os::Op::kSync), 2U + 2 + 1);  // their folders, and the folder of these
}

TEST_F(WriteBlobsTest, WhatTheStoreHasIsNotWrittenAgain) {
  const Store store = Make();
  const auto first = Write(store, {{0, {}}, {1, {}}});
  ASSERT_TRUE(first);
  EXPECT_EQ((*first)[0].written_bytes, bytes_->members[0].size());
  const auto again = Write(store, {{0, {}}, {1, {}}}, true);
  ASSERT_TRUE(again);
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_EQ((*again)[i].written_bytes, 0U);
    EXPECT_EQ((*again)[i].ref, (*first)[i].ref) << "plain as it is there";
  }
  EXPECT_EQ(left_, 0U);
}

TEST_F(WriteBlobsTest, UnchangedContentIsHashedOnce) {
  const Store store = Make();
  const auto first = Write(store, {{0, {}}, {1, {}}});
  ASSERT_TRUE(first);
  const auto before = Contents("store/blobs");
  const auto again = Write(store, {{0, (*first)[0].ref}, {1, (*first)[1].ref}});
  ASSERT_TRUE(again);
  EXPECT_TRUE((*again)[0].unchanged);
  EXPECT_EQ((*again)[0].written_bytes, 0U);
  EXPECT_EQ(bytes_->reads, bytes_->members[0].size() + bytes_->members[1].size());
  EXPECT_EQ(Contents("store/blobs"), before);
}

TEST_F(WriteBlobsTest, AChangeBehindTheFirstUnitIsSeen) {
  const Store store = Make();
  const auto first = Write(store, {{0, {}}});
  ASSERT_TRUE(first);
  bytes_->members[0].back() = static_cast<char>(bytes_->members[0].back() ^ 1);
  map_.members[0].crc32 = Crc32(os::AsBytes(bytes_->members[0]));
  const auto again = Write(store, {{0, (*first)[0].ref}});
  ASSERT_TRUE(again);
  EXPECT_FALSE((*again)[0].unchanged);
  EXPECT_NE((*again)[0].ref.digest, (*first)[0].ref.digest);
  EXPECT_EQ(Get("store" + store.BlobPath((*again)[0].ref).substr(At("store").size())),
            bytes_->members[0]);
}

TEST_F(WriteBlobsTest, UnchangedContentThatTheStoreHasLostIsWrittenAgain) {
  const Store store = Make();
  const auto first = Write(store, {{0, {}}});
  ASSERT_TRUE(first);
  const std::string blob = store.BlobPath((*first)[0].ref);
  for (const bool gone : {true, false}) {
    if (gone) {
      std::filesystem::remove(blob);
    } else {
      std::filesystem::resize_file(blob, 5);
    }
    const auto again = Write(store, {{0, (*first)[0].ref}});
    ASSERT_TRUE(again);
    EXPECT_FALSE((*again)[0].unchanged);
    EXPECT_TRUE((*again)[0].restored);
    EXPECT_EQ((*again)[0].ref.digest, (*first)[0].ref.digest);
    EXPECT_EQ(std::filesystem::file_size(blob), bytes_->members[0].size());
  }
}

TEST_F(WriteBlobsTest, RepairsReplaceWhateverHasTheName) {
  const Store store = Make();
  for (const bool zstd : {false, true}) {
    const auto first = Write(store, {{0, {}}, {1, {}}}, zstd);
    ASSERT_TRUE(first);
    const auto before = Contents("store/blobs");
    for (const BlobResult& blob : *first) {
      std::ofstream(store.BlobPath(blob.ref)) << std::string(blob.ref.bytes, 'x');
    }
    // The form is the blob's, not the options'.
    const auto again =
        Write(store, {{0, {}, {(*first)[0].ref}}, {1, {}, {(*first)[1].ref}}}, !zstd);
    ASSERT_TRUE(again) << again.error().message;
    for (std::size_t i = 0; i < 2; ++i) {
      EXPECT_TRUE((*again)[i].restored);
      EXPECT_EQ((*again)[i].ref, (*first)[i].ref);
    }
    EXPECT_EQ(Contents("store/blobs"), before);
    EXPECT_EQ(left_, 0U);
    std::filesystem::remove_all(At("store/blobs"));
    std::filesystem::create_directories(At("store/blobs"));
  }
}

TEST_F(WriteBlobsTest, RepairsWriteNothingElse) {
  const Store store = Make();
  const auto first = Write(store, {{0, {}}});
  ASSERT_TRUE(first);
  std::filesystem::remove(store.BlobPath((*first)[0].ref));
  const BlobRef lost = (*first)[0].ref;
  // A change behind the first unit: the copy reads all and writes nothing.
  bytes_->members[0].back() = static_cast<char>(bytes_->members[0].back() ^ 1);
  map_.members[0].crc32 = Crc32(os::AsBytes(bytes_->members[0]));
  auto again = Write(store, {{0, {}, {lost}}});
  ASSERT_TRUE(again);
  EXPECT_FALSE((*again)[0].restored);
  EXPECT_EQ((*again)[0].written_bytes, 0U);
  EXPECT_EQ(bytes_->reads, bytes_->members[0].size());
  // A change of the first unit: the copy does not read the rest.
  bytes_->members[0].front() = static_cast<char>(bytes_->members[0].front() ^ 1);
  again = Write(store, {{0, {}, {lost}}});
  ASSERT_TRUE(again);
  EXPECT_FALSE((*again)[0].restored);
  EXPECT_EQ(bytes_->reads, plan::kUnitBytes);
  EXPECT_TRUE(store.ListBlobs()->empty());
  EXPECT_EQ(left_, 0U);
}

TEST_F(WriteBlobsTest, RepairsFindTheirBlobAmongSeveralVersions) {
  const Store store = Make();
  const auto first = Write(store, {{0, {}}, {1, {}}});
  ASSERT_TRUE(first);
  const BlobRef lost = (*first)[1].ref;
  std::filesystem::remove(store.BlobPath(lost));
  BlobRef other = lost;
  other.digest[0] ^= 1;
  const auto again = Write(store, {{1, {}, {other, lost}}});
  ASSERT_TRUE(again);
  EXPECT_TRUE((*again)[0].restored);
  EXPECT_EQ((*again)[0].ref, lost);
  EXPECT_EQ(store.ListBlobs()->size(), 2U);
}

TEST_F(WriteBlobsTest, RepairsOfTheSameContentAreWrittenOnce) {
  const Store store = Make();
  const auto first = Write(store, {{1, {}}});
  ASSERT_TRUE(first);
  const BlobRef lost = (*first)[0].ref;
  std::filesystem::remove(store.BlobPath(lost));
  target_.files.push_back(target_.files[1]);
  const auto again = Write(store, {{1, {}, {lost}}, {2, {}, {lost}}});
  ASSERT_TRUE(again);
  EXPECT_TRUE((*again)[0].restored);
  EXPECT_FALSE((*again)[1].restored);
  EXPECT_EQ(left_, 0U);
  EXPECT_EQ(store.ListBlobs()->size(), 1U);
}

TEST_F(WriteBlobsTest, PassedMembersAreComparedWithTheirChecksum) {
  const Store store = Make();
  map_.members[1].crc32 = 1;
  const auto done = Write(store, {{1, {}}});
  ASSERT_FALSE(done);
  EXPECT_EQ(done.error().code, Errc::kBadInput);
  EXPECT_TRUE(store.ListBlobs()->empty());
}

TEST_F(WriteBlobsTest, FindBlobTellsSizes) {
  const Store store = Make();
  const auto done = Write(store, {{1, {}}});
  ASSERT_TRUE(done);
  const BlobRef& ref = (*done)[0].ref;
  std::ofstream(store.BlobPath(ref), std::ios::app) << "x";
  const auto found = FindBlob(store.BlobPath(ref), ref);
  ASSERT_FALSE(found);
  EXPECT_NE(found.error().message.find("5 bytes expected, found 6"), std::string::npos);
  EXPECT_FALSE(store.Find(ref.digest, 5));
}

}  // namespace
}  // namespace shardwright::partial
