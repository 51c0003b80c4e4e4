// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/dcp/dcp.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <utility>

#include "checkpoints/registry.h"
#include "engine/layout/shard_map.h"
#include "engine/layout/states.h"
#include "files/dcp/index.h"
#include "fixtures.h"
#include "unit/support/os/scratch.h"

namespace shardwright::checkpoints::dcp {
namespace {

namespace file_format = shardwright::dcp;

fs::path Data() { return fs::path(SW_SOURCE_DIR) / "tests/data/dcp"; }

Result<Checkpoint> ReadFrom(const fs::path& folder) {
  SW_TRY_ASSIGN(const SourceSet set, ScanSource({folder.string()}));
  return ReadCheckpoint(set, Patterns());
}

class DcpCase : public ::testing::TestWithParam<const char*> {};

TEST_P(DcpCase, HoldsWhatTheTrainerHeld) {
  const fs::path folder = Data() / GetParam();
  const Result<Checkpoint> checkpoint = ReadFrom(folder / "ckpt");
  ASSERT_TRUE(checkpoint) << checkpoint.error().message;
  EXPECT_TRUE(layout::Validate(checkpoint->map));
  ExpectTensors(*checkpoint, Expected::Read(folder / "expected.safetensors"));
}

INSTANTIATE_TEST_SUITE_P(Real, DcpCase,
                         ::testing::Values("nested_w3", "ranks_w3", "flat_w2", "strided_w1"),
                         [](const auto& test) { return TestName(test.param); });

TEST(Dcp, ReadsNestedOptimizers) {
  const Result<Checkpoint> checkpoint = ReadFrom(Data() / "nested_w3/ckpt");
  ASSERT_TRUE(checkpoint) << checkpoint.error().message;
  ASSERT_EQ(checkpoint->groups.size(), 2U);
  EXPECT_EQ(checkpoint->groups[0].hyper.weight_decay, 0.1);
  EXPECT_EQ(checkpoint->groups[1].hyper.weight_decay, 0.0);
  EXPECT_EQ(checkpoint->groups[0].hyper.betas, (std::pair{0.9, 0.95}));
  EXPECT_EQ(checkpoint->optimizer, "adamw");
  ASSERT_TRUE(checkpoint->iteration);
  EXPECT_EQ(*checkpoint->iteration, 2U);
  const auto& own = dynamic_cast<const DcpState&>(*checkpoint->own);
  EXPECT_FALSE(own.naming.flat);
  EXPECT_EQ(own.naming.model, std::vector<std::string>{"model"});
  EXPECT_EQ(own.extras.size(), 4U);  // the note, and the random draw of each of three ranks
  EXPECT_EQ(own.flavour, Flavour::kPlain);
  EXPECT_TRUE(checkpoint->frozen_unknown);  // its buffers may be frozen parameters
}

TEST(Dcp, ReadsFlatOptimizers) {
  const Result<Checkpoint> checkpoint = ReadFrom(Data() / "flat_w2/ckpt");
  ASSERT_TRUE(checkpoint) << checkpoint.error().message;
  EXPECT_EQ(checkpoint->groups.size(), 2U);
  EXPECT_TRUE(checkpoint->warnings.empty()) << testing::PrintToString(checkpoint->warnings);
  ASSERT_EQ(checkpoint->optimizer_warnings.size(), 1U);
  EXPECT_NE(checkpoint->optimizer_warnings[0].find("in the order of the model"), std::string::npos);
  EXPECT_EQ(*checkpoint->iteration, 2U);
  const auto& own = dynamic_cast<const DcpState&>(*checkpoint->own);
  EXPECT_TRUE(own.naming.flat);
  EXPECT_TRUE(own.naming.model.empty());
  EXPECT_EQ(own.naming.optimizer, std::vector<std::string>{"optimizer"});
  EXPECT_EQ(own.flavour, Flavour::kTorchtitan);
}

class DcpDamage : public os::Scratch {
 protected:
  void SetUp() override {
    os::Scratch::SetUp();
    folder_ = At("ckpt");
    fs::copy(Data() / "nested_w3/ckpt", folder_);
  }
  std::string Error(Errc code) {
    const Result<Checkpoint> checkpoint = ReadFrom(folder_);
    if (checkpoint) return "accepted";
    EXPECT_EQ(checkpoint.error().code, code) << checkpoint.error().message;
    return checkpoint.error().message;
  }
  std::string Bytes(const char* name) { return ReadFileText(folder_ / name); }
  void Write(const char* name, const std::string& bytes) {
    std::ofstream(folder_ / name, std::ios::binary) << bytes;
  }
  static bool Has(const std::string& text, std::string_view part) {
    return text.find(part) != std::string::npos;
  }

