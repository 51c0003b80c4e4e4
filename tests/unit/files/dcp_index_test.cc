// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <functional>

#include "dcp_pickles.h"
#include "files/dcp/index.h"

namespace shardwright::dcp {
namespace {

using pickle::Emitter;

/// One `.metadata`, of which each test corrupts a part.
struct Parts {
  std::string root = "torch.distributed.checkpoint.metadata.Metadata";
  std::function<void(Emitter&)> properties;
  std::vector<Shape> offsets = {{0, 0}, {2, 0}};
  std::vector<Shape> sizes = {{2, 4}, {1, 4}};
  Shape size = {3, 4};
  std::vector<std::pair<std::string, Shape>> places = {{"w", {0, 0}}, {"w", {2, 0}}};
  std::string file = "__0_0.distcp";
  std::int64_t length = 100;
  std::string transform;
  std::vector<std::pair<std::string, std::vector<std::string>>> paths = {{"w", {"w"}},
                                                                         {"n", {"n"}}};
  std::vector<std::string> more;        // objects after "n"
  std::function<void(Emitter&)> extra;  // unknown attributes, before the others
  std::size_t extras = 0;
};

void Tensor(Emitter& out, const Parts& parts) {
  New(out, "TensorStorageMetadata");
  out.EmptyDict();
  out.Mark();
  out.Word("properties");
  if (parts.properties) {
    parts.properties(out);
  } else {
    New(out, "TensorProperties");
    out.Mark();
    out.Global("torch.float32");
    out.Global("torch.serialization._get_layout");
    out.Word("torch.strided");
    out.Tuple(1);
    out.Reduce();
    out.Bool(false);
    out.Int(0);
    out.Bool(false);
    out.Tuple(5);
    out.Build();
  }
  out.Word("size");
  out.Size(parts.size);
  out.Word("chunks");
  out.EmptyList();
  out.Mark();
  for (std::size_t i = 0; i < parts.offsets.size(); ++i) {
    New(out, "ChunkStorageMetadata");
    out.EmptyDict();
    out.Mark();
    out.Word("offsets");
    out.Size(parts.offsets[i]);
    out.Word("sizes");
    out.Size(parts.sizes[i]);
    out.SetItems(2);
    out.Build();
  }
  out.Append(2);
  out.SetItems(3);
  out.Build();
}

void PutPlace(Emitter& out, const Parts& parts, std::string_view name, const Shape* offset) {
  New(out, "MetadataIndex");
  out.EmptyDict();
  out.Mark();
  out.Word("fqn");
  out.Word(name);
  out.Word("index");
  out.None();
  if (offset != nullptr) {
    out.Word("offset");
    out.Size(*offset);
  }
  out.SetItems(2);
  out.Build();
  New(out, std::string_view("torch.distributed.checkpoint.filesystem._StorageInfo"));
  out.EmptyDict();
  out.Mark();
  out.Word("relative_path");
  out.Word(parts.file);
  out.Word("offset");
  out.Int(0);
  out.Word("length");
  out.Int(parts.length);
  if (!parts.transform.empty()) {
    out.Word("transform_descriptors");
    out.EmptyList();
    out.Word(parts.transform);
    out.Append(1);
  }
  out.SetItems(4);
  out.Build();
}

std::string Made(const Parts& parts) {
  Emitter out;
  New(out, std::string_view(parts.root));
  out.EmptyDict();
  out.Mark();
  if (parts.extra) parts.extra(out);
  out.Word("state_dict_metadata");
  out.EmptyDict();
  out.Mark();
  out.Word("w");
  Tensor(out, parts);
  out.Word("n");
  New(out, "BytesStorageMetadata");
  for (const std::string& name : parts.more) {
    out.Word(name);
    New(out, "BytesStorageMetadata");
  }
  out.SetItems(2);
  if (!parts.paths.empty()) {
    out.Word("planner_data");
    out.EmptyDict();
    out.Mark();
    for (const auto& [name, path] : parts.paths) {
      out.Word(name);
      out.Mark();
      for (const std::string& part : path) {
        if (part.front() >= '0' && part.front() <= '9') {
          out.Int(std::stoi(part));
        } else {
          out.Word(part);
        }
      }
      out.Tuple(4);
    }
    out.SetItems(2);
  }
  out.Word("storage_data");
  out.EmptyDict();
  out.Mark();
  for (const auto& [name, offset] : parts.places) PutPlace(out, parts, name, &offset);
  PutPlace(out, parts, "n", nullptr);
  for (const std::string& name : parts.more) PutPlace(out, parts, name, nullptr);
  out.SetItems(3);
  out.SetItems(4);
  out.Build();
  return std::move(out).Finish();
}

std::string Refused(const Parts& parts, Errc code = Errc::kBadInput) {
  const Result<Index> index = ReadIndex(Made(parts));
  if (index) return "accepted";
  EXPECT_EQ(index.error().code, code) << index.error().message;
  return index.error().message;
}

bool Has(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}

TEST(DcpIndex, Reads) {
  const Result<Index> index = ReadIndex(Made({}));
  ASSERT_TRUE(index) << index.error().message;
  ASSERT_EQ(index->entries.size(), 2U);
  const Entry& tensor = index->entries[0];
  EXPECT_TRUE(tensor.is_tensor);
  EXPECT_EQ(tensor.dtype, DType::kF32);
  EXPECT_EQ(tensor.shape, (Shape{3, 4}));
  ASSERT_EQ(tensor.chunks.size(), 2U);
  EXPECT_EQ(tensor.chunks[1].offsets, (Shape{2, 0}));
  EXPECT_EQ(tensor.chunks[1].at.bytes, 100U);
  EXPECT_FALSE(index->entries[1].is_tensor);
  EXPECT_TRUE(index->has_paths);
  EXPECT_TRUE(CheckVolumes(*index));
}

std::string NamesOf(const Parts& parts) {
  const Result<Index> index = ReadIndex(Made(parts));
  if (!index) return index.error().message;
  std::string names;
  for (const Entry& entry : index->entries) names += entry.name + " ";
  return names;
}

TEST(DcpIndex, EntriesHaveTheOrderOfTheStateDict) {
  Parts parts;
  parts.more = {"a", "b"};
  parts.paths = {{"w", {"w"}}, {"a", {"a"}}, {"n", {"n"}}, {"b", {"b"}}};
  EXPECT_EQ(NamesOf(parts), "w a n b ");
}

TEST(DcpIndex, EntriesOfPipelineStagesHaveTheOrderOfRanks) {
  Parts parts;
  parts.more = {"a", "b"};
  parts.paths = {{"a", {"a"}}, {"b", {"b"}}, {"w", {"w"}}, {"n", {"n"}}};
  EXPECT_EQ(NamesOf(parts), "w n a b ");
  const Result<Index> index = ReadIndex(Made(parts));
  ASSERT_TRUE(index) << index.error().message;
  EXPECT_TRUE(index->ranks_differ);
  for (std::uint32_t i = 0; i < 4; ++i) EXPECT_EQ(index->entries[i].planned, (i + 2) % 4);
}

TEST(DcpIndex, ReadsWhatItWrites) {
  Index index;
  Entry state;
  state.name = "optim.state.l1.weight.exp_avg";
  state.path = {{5, false}, {11, false}, {21, false}, {29, false}};
  state.is_tensor = true;
  state.dtype = DType::kBF16;
  state.shape = {70000, 3};
  const std::uint32_t file = index.FileNumber("__0_0.distcp");
  state.chunks = {{{0, 0}, {40000, 3}, {file, 0, 7, 250000}},
                  {{40000, 0}, {30000, 3}, {file, 0, std::uint64_t{5} << 32, 9}}};
  index.entries.push_back(state);
  Entry lr;
  lr.name = "optim.param_groups.0.lr";
  lr.path = {{5, false}, {18, false}, {20, true}, {23, false}};
  lr.at = {index.FileNumber("__1_0.distcp"), 0, 3, 900};
  index.entries.push_back(lr);
  const Result<std::string> bytes = DumpIndex(index);
  ASSERT_TRUE(bytes) << bytes.error().message;
  const Result<Index> again = ReadIndex(*bytes);
  ASSERT_TRUE(again) << again.error().message;
  EXPECT_EQ(again->files, index.files);
  ASSERT_EQ(again->entries.size(), 2U);
  EXPECT_EQ(again->entries[0].path, state.path);
  EXPECT_EQ(again->entries[0].part(2), "l1.weight");
  EXPECT_EQ(again->entries[0].dtype, DType::kBF16);
  EXPECT_EQ(again->entries[0].chunks[1].at.offset, std::uint64_t{5} << 32);
  EXPECT_EQ(again->entries[1].path, lr.path);
  EXPECT_EQ(again->entries[1].at.bytes, 900U);
  EXPECT_EQ(*DumpIndex(*again), *bytes);
}

TEST(DcpIndex, UnknownAttributesAreIgnored) {
  Parts parts;
  parts.extra = [](Emitter& out) {
    out.Word("all_local_plans");
    out.EmptyList();
    New(out, std::string_view("torch.distributed.checkpoint.planner.SavePlan"));
    out.EmptyDict();
    out.Build();
    out.Append(1);
    out.Word("storage_meta");
    out.Global("pathlib.PosixPath");
    out.Word("/tmp");
    out.Tuple(1);
    out.Reduce();
  };
  EXPECT_TRUE(ReadIndex(Made(parts)));
}

TEST(DcpIndex, StridesOfPropertiesAreIgnored) {
  Parts parts;
  parts.properties = [](Emitter& out) {
    New(out, std::string_view("torch.distributed._shard.sharded_tensor.metadata.TensorProperties"));
    out.Mark();
    out.Global("torch.bfloat16");
    out.Global("torch.strided");
    out.Bool(false);
    out.Int(0);
    out.Bool(false);
    out.Int(4);
    out.Int(1);
    out.Tuple(2);
    out.Tuple(6);
    out.Build();
  };
  const Result<Index> index = ReadIndex(Made(parts));
  ASSERT_TRUE(index) << index.error().message;
  EXPECT_EQ(index->entries[0].dtype, DType::kBF16);
}

TEST(DcpIndex, RefusesAnotherRoot) {
  Parts parts;
  parts.root = "collections.Counter";
  EXPECT_TRUE(Has(Refused(parts), "Metadata expected"));
  parts.root = "bytecheckpoint.checkpointer.meta_type.Metadata";
  EXPECT_TRUE(Has(Refused(parts, Errc::kUnsupported), "ByteCheckpoint"));
}

TEST(DcpIndex, RefusesValuesThatAreNeitherTensorNorObject) {
  const auto made = [](const std::function<void(Emitter&)>& logical) {
    Emitter out;
    New(out, "Metadata");
    out.EmptyDict();
    out.Mark();
    logical(out);
    out.Word("storage_data");
    out.EmptyDict();
    out.SetItems(2);
    out.Build();
    return std::move(out).Finish();
  };
  const auto error = [&](const std::function<void(Emitter&)>& logical) {
    const Result<Index> index = ReadIndex(made(logical));
    return index ? std::string("accepted") : index.error().message;
  };
  EXPECT_EQ(error([](Emitter& out) {
              out.Word("state_dict_metadata");
              out.EmptyDict();
            }),
            "accepted");
  EXPECT_TRUE(Has(error([](Emitter& out) {
                    out.Word("state_dict_metadata");
                    out.EmptyList();
                  }),
                  "state_dict_metadata: dict expected, found list"));
  EXPECT_TRUE(Has(error([](Emitter& out) {
                    out.Word("other");
                    out.None();
                  }),
                  "state_dict_metadata: dict expected, found nothing"));
  EXPECT_TRUE(Has(error([](Emitter& out) {
                    out.Word("state_dict_metadata");
                    out.EmptyDict();
                    out.Word("w");
                    out.Int(3);
                    out.SetItems(1);
                  }),
                  "state_dict_metadata: \"w\": found integer"));
  EXPECT_TRUE(Has(error([](Emitter& out) {
                    out.Word("state_dict_metadata");
                    out.EmptyDict();
                    out.Int(7);
                    New(out, "BytesStorageMetadata");
                    out.SetItems(1);
                  }),
                  "state_dict_metadata: integer"));
}

TEST(DcpIndex, WritesMoreEntriesThanABatch) {
  Index index;
  const std::uint32_t file = index.FileNumber("a");
  for (std::uint64_t i = 0; i < 2 * Emitter::kBatch + 1; ++i) {
    Entry entry;
    entry.name = "n" + std::to_string(i);
    entry.at = {file, 0, i, 1};
    index.entries.push_back(std::move(entry));
    const bool edge = (i + 2) % Emitter::kBatch < 3;  // one entry, whole batches, one more
    if (i > 0 && !edge) continue;
    const Result<Index> again = ReadIndex(*DumpIndex(index));
    ASSERT_TRUE(again) << i << ": " << again.error().message;
    EXPECT_EQ(again->entries.size(), i + 1);
    EXPECT_EQ(again->entries.back().at.offset, i);
  }
}

TEST(DcpIndex, RefusesCode) {
  Parts parts;
  parts.extra = [](Emitter& out) {
    out.Word("x");
    out.Global("os.system");
    out.Word("true");
    out.Tuple(1);
    out.Reduce();
  };
  EXPECT_TRUE(Has(Refused(parts), "refused: pickle names os.system"));
}

TEST(DcpIndex, RefusesBoxes) {
  Parts parts;
  parts.offsets[1] = {0, 0};
  EXPECT_TRUE(Has(Refused(parts), "two chunks at [0, 0]"));
  parts.offsets[1] = {2, 1};
  EXPECT_TRUE(Has(Refused(parts), "outside its tensor"));
  parts.offsets[1] = {2};
  EXPECT_TRUE(Has(Refused(parts), "the number of dimensions differs"));
  parts.offsets[1] = {2, ~std::uint64_t{0}};
  EXPECT_TRUE(Has(Refused(parts), "is not a number"));
  parts = {};
  parts.size = {std::uint64_t{1} << 62, 64};
  EXPECT_TRUE(Has(Refused(parts), "overflow"));
}

TEST(DcpIndex, RefusesPlaces) {
  Parts parts;
  parts.places.pop_back();
  EXPECT_TRUE(Has(Refused(parts), "chunk at [2, 0]: storage_data has no location for it"));
  parts.places.push_back({"w", {1, 0}});
  EXPECT_TRUE(Has(Refused(parts), "has a chunk at [1, 0] that the tensor does not have"));
  parts.places.back() = {"w", {2, 0}};
  parts.places.push_back({"w", {2, 0}});
  EXPECT_TRUE(Has(Refused(parts), "more locations than chunks"));
  parts.places.back() = {"other", {0}};
  EXPECT_TRUE(Has(Refused(parts), "state_dict_metadata does not"));
  parts = {};
  parts.length = -1;
  EXPECT_TRUE(Has(Refused(parts), "length: -1"));
  for (const std::string file : {"../x", "/etc/passwd", "a/b", "..", "", "a\\b"}) {
    parts = {};
    parts.file = file;
    EXPECT_TRUE(Has(Refused(parts), "is not the name of a file")) << file;
  }
  parts.file = std::string("a\0b", 3);
  EXPECT_TRUE(Has(Refused(parts), "is not the name of a file"));
}

TEST(DcpIndex, RefusesProperties) {
  const auto with = [](std::string_view cls, std::string_view dtype, std::string_view layout,
                       std::size_t count) {
    Parts parts;
    parts.properties = [=](Emitter& out) {
      New(out, cls);
      out.Mark();
      out.Global(dtype);
      out.Global(layout);
      for (std::size_t i = 2; i < count; ++i) out.Bool(false);
      out.Tuple(5);
      out.Build();
    };
    return parts;
  };
  const std::string_view cls = "torch.distributed.checkpoint.metadata.TensorProperties";
  EXPECT_EQ(Refused(with(cls, "torch.float32", "torch.strided", 5)), "accepted");
  EXPECT_TRUE(Has(Refused(with(cls, "torch.float32", "torch.strided", 4)), "5 or 6"));
  EXPECT_TRUE(Has(Refused(with(cls, "torch.quint8", "torch.strided", 5)), "element type"));
  EXPECT_TRUE(Has(Refused(with(cls, "torch.float32", "torch.sparse_coo", 5), Errc::kUnsupported),
                  "strided"));
  EXPECT_TRUE(Has(Refused(with("torch.X", "torch.float32", "torch.strided", 5)),
                  "TensorProperties expected"));
}

TEST(DcpIndex, RefusesPaths) {
  Parts parts;
  parts.paths = {{"w", {"w"}}};
  EXPECT_TRUE(Has(Refused(parts), "planner_data does not have \"n\""));
  parts.paths = {{"w", {"w"}}, {"n", {"m"}}};
  EXPECT_TRUE(Has(Refused(parts), "no path that matches its name"));
  parts.paths = {{"w", {"w"}}, {"n", {"n"}}, {"n", {"n"}}};
  EXPECT_TRUE(Has(Refused(parts), "twice"));
}

TEST(DcpIndex, RefusesContainersThatDisagree) {
  Index index;
  const std::uint32_t file = index.FileNumber("a");
  const auto add = [&](std::string name, std::vector<PathPart> path) {
    Entry entry;
    entry.name = std::move(name);
    entry.path = std::move(path);
    entry.at = {file, 0, 0, 1};
    index.entries.push_back(std::move(entry));
  };
  const auto error = [&] {
    const Result<Index> again = ReadIndex(*DumpIndex(index));
    return again ? std::string("accepted") : again.error().message;
  };
  add("a.0", {{1, false}, {3, true}});
  add("a.1", {{1, false}, {3, true}});
  EXPECT_EQ(error(), "accepted");
  index.entries[1].path[1].is_index = false;
  EXPECT_TRUE(Has(error(), "has different kinds in different paths"));
  index.entries[1].path[1].is_index = true;
  index.entries[1].name = "a.2";
  EXPECT_EQ(error(), "accepted");  // a.1 was an empty dict
  index.entries[0].name = "param_groups.0";
  index.entries[1].name = "param_groups.2";
  for (Entry& entry : index.entries) entry.path = {{12, false}, {14, true}};
  EXPECT_TRUE(Has(error(), "none with index 1"));
  index.entries.pop_back();
  add("param_groups", {});
  EXPECT_TRUE(Has(error(), "has different kinds"));
}

TEST(DcpIndex, NamesMissingVolume) {
  Index index;
  Entry entry;
  entry.name = "w";
  entry.is_tensor = true;
  entry.shape = {3};
  entry.chunks = {{{0}, {2}, {index.FileNumber("a"), 0, 0, 1}}};
  index.entries.push_back(entry);
  EXPECT_TRUE(Has(CheckVolumes(index).error().message, "2 of 3 elements: a part of it is missing"));
}

TEST(DcpIndex, RefusesEveryCut) {
  const std::string bytes = Made({});
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    EXPECT_FALSE(ReadIndex(std::string_view(bytes).substr(0, i))) << i;
  }
}

}  // namespace
}  // namespace shardwright::dcp
