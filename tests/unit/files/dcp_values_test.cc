// SPDX-License-Identifier: Apache-2.0
// Values of an index that are missing or of a wrong type, and indexes of several ranks.

#include <gtest/gtest.h>

#include <functional>

#include "dcp_pickles.h"
#include "files/dcp/index.h"

namespace shardwright::dcp {
namespace {

using pickle::Emitter;

/// An index of one object, of which each test makes the key and the place.
std::string OneObject(const std::function<void(Emitter&)>& key,
                      const std::function<void(Emitter&)>& place) {
  Emitter out;
  New(out, "Metadata");
  out.EmptyDict();
  out.Mark();
  out.Word("state_dict_metadata");
  out.EmptyDict();
  out.Mark();
  out.Word("n");
  New(out, "BytesStorageMetadata");
  out.SetItems(2);
  out.Word("storage_data");
  out.EmptyDict();
  out.Mark();
  New(out, "MetadataIndex");
  out.EmptyDict();
  out.Mark();
  key(out);
  out.SetItems(2);
  out.Build();
  New(out, std::string_view("torch.distributed.checkpoint.filesystem._StorageInfo"));
  out.EmptyDict();
  out.Mark();
  place(out);
  out.SetItems(2);
  out.Build();
  out.SetItems(2);
  out.SetItems(2);
  out.Build();
  return std::move(out).Finish();
}

void NameOf(Emitter& out) {
  out.Word("fqn");
  out.Word("n");
}

void PlaceOf(Emitter& out) {
  out.Word("relative_path");
  out.Word("__0_0.distcp");
  out.Word("offset");
  out.Int(7);
  out.Word("length");
  out.Int(9);
}

TEST(DcpIndex, ReadsTransformsOnceEach) {
  const auto with = [](const std::function<void(Emitter&)>& list) {
    return ReadIndex(OneObject(NameOf, [&](Emitter& out) {
      PlaceOf(out);
      out.Word("transform_descriptors");
      list(out);
    }));
  };
  const auto index = with([](Emitter& out) {
    out.EmptyList();
    out.Mark();
    out.Word("stream.zstd/1");
    out.Word("another");
    out.Append(2);
  });
  ASSERT_TRUE(index) << index.error().message;
  ASSERT_EQ(index->transforms.size(), 2U);
  EXPECT_EQ(index->transforms[index->entries[0].at.transforms],
            (std::vector<std::string>{"stream.zstd/1", "another"}));
  EXPECT_EQ(index->entries[0].at.offset, 7U);
  EXPECT_EQ(index->entries[0].at.bytes, 9U);
  const auto none = with([](Emitter& out) { out.None(); });
  ASSERT_TRUE(none);
  EXPECT_EQ(none->entries[0].at.transforms, 0U);
  const auto empty = with([](Emitter& out) { out.EmptyList(); });
  ASSERT_TRUE(empty);
  EXPECT_EQ(empty->entries[0].at.transforms, 0U);
  const auto text = with([](Emitter& out) { out.Word("stream.zstd/1"); });
  ASSERT_FALSE(text);
  EXPECT_EQ(text.error().message, "item \"n\": transform_descriptors: list expected, found string");
  const auto number = with([](Emitter& out) {
    out.EmptyList();
    out.Int(1);
    out.Append(1);
  });
  ASSERT_FALSE(number);
  EXPECT_EQ(number.error().message,
            "item \"n\": transform_descriptors: string expected, found integer");
}

TEST(DcpIndex, RefusesPlacesThatLackAValue) {
  const auto error = [](const std::function<void(Emitter&)>& key,
                        const std::function<void(Emitter&)>& place) {
    const auto index = ReadIndex(OneObject(key, place));
    return index ? std::string("accepted") : index.error().message;
  };
  EXPECT_EQ(error(NameOf, PlaceOf), "accepted");
  EXPECT_EQ(error([](Emitter& out) { out.Word("x"), out.None(); }, PlaceOf),
            "MetadataIndex: fqn expected, found nothing");
  EXPECT_EQ(error([](Emitter& out) { out.Word("fqn"), out.Int(1); }, PlaceOf),
            "MetadataIndex: fqn expected, found integer");
  EXPECT_EQ(error([](Emitter& out) { NameOf(out), out.Word("offset"), out.Int(1); }, PlaceOf),
            "MetadataIndex \"n\": torch.Size expected, found integer");
  EXPECT_EQ(error([](Emitter& out) { NameOf(out), out.Word("offset"), out.None(); }, PlaceOf),
            "accepted");
  EXPECT_EQ(error(NameOf, [](Emitter& out) { out.Word("offset"), out.Int(0); }),
            "item \"n\": relative_path: string expected, found nothing");
  const auto file = [](Emitter& out) { out.Word("relative_path"), out.Word("f"); };
  EXPECT_EQ(error(NameOf, [&](Emitter& out) { file(out), out.Word("length"), out.Int(0); }),
            "item \"n\": offset: count expected, found nothing");
  EXPECT_EQ(error(NameOf, [&](Emitter& out) { file(out), out.Word("offset"), out.Word("0"); }),
            "item \"n\": offset: count expected, found string");
  EXPECT_EQ(error(NameOf, [&](Emitter& out) { file(out), out.Word("offset"), out.Int(0); }),
            "item \"n\": length: count expected, found nothing");
}

TEST(DcpIndex, RefusesSizesThatAreNone) {
  const auto with = [](const std::function<void(Emitter&)>& size) {
    Emitter out;
    New(out, "Metadata");
    out.EmptyDict();
    out.Mark();
    out.Word("state_dict_metadata");
    out.EmptyDict();
    out.Mark();
    out.Word("w");
    New(out, "TensorStorageMetadata");
    out.EmptyDict();
    out.Mark();
    out.Word("properties");
    New(out, "TensorProperties");
    out.Mark();
    out.Global("torch.float32");
    out.Global("torch.strided");
    out.Bool(false);
    out.Int(0);
    out.Bool(false);
    out.Tuple(5);
    out.Build();
    size(out);
    out.SetItems(2);
    out.Build();
    out.SetItems(2);
    out.Word("storage_data");
    out.EmptyDict();
    out.SetItems(2);
    out.Build();
    const auto index = ReadIndex(std::move(out).Finish());
    return index ? std::string("accepted") : index.error().message;
  };
  const auto chunks = [](Emitter& out) { out.Word("chunks"), out.EmptyList(); };
  EXPECT_EQ(with([&](Emitter& out) { out.Word("size"), out.Size(Shape{0}), chunks(out); }),
            "accepted");
  EXPECT_EQ(with([&](Emitter& out) { out.Word("size"), out.EmptyTuple(), chunks(out); }),
            "accepted");
  EXPECT_EQ(with([&](Emitter& out) { out.Word("size"), out.EmptyList(), chunks(out); }),
            "accepted");
  EXPECT_EQ(with(chunks), "tensor \"w\": size: torch.Size expected, found nothing");
  EXPECT_EQ(with([&](Emitter& out) { out.Word("size"), out.EmptyDict(), chunks(out); }),
            "tensor \"w\": size: torch.Size expected, found dict");
  EXPECT_EQ(with([](Emitter& out) { out.Word("size"), out.Size(Shape{0}); }),
            "tensor \"w\": chunks: list expected, found nothing");
  EXPECT_EQ(with([](Emitter& out) {
              out.Word("size"), out.Size(Shape{0}), out.Word("chunks"), out.EmptyTuple();
            }),
            "tensor \"w\": chunks: list expected, found tuple");
  EXPECT_EQ(with([](Emitter& out) {
              out.Word("size"), out.Size(Shape{0}), out.Word("chunks"), out.EmptyList(), out.Int(1),
                  out.Append(1);
            }),
            "tensor \"w\": ChunkStorageMetadata expected, found integer");
  EXPECT_EQ(with([&](Emitter& out) { out.Word("size"), out.Size(Shape(65, 1)), chunks(out); }),
            "tensor \"w\": size: 65 dimensions, at most 64");
}

/// The index that one rank has saved: one chunk of "w", and an object of its own.
Index OfRank(std::uint32_t rank) {
  Index index;
  Entry tensor;
  tensor.name = "w";
  tensor.is_tensor = true;
  tensor.shape = {4, 2};
  const std::uint32_t file = index.FileNumber("__" + std::to_string(rank) + "_0.distcp");
  tensor.chunks = {{{std::uint64_t{2} * rank, 0}, {2, 2}, {file, 0, 0, 16}}};
  Entry object;
  object.name = "n";
  object.at = {file, 0, 16, 3};
  index.entries = {tensor, object};
  return index;
}

TEST(DcpIndexUnion, JoinsWhatRanksHaveSaved) {
  IndexUnion all;
  Index first = OfRank(0);
  first.transforms.push_back({"stream.zstd/1"});
  first.entries[1].at.transforms = 1;
  ASSERT_TRUE(all.Add("__0.metadata", first));
  ASSERT_TRUE(all.Add("__1.metadata", OfRank(1)));
  ASSERT_TRUE(all.Add("__2.metadata", {}));  // a rank without anything
  ASSERT_TRUE(all.Add("__3.metadata", OfRank(0)));
  const auto index = std::move(all).Finish();
  ASSERT_TRUE(index) << index.error().message;
  ASSERT_EQ(index->entries.size(), 2U);
  ASSERT_EQ(index->entries[0].chunks.size(), 2U);
  EXPECT_EQ(index->entries[0].chunks[1].offsets, (Shape{2, 0}));
  EXPECT_EQ(index->files[index->entries[0].chunks[1].at.file], "__1_0.distcp");
  EXPECT_EQ(index->transforms[index->entries[1].at.transforms],
            (std::vector<std::string>{"stream.zstd/1"}));
  ASSERT_EQ(index->copies.size(), 3U);  // the fourth's chunk; the object of the second and fourth
  EXPECT_TRUE(CheckVolumes(*index));
}

TEST(DcpIndexUnion, RefusesRanksThatDisagree) {
  const auto error = [](const std::function<void(Index*)>& change) {
    IndexUnion all;
    EXPECT_TRUE(all.Add("__0.metadata", OfRank(0)));
    Index other = OfRank(1);
    change(&other);
    const Status added = all.Add("__1.metadata", other);
    if (!added) return added.error().message;
    const auto index = std::move(all).Finish();
    return index ? std::string("accepted") : index.error().message;
  };
  EXPECT_EQ(error([](Index*) {}), "accepted");
  EXPECT_EQ(error([](Index* one) { one->entries[0].dtype = DType::kBF16; }),
            "__1.metadata: \"w\" is a tensor bfloat16 [4, 2], in __0.metadata a tensor float32 [4, "
            "2]");
  EXPECT_EQ(error([](Index* one) {
              one->entries[0].shape = {8, 2};
            }),
            "__1.metadata: \"w\" is a tensor float32 [8, 2], in __0.metadata a tensor float32 [4, "
            "2]");
  EXPECT_EQ(error([](Index* one) {
              one->entries[0].is_tensor = false;
              one->entries[0].chunks.clear();
            }),
            "__1.metadata: \"w\" is an object, in __0.metadata a tensor float32 [4, 2]");
  EXPECT_EQ(error([](Index* one) { one->has_paths = true; }),
            "__1.metadata: has planner_data, unlike __0.metadata");
  EXPECT_EQ(error([](Index* one) {
              one->entries[0].path = {{1, false}};
            }),
            "__1.metadata: planner_data: \"w\" has another path than in __0.metadata");
  EXPECT_EQ(error([](Index* one) {
              one->entries[0].chunks[0].offsets = {0, 0};
              one->entries[0].chunks[0].sizes = {3, 2};
            }),
            "tensor \"w\": chunk at [0, 0] is [2, 2] in __0_0.distcp and [3, 2] in __1_0.distcp");
  EXPECT_EQ(error([](Index* one) {
              one->entries[0].chunks[0].offsets = {0, 0};
            }),
            "accepted")
      << "a copy";
}

TEST(DcpIndex, TellsRanksByTheNamesOfTheirIndexes) {
  EXPECT_EQ(RankOfIndex("__0.metadata"), 0U);
  EXPECT_EQ(RankOfIndex("__12.metadata"), 12U);
  for (const char* name :
       {".metadata", "__.metadata", "__01.metadata", "__x.metadata", "__1x.metadata", "_1.metadata",
        "__1.meta", "__99999999999999999999.metadata"}) {
    EXPECT_FALSE(RankOfIndex(name)) << name;
  }
}

}  // namespace
}  // namespace shardwright::dcp