  /// Rewrites the index with a change.
  void Change(const std::function<void(file_format::Index*)>& change) {
    Result<file_format::Index> index = file_format::ReadIndex(Bytes(".metadata"));
    ASSERT_TRUE(index) << index.error().message;
    change(&*index);
    const Result<std::string> bytes = file_format::DumpIndex(*index);
    ASSERT_TRUE(bytes) << bytes.error().message;
    Write(".metadata", *bytes);
  }
  static file_format::Entry& Named(file_format::Index* index, std::string_view name) {
    const auto at =
        std::find_if(index->entries.begin(), index->entries.end(),
                     [&](const file_format::Entry& entry) { return entry.name == name; });
    EXPECT_NE(at, index->entries.end()) << name;
    return *at;
  }
  /// The chunk of a tensor that begins at a row.
  static file_format::Chunk& ChunkAt(file_format::Index* index, std::string_view name,
                                     std::uint64_t row) {
    std::vector<file_format::Chunk>& chunks = Named(index, name).chunks;
    const auto at =
        std::find_if(chunks.begin(), chunks.end(),
                     [&](const file_format::Chunk& chunk) { return chunk.offsets.front() == row; });
    EXPECT_NE(at, chunks.end()) << name << " at " << row;
    return *at;
  }

  fs::path folder_;
};

constexpr std::string_view kRows = "model.emb.weight";  // [7, 4] on three ranks: 3, 3 and 1 rows

TEST_F(DcpDamage, TheIndexWrittenAnewIsRead) {
  Change([](file_format::Index*) {});
  EXPECT_TRUE(ReadFrom(folder_));
}

TEST_F(DcpDamage, OverlappingChunksAreRefused) {
  Change([](file_format::Index* index) { ChunkAt(index, kRows, 3).offsets[0] = 2; });
  const Result<Checkpoint> checkpoint = ReadFrom(folder_);
  ASSERT_TRUE(checkpoint) << checkpoint.error().message;
  const Status proved = layout::Validate(checkpoint->map);
  ASSERT_FALSE(proved);
  EXPECT_EQ(proved.error().code, Errc::kBadInput);
  EXPECT_TRUE(Has(proved.error().message, "\"emb.weight\"")) << proved.error().message;
  EXPECT_TRUE(Has(proved.error().message, "its shards overlap")) << proved.error().message;
}

TEST_F(DcpDamage, ALostChunkIsNamed) {
  Change([](file_format::Index* index) {
    std::vector<file_format::Chunk>& chunks = Named(index, kRows).chunks;
    chunks.erase(chunks.begin() + (&ChunkAt(index, kRows, 6) - chunks.data()));
  });
  const std::string message = Error(Errc::kBadInput);
  EXPECT_TRUE(Has(message, kRows)) << message;
  EXPECT_TRUE(Has(message, "24 of 28 elements")) << message;
}

TEST_F(DcpDamage, AFileOfAnotherSaveIsRefused) {
  fs::copy_file(Data() / "strided_w1/ckpt/__0_0.distcp", folder_ / "__1_0.distcp",
                fs::copy_options::overwrite_existing);
  EXPECT_TRUE(Has(Error(Errc::kBadInput), "__1_0.distcp"));
}

TEST_F(DcpDamage, ALostTrailingChunkIsNamedAsPyTorchWouldSaveTheRest) {
  Change([](file_format::Index* index) {
    // Like a saver's index of two ranks of three: the remaining chunks have no gaps from offset 0.
    std::vector<file_format::Chunk>& chunks = Named(index, kRows).chunks;
    chunks.erase(chunks.begin() + (&ChunkAt(index, kRows, 6) - chunks.data()));
    chunks.erase(chunks.begin() + (&ChunkAt(index, kRows, 3) - chunks.data()));
  });
  const std::string message = Error(Errc::kBadInput);
  EXPECT_TRUE(Has(message, ".metadata")) << message;
  EXPECT_TRUE(Has(message, kRows)) << message;
  EXPECT_TRUE(Has(message, "12 of 28 elements")) << message;
}

TEST_F(DcpDamage, AnIndexOfAnotherSaveIsRefused) {
  fs::copy_file(Data() / "flat_w2/ckpt/.metadata", folder_ / ".metadata",
                fs::copy_options::overwrite_existing);
  const std::string message = Error(Errc::kBadInput);
  EXPECT_TRUE(Has(message, ".distcp")) << message;
}

TEST_F(DcpDamage, LinksOutOfTheFolderAreRefused) {
  for (const char* name : {".metadata", "__1_0.distcp"}) {
    fs::rename(folder_ / name, At("elsewhere"));
    fs::create_symlink(At("elsewhere"), folder_ / name);
    const std::string message = Error(Errc::kBadInput);
    EXPECT_TRUE(Has(message, std::string("/") + name + ": the link leads out")) << message;
    EXPECT_TRUE(Has(message, "/elsewhere")) << message;
    fs::remove(folder_ / name);
    fs::rename(At("elsewhere"), folder_ / name);
  }
  // Inside the folder, and to the folder, links are treated like other names.
  fs::rename(folder_ / "__1_0.distcp", folder_ / "data");
  fs::create_symlink("data", folder_ / "__1_0.distcp");
  fs::create_symlink(folder_, At("link"));
  EXPECT_TRUE(ReadFrom(At("link")));
}

TEST_F(DcpDamage, SeveralOptimizersAreNamed) {
  Change([](file_format::Index* index) {
    std::string& name = Named(index, "optim.param_groups.0.lr").name;
    name.replace(0, std::string_view("optim").size(), "other");
  });
  const std::string message = Error(Errc::kUnsupported);
  EXPECT_TRUE(Has(message, "found several: \"optim.\", \"other.\"")) << message;
}

TEST_F(DcpDamage, OverlappingItemsAreRefused) {
  Change([](file_format::Index* index) { --ChunkAt(index, kRows, 3).at.offset; });
  EXPECT_TRUE(Has(Error(Errc::kBadInput), "overlap"));
}

TEST_F(DcpDamage, ItemsBeyondTheirFileAreRefused) {
  Change([](file_format::Index* index) {
    ChunkAt(index, kRows, 3).at.offset = std::uint64_t{1} << 61;
  });
  EXPECT_TRUE(Has(Error(Errc::kBadInput), "the file ends at"));
}

TEST_F(DcpDamage, TwoItemsAtOnePlaceAreRefused) {
  Change([](file_format::Index* index) {
    ChunkAt(index, kRows, 3).at = ChunkAt(index, kRows, 6).at;  // an item with fewer rows
  });
  EXPECT_NE(Error(Errc::kBadInput), "accepted");
}

TEST_F(DcpDamage, ItemsThatAreNotWhatTheIndexSaysAreRefused) {
  Change([](file_format::Index* index) {
    std::swap(ChunkAt(index, kRows, 3).at, ChunkAt(index, kRows, 6).at);
  });
  EXPECT_TRUE(Has(Error(Errc::kBadInput), "tensor float32 ["));
  fs::copy_file(Data() / "nested_w3/ckpt/.metadata", folder_ / ".metadata",
                fs::copy_options::overwrite_existing);
  Change([](file_format::Index* index) {
    std::swap(ChunkAt(index, kRows, 3).at, Named(index, "note").at);
  });
  EXPECT_TRUE(Has(Error(Errc::kBadInput), "one tensor expected, found string"));
  fs::copy_file(Data() / "nested_w3/ckpt/.metadata", folder_ / ".metadata",
                fs::copy_options::overwrite_existing);
  Change([](file_format::Index* index) { Named(index, kRows).dtype = DType::kI32; });
  EXPECT_TRUE(Has(Error(Errc::kBadInput), "tensor int32 ["));
}

TEST_F(DcpDamage, BytesAfterAContainerAreRefused) {
  Write("__1_0.distcp", Bytes("__1_0.distcp") + "x");
  Change([](file_format::Index* index) {
    const auto file = index->FileNumber("__1_0.distcp");
    file_format::Place* last = nullptr;
    for (file_format::Entry& entry : index->entries) {
      if (!entry.is_tensor && entry.at.file == file &&
          (last == nullptr || entry.at.offset > last->offset)) {
        last = &entry.at;
      }
      for (file_format::Chunk& chunk : entry.chunks) {
        if (chunk.at.file == file && (last == nullptr || chunk.at.offset > last->offset)) {
          last = &chunk.at;
        }
      }
    }
    ASSERT_NE(last, nullptr);
    ++last->bytes;
  });
  EXPECT_TRUE(Has(Error(Errc::kBadInput), "__1_0.distcp: item"));
}

TEST_F(DcpDamage, AFolderInThePlaceOfAFileIsNoFile) {
  fs::remove(folder_ / "__1_0.distcp");
  fs::create_directory(folder_ / "__1_0.distcp");
  EXPECT_TRUE(Has(Error(Errc::kNotFound), "__1_0.distcp"));
}

TEST_F(DcpDamage, OtherIndexesBesideTheOneAreTold) {
  Write("__0.metadata", "of a rank");
  Write(".metadata.tmp", "of a save that was stopped");
  const Result<Checkpoint> checkpoint = ReadFrom(folder_);
  ASSERT_TRUE(checkpoint) << checkpoint.error().message;
  ASSERT_EQ(checkpoint->warnings.size(), 2U);
  EXPECT_TRUE(Has(checkpoint->warnings[0], ".metadata.tmp"));
  EXPECT_TRUE(Has(checkpoint->warnings[1], "__0.metadata"));
  EXPECT_TRUE(Has(checkpoint->warnings[1], "using the index of all ranks"));
}

TEST_F(DcpDamage, TransformsThatAreNotKnownAreRefused) {
  fs::remove_all(folder_);
  fs::copy(Data() / "zstd_w2/ckpt", folder_);
  const std::string known = "stream.zstd/1";
  const std::string index = Bytes(".metadata");
  ASSERT_TRUE(Has(index, known));
  EXPECT_TRUE(ReadFrom(folder_));
  for (const std::string other : {"stream.zstd/2", "stream.lz4x/1", "zstd.stream/1"}) {
    std::string text = index;
    text.replace(text.find(known), known.size(), other);
    Write(".metadata", text);
    const std::string message = Error(Errc::kUnsupported);
    EXPECT_TRUE(Has(message, "_0.distcp: item \"")) << message;
    EXPECT_TRUE(Has(message, "transform \"" + other + "\" is not known")) << message;
  }
}

TEST_F(DcpDamage, AnIncompleteSaveIsNamed) {
  fs::remove(folder_ / ".metadata");
  EXPECT_TRUE(Has(Error(Errc::kNotFound), "an incomplete save"));
  Write("__0.metadata", "x");
  EXPECT_TRUE(
      Has(Error(Errc::kNotFound), "__1.metadata is missing: each rank has an index of its own"));
}

TEST_F(DcpDamage, MissingFilesAreNamed) {
  fs::remove(folder_ / "__1_0.distcp");
  EXPECT_TRUE(Has(Error(Errc::kNotFound), "__1_0.distcp"));
}

TEST_F(DcpDamage, FilesOfOtherLengthsAreRefused) {
  const std::string whole = Bytes("__1_0.distcp");
  Write("__1_0.distcp", whole.substr(0, whole.size() - 1));
  EXPECT_TRUE(Has(Error(Errc::kBadInput), "the file ends at"));
  Write("__1_0.distcp", whole + "x");
  EXPECT_TRUE(Has(Error(Errc::kBadInput), "1 bytes after the last item"));
}

TEST_F(DcpDamage, AnotherRanksFileIsRefused) {
  fs::copy_file(folder_ / "__0_0.distcp", folder_ / "__1_0.distcp",
                fs::copy_options::overwrite_existing);
  EXPECT_NE(Error(Errc::kBadInput), "accepted");
}

TEST_F(DcpDamage, LeftoverFilesAreTold) {
  Write("__7_0.distcp", "of an earlier save");
  Write("__8_0.distcp", "");
  const Result<Checkpoint> checkpoint = ReadFrom(folder_);
  ASSERT_TRUE(checkpoint) << checkpoint.error().message;
  ASSERT_EQ(checkpoint->warnings.size(), 1U);
  EXPECT_TRUE(Has(checkpoint->warnings[0], "__7_0.distcp"));
}

TEST(DcpNames, WhatClaimsAFolder) {
  const auto claims = [](const std::string& name, os::EntryType type) {
    return Claims(Listing{{{"folder", {{name, type}}}}});
  };
  EXPECT_TRUE(claims(".metadata", os::EntryType::kFile));
  EXPECT_TRUE(claims("__0_0.distcp", os::EntryType::kFile));
  EXPECT_TRUE(claims("pytorch_model_fsdp_0", os::EntryType::kDir));
  EXPECT_FALSE(claims("pytorch_model_fsdp.bin", os::EntryType::kFile));
  EXPECT_FALSE(claims("model.safetensors", os::EntryType::kFile));
  EXPECT_FALSE(Claims(
      Listing{{{"folder",
                {{".metadata", os::EntryType::kFile}, {"metadata.json", os::EntryType::kFile}}}}}));
  EXPECT_EQ(BelongsTo("__3_1.distcp"), Belongs::kOneVersion);
  EXPECT_EQ(BelongsTo("optimizer_0/.metadata"), Belongs::kOneVersion);
  EXPECT_EQ(BelongsTo("other/.metadata"), Belongs::kNo);
  EXPECT_EQ(BelongsTo("scheduler.pt"), Belongs::kNo);
}

Result<Written> WriteAs(const Checkpoint& source, const std::string& target) {
  const Format* row = FindFormat(kName);
  SW_TRY_ASSIGN(const TargetSpec spec, ParseTarget(*row, target));
  SW_TRY_ASSIGN(const Layout layout, Resolve(spec, source));
  return Write(source, layout);
}

TEST(DcpWrite, EveryMeshIsAWholeMap) {
  const Result<Checkpoint> source = ReadFrom(Data() / "nested_w3/ckpt");
  ASSERT_TRUE(source) << source.error().message;
  for (const char* target :
       {"dp_shard=1", "dp_shard=5", "dp_shard=2,dp_replicate=3", "dp_shard=2,tp=2", "tp=2,ep=2",
        "dp_shard=4,files=2", "optimizer=flat", "flavour=torchtitan", "flavour=accelerate"}) {
    const Result<Written> written = WriteAs(*source, target);
    ASSERT_TRUE(written) << target << ": " << written.error().message;
    EXPECT_TRUE(layout::Validate(written->target.map)) << target;
    EXPECT_TRUE(written->not_carried.empty()) << target;
    const auto indexes = std::count_if(
        written->target.files.begin(), written->target.files.end(),
        [](const plan::OutputFile& file) { return file.path.ends_with(".metadata"); });
    EXPECT_EQ(indexes, std::string(target) == "flavour=accelerate" ? 2 : 1) << target;
  }
}

/// A stack of four experts, [4, 6, 2], without other tensors.
Checkpoint Experts() {
  Checkpoint made;
  Param param;
  param.name = "mlp.experts.w1";
  param.shape = {4, 6, 2};
  made.map.files = {"source"};
  made.map.members.push_back({0, 0, 4 * Elems(param.shape), std::nullopt, "w1"});
  made.map.arrays.push_back({DType::kF32, {{0, 0, Elems(param.shape)}}});
  layout::LogicalTensor tensor;
  tensor.name = param.name;
  tensor.state = layout::kWeight;
  tensor.shape = param.shape;
  layout::Fragment whole;
  whole.cut = std::make_shared<const layout::Cut>(layout::Cut::Whole(param.shape));
  tensor.fragments.push_back(std::move(whole));
  made.map.tensors.push_back(std::move(tensor));
  made.params.push_back(std::move(param));
  return made;
}

TEST(DcpWrite, ExpertsAreSharedOutOverTensorParallelRanksToo) {
  const Checkpoint source = Experts();
  const auto boxes = [&](const std::string& target) {
    const Result<Written> written = WriteAs(source, target);
    EXPECT_TRUE(written) << target << ": " << written.error().message;
    EXPECT_TRUE(layout::Validate(written->target.map)) << target;
    std::vector<Shape> sizes;
    for (const layout::Fragment& one : written->target.map.tensors.front().fragments) {
      sizes.push_back(one.cut->shard());
    }
    return sizes;
  };
  EXPECT_EQ(boxes("dp_shard=2,tp=2,ep=2"), std::vector<Shape>(4, Shape{2, 3, 2}));
  EXPECT_EQ(boxes("dp_shard=1,tp=4,ep=4"), std::vector<Shape>(4, Shape{1, 6, 2}));
  EXPECT_EQ(boxes("dp_shard=2,tp=2"), std::vector<Shape>(2, Shape{2, 6, 2}));
}

TEST(DcpWrite, ATrainerSavesOneAdapter) {
  const Format* row = FindFormat(kName);
  Checkpoint source;
  const auto resolve = [&](const char* target) {
    return Resolve(*ParseTarget(*row, target), source);
  };
  for (const char* name : {"q.weight", "q.lora_A.one.weight", "q.lora_A.two.weight"}) {
    source.params.emplace_back().name = name;
  }
  const Result<Layout> both = resolve("flavour=transformers");
  ASSERT_FALSE(both);
  EXPECT_EQ(both.error().code, Errc::kUnsupported);
  EXPECT_NE(both.error().message.find("q.lora_A.two.weight"), std::string::npos);
  EXPECT_TRUE(resolve("flavour=accelerate"));
  source.params.pop_back();
  EXPECT_TRUE(resolve("flavour=transformers"));
}

TEST(DcpWrite, OtherFlavoursHaveTheNamesOfTheRunningModel) {
  const Format* row = FindFormat(kName);
  Checkpoint source;
  const auto running = [&](const char* target) {
    return HasRunningNames(*ParseTarget(*row, target), source);
  };
  EXPECT_TRUE(running(""));
  EXPECT_TRUE(running("flavour=plain"));
  EXPECT_TRUE(running("flavour=torchtitan"));
  EXPECT_FALSE(running("flavour=accelerate"));
  EXPECT_FALSE(running("flavour=transformers"));
  auto before = std::make_shared<FolderLayout>();
  before->flavour = Flavour::kAccelerate;
  source.layout.own = before;
  EXPECT_FALSE(running(""));
  EXPECT_TRUE(running("flavour=plain"));
  before->flavour = Flavour::kPlain;
  EXPECT_FALSE(running("flavour=plain"));
}

TEST(DcpWrite, RefusesWhatCannotBe) {
  const Result<Checkpoint> source = ReadFrom(Data() / "nested_w3/ckpt");
  ASSERT_TRUE(source) << source.error().message;
  const auto code = [&](const char* target) {
    const Result<Written> written = WriteAs(*source, target);
    return written ? Errc::kInternal : written.error().code;
  };
  EXPECT_EQ(code("dp_shard=3,ep=2"), Errc::kInfeasible);
  EXPECT_EQ(code("dp_shard=2,tp=2,ep=3"), Errc::kInfeasible);
  EXPECT_EQ(code("dp_shard=2,files=3"), Errc::kInfeasible);
  EXPECT_EQ(code("dp_shard=0"), Errc::kUsage);
  EXPECT_EQ(code("flavour=other"), Errc::kUsage);
}

}  // namespace
}  // namespace shardwright::checkpoints::dcp
