// SPDX-License-Identifier: Apache-2.0
// Folders in which every rank has saved an index of its own (__R.metadata).
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <span>

#include "checkpoints/dcp/dcp.h"
#include "checkpoints/registry.h"
#include "engine/layout/shard_map.h"
#include "files/dcp/index.h"
#include "fixtures.h"
#include "support/base/crc32.h"
#include "unit/support/os/scratch.h"

namespace shardwright::checkpoints::dcp {
namespace {

namespace file_format = shardwright::dcp;

Result<Checkpoint> ReadFolderAt(const fs::path& folder) {
  SW_TRY_ASSIGN(const SourceSet set, ScanSource({folder.string()}));
  return ReadCheckpoint(set, Patterns());
}

class DcpRanks : public os::Scratch {
 protected:
  void SetUp() override {
    os::Scratch::SetUp();
    folder_ = At("ckpt");
    fs::copy(fs::path(SW_SOURCE_DIR) / "tests/data/dcp/ranks_w3/ckpt", folder_);
  }
  std::string Error(Errc code) {
    const Result<Checkpoint> checkpoint = ReadFolderAt(folder_);
    if (checkpoint) return "accepted";
    EXPECT_EQ(checkpoint.error().code, code) << checkpoint.error().message;
    return checkpoint.error().message;
  }
  void ExpectError(Errc code, std::string_view part) {
    const std::string message = Error(code);
    EXPECT_NE(message.find(part), std::string::npos) << message;
  }
  file_format::Index IndexOf(const std::string& name) {
    Result<file_format::Index> index = file_format::ReadIndex(ReadFileText(folder_ / name));
    EXPECT_TRUE(index) << index.error().message;
    return index ? *std::move(index) : file_format::Index();
  }
  void WriteIndex(const std::string& name, const file_format::Index& index) {
    const Result<std::string> bytes = file_format::DumpIndex(index);
    ASSERT_TRUE(bytes) << bytes.error().message;
    std::ofstream(folder_ / name, std::ios::binary) << *bytes;
  }
  /// Rewrites the index of a rank with a change to one entry.
  void Change(const std::string& name, const std::string& entry,
              const std::function<void(file_format::Entry*)>& change) {
    file_format::Index index = IndexOf(name);
    const auto at = std::find_if(index.entries.begin(), index.entries.end(),
                                 [&](const file_format::Entry& one) { return one.name == entry; });
    ASSERT_NE(at, index.entries.end()) << entry;
    change(&*at);
    WriteIndex(name, index);
  }
  /// Flips the bits of the last byte of an item with one payload of 8 bytes, and fixes checksums.
  void TurnOver(const std::string& data, const file_format::Place& at) {
    std::string bytes = ReadFileText(folder_ / data);
    const std::string magic("PK\x07\x08", 4);  // the descriptor after a member, with its CRC-32
    const std::size_t member = bytes.find("/data/0", at.offset);
    const std::size_t descriptor = bytes.find(magic, member);
    const std::size_t end = at.offset + at.bytes;
    ASSERT_LT(descriptor, end);
    const std::string before = bytes.substr(descriptor + 4, 4);
    bytes[descriptor - 1] = static_cast<char>(~bytes[descriptor - 1]);
    const std::uint32_t sum =
        Crc32(std::as_bytes(std::span(std::string_view(bytes).substr(descriptor - 8, 8))));
    std::string after(4, '\0');
    for (unsigned i = 0; i < 4; ++i) after[i] = static_cast<char>(sum >> (8 * i));
    for (std::size_t found = bytes.find(before, at.offset); found < end;
         found = bytes.find(before, found + 4)) {
      bytes.replace(found, 4, after);
    }
    std::ofstream(folder_ / data, std::ios::binary) << bytes;
  }
  fs::path folder_;
};

TEST_F(DcpRanks, AreReadAsOne) {
  const Result<Checkpoint> checkpoint = ReadFolderAt(folder_);
  ASSERT_TRUE(checkpoint) << checkpoint.error().message;
  EXPECT_EQ(checkpoint->groups.size(), 2U);
  EXPECT_EQ(checkpoint->iteration, 2U);
  EXPECT_TRUE(checkpoint->warnings.empty());
  // An item that is whole on every rank is owned by one and repeated by the others.
  const auto buffer = std::find_if(checkpoint->map.tensors.begin(), checkpoint->map.tensors.end(),
                                   [](const auto& tensor) { return tensor.name == "scale"; });
  ASSERT_NE(buffer, checkpoint->map.tensors.end());
  ASSERT_EQ(buffer->fragments.size(), 3U);
  EXPECT_EQ(std::count_if(buffer->fragments.begin(), buffer->fragments.end(),
                          [](const auto& one) { return one.role == layout::Role::kReplica; }),
            2);
  // The note is the same on all ranks, the random draws are not.
  ASSERT_EQ(checkpoint->left_out.size(), 1U);
  EXPECT_NE(checkpoint->left_out[0].find("\"rng\""), std::string::npos) << checkpoint->left_out[0];
  EXPECT_EQ(checkpoint->left_out[0].find("note"), std::string::npos) << checkpoint->left_out[0];
}

TEST_F(DcpRanks, AreTheStateOfACommonIndex) {
  const Result<Checkpoint> ranks = ReadFolderAt(folder_);
  const Result<Checkpoint> common =
      ReadFolderAt(fs::path(SW_SOURCE_DIR) / "tests/data/dcp/nested_w3/ckpt");
  ASSERT_TRUE(ranks && common);
  ASSERT_EQ(ranks->params.size(), common->params.size());
  for (std::size_t i = 0; i < ranks->params.size(); ++i) {
    EXPECT_EQ(ranks->params[i].name, common->params[i].name);
    EXPECT_EQ(ranks->params[i].group, common->params[i].group);
    EXPECT_EQ(ranks->params[i].scalars.size(), common->params[i].scalars.size());
  }
}

TEST_F(DcpRanks, ACommonIndexIsPreferred) {
  fs::copy(fs::path(SW_SOURCE_DIR) / "tests/data/dcp/nested_w3/ckpt", folder_,
           fs::copy_options::overwrite_existing | fs::copy_options::recursive);
  const Result<Checkpoint> checkpoint = ReadFolderAt(folder_);
  ASSERT_TRUE(checkpoint) << checkpoint.error().message;
  EXPECT_TRUE(checkpoint->left_out.empty());
  ASSERT_EQ(checkpoint->warnings.size(), 1U);
  EXPECT_NE(checkpoint->warnings[0].find("using the index of all ranks, .metadata;"),
            std::string::npos)
      << checkpoint->warnings[0];
}

TEST_F(DcpRanks, AMissingIndexIsNamed) {
  fs::remove(folder_ / "__1.metadata");
  ExpectError(Errc::kNotFound, "__1.metadata is missing: each rank has an index of its own");
}

TEST_F(DcpRanks, TheLastIndexIsMissedByItsData) {
  fs::remove(folder_ / "__2.metadata");
  ExpectError(Errc::kNotFound, "__2.metadata is missing");
}

TEST_F(DcpRanks, TheLastRankIsMissedByItsRows) {
  fs::remove(folder_ / "__2.metadata");
  fs::remove(folder_ / "__2_0.distcp");
  const std::string message = Error(Errc::kBadInput);
  EXPECT_NE(message.find("a part of it is missing"), std::string::npos) << message;
  EXPECT_NE(message.find("found the indexes of ranks 0 to 1"), std::string::npos) << message;
}

TEST_F(DcpRanks, AMissingDataFileIsNamed) {
  fs::remove(folder_ / "__1_0.distcp");
  ExpectError(Errc::kNotFound, "__1_0.distcp");
}

TEST_F(DcpRanks, DamagedIndexesAreNamed) {
  std::ofstream(folder_ / "__1.metadata", std::ios::binary) << "x";
  ExpectError(Errc::kBadInput, "__1.metadata");
}

TEST_F(DcpRanks, OtherShapesAreNamed) {
  Change("__1.metadata", "model.scale", [](file_format::Entry* entry) { entry->shape = {3}; });
  ExpectError(Errc::kBadInput, "\"model.scale\" is a tensor float32 [3], in ");
}

TEST_F(DcpRanks, AnObjectInThePlaceOfATensorIsNamed) {
  Change("__1.metadata", "model.scale", [](file_format::Entry* entry) {
    entry->is_tensor = false;
    entry->at = entry->chunks.front().at;
  });
  ExpectError(Errc::kBadInput, "\"model.scale\" is an object, in ");
}

TEST_F(DcpRanks, OverlappingRowsAreRefused) {
  Change("__1.metadata", "model.emb.weight",
         [](file_format::Entry* entry) { entry->chunks.front().offsets[0] = 2; });
  const Result<Checkpoint> checkpoint = ReadFolderAt(folder_);
  ASSERT_TRUE(checkpoint) << checkpoint.error().message;
  const Status proved = layout::Validate(checkpoint->map);
  ASSERT_FALSE(proved);
  EXPECT_NE(proved.error().message.find("\"emb.weight\""), std::string::npos);
  EXPECT_NE(proved.error().message.find("its shards overlap"), std::string::npos);
}

TEST_F(DcpRanks, RowsOfAnotherHeightAtOnePlaceAreNamed) {
  Change("__1.metadata", "model.emb.weight", [](file_format::Entry* entry) {
    entry->chunks.front().offsets[0] = 0;
    entry->chunks.front().sizes[0] = 2;
  });
  ExpectError(Errc::kBadInput,
              "chunk at [0, 0] is [3, 4] in __0_0.distcp and [2, 4] in __1_0.distcp");
}

TEST_F(DcpRanks, AnotherPathIsNamed) {
  Change("__1.metadata", "model.emb.weight",
         [](file_format::Entry* entry) { entry->path.pop_back(); });
  EXPECT_NE(Error(Errc::kBadInput), "accepted");
}

/// Gives an entry of rank 1 the place of another entry of its kind.
void Exchange(file_format::Index* index, const std::string& a, const std::string& b) {
  const auto named = [&](const std::string& name) {
    return std::find_if(index->entries.begin(), index->entries.end(),
                        [&](const file_format::Entry& one) { return one.name == name; });
  };
  ASSERT_NE(named(a), index->entries.end());
  ASSERT_NE(named(b), index->entries.end());
  std::swap(named(a)->at, named(b)->at);
}

TEST_F(DcpRanks, OptionsThatDifferAreNamed) {
  file_format::Index index = IndexOf("__1.metadata");
  Exchange(&index, "optim.param_groups.0.weight_decay", "optim.param_groups.1.weight_decay");
  WriteIndex("__1.metadata", index);
  ExpectError(Errc::kBadInput, "__0_0.distcp and __1_0.distcp have different values");
}

TEST_F(DcpRanks, ReplicasThatDifferAreNamed) {
  file_format::Index index = IndexOf("__2.metadata");
  const auto at =
      std::find_if(index.entries.begin(), index.entries.end(),
                   [](const file_format::Entry& one) { return one.name == "model.scale"; });
  ASSERT_NE(at, index.entries.end());
  TurnOver("__2_0.distcp", at->chunks.front().at);
  ExpectError(Errc::kBadInput,
              "\"model.scale\": __0_0.distcp and __2_0.distcp have different values");
}

TEST_F(DcpRanks, ACatalogueOfThemIsRead) {
  const Result<SourceSet> set = ScanSource({folder_.string()});
  ASSERT_TRUE(set) << set.error().message;
  EXPECT_EQ(set->files.size(), 6U);
  SourceSet torn = *set;
  torn.files.erase(
      std::remove_if(torn.files.begin(), torn.files.end(),
                     [](const SourceFile& file) { return file.name == "__1.metadata"; }),
      torn.files.end());
  const Result<Checkpoint> checkpoint = ReadCheckpoint(torn, Patterns());
  const Status proved = checkpoint ? layout::Validate(checkpoint->map)
                                   : tl::unexpected<shardwright::Error>(checkpoint.error());
  ASSERT_FALSE(proved);
  EXPECT_EQ(proved.error().code, Errc::kBadInput) << proved.error().message;
}

TEST(DcpRankNames, OfIndexes) {
  EXPECT_EQ(file_format::RankOfIndex("__0.metadata"), 0U);
  EXPECT_EQ(file_format::RankOfIndex("__127.metadata"), 127U);
  for (const char* other : {".metadata", "__.metadata", "__01.metadata", "__1_0.distcp",
                            "__-1.metadata", "__1.metadata.tmp", "1.metadata"}) {
    EXPECT_FALSE(file_format::RankOfIndex(other)) << other;
  }
}

}  // namespace
}  // namespace shardwright::checkpoints::dcp
