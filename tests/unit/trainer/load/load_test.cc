// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <mutex>

#include <nlohmann/json.hpp>

#include "engine/layout/states.h"
#include "support/comm/threads.h"
#include "trainer/load/load.h"
#include "trainer/load/load_result_json.h"
#include "trainer/load/match.h"
#include "unit/support/os/scratch.h"

// Fills tensors of ranks from checkpoints of other layouts.

namespace shardwright::trainer {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

std::string Own(const std::string& name) {
  return (fs::path(SW_SOURCE_DIR) / "tests/data/deepspeed" / name / "ckpt").string();
}

LoadOptions From(const std::string& root) {
  LoadOptions options;
  options.input.source_paths = {root};
  return options;
}

/// The shards of a rank, with the memory for them.
struct Rank {
  std::vector<TrainerShard> held;
  std::vector<std::vector<std::byte>> bytes;

  void Add(json description) {
    const json text = json::parse(json::array({std::move(description)}).dump());
    std::vector<TrainerShard> one = ParseShards(text).value();
    bytes.emplace_back(one[0].cut->shard_elems() * ItemSize(one[0].dtype), std::byte{0xAB});
    held.push_back(std::move(one[0]));
  }
  std::vector<Memory> memory() {
    std::vector<Memory> out;
    for (auto& one : bytes) out.push_back({one});
    return out;
  }
};

/// The tensors of a checkpoint, as a trainer on one rank would name them.
std::vector<json> TensorsOf(const std::string& root) {
  const auto comm = comm::MakeSerialComm();
  NullSink sink;
  const auto input = convert::OpenInput(*comm, From(root).input, sink);
  EXPECT_TRUE(input.has_value()) << input.error().message;
  std::vector<json> out;
  for (const layout::LogicalTensor& tensor : (*input)->checkpoint.map.tensors) {
    const bool weight = tensor.state == layout::kWeight;
    out.push_back({{"name", tensor.name},
                   {"kind", weight ? std::string(kParam) : tensor.state},
                   {"shape", tensor.shape},
                   {"dtype", Name(tensor.dtype)}});
  }
  return out;
}

Result<Loaded> LoadInto(const LoadOptions& options, Rank* rank) {
  const auto comm = comm::MakeSerialComm();
  NullSink sink;
  const std::vector<Memory> memory = rank->memory();
  return Load(*comm, options, rank->held, memory, sink);
}

/// A copy of a checkpoint without its optimizer shards.
class LostOptimizer : public os::Scratch {
 protected:
  void SetUp() override {
    os::Scratch::SetUp();
    root_ = At("ckpt");
    fs::copy(Own("zero1_w2"), root_, fs::copy_options::recursive);
    std::vector<fs::path> shards;
    for (const auto& entry : fs::recursive_directory_iterator(root_)) {
      if (entry.path().string().ends_with("optim_states.pt")) shards.push_back(entry.path());
    }
    ASSERT_EQ(shards.size(), 2U);
    for (const fs::path& shard : shards) fs::remove(shard);
  }

  std::string root_;
};

TEST_F(LostOptimizer, AModelIsLoaded) {
  Rank whole;
  Rank lost;
  for (const json& tensor : TensorsOf(Own("zero1_w2"))) {
    const std::string kind = tensor["kind"];
    if (kind != kParam && kind != layout::kBuffer && kind != layout::kFrozen) continue;
    whole.Add(tensor);
    lost.Add(tensor);
  }
  ASSERT_FALSE(whole.held.empty());
  const auto from_whole = LoadInto(From(Own("zero1_w2")), &whole);
  ASSERT_TRUE(from_whole) << from_whole.error().message;
  const auto loaded = LoadInto(From(root_), &lost);
  ASSERT_TRUE(loaded) << loaded.error().message;
  EXPECT_EQ(lost.bytes, whole.bytes);
}

TEST_F(LostOptimizer, AnOptimizerIsNot) {
  Rank rank;
  for (const json& tensor : TensorsOf(Own("zero1_w2"))) rank.Add(tensor);
  LoadOptions options = From(root_);
  options.strict = false;
  const auto refused = LoadInto(options, &rank);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Errc::kNotFound);
  EXPECT_NE(refused.error().message.find("optim_states.pt"), std::string::npos);
  EXPECT_NE(refused.error().message.find("without the optimizer"), std::string::npos);
}

/// Rank `rank` of `ranks` has a range of each tensor of the optimizer, and all of the model's.
Rank Sharded(const std::vector<json>& tensors, int rank, int ranks) {
  Rank out;
  for (json tensor : tensors) {
    const std::string kind = tensor["kind"];
    const bool whole = kind == kParam || kind == layout::kBuffer || kind == layout::kFrozen;
    const std::uint64_t elems = Elems(tensor["shape"].get<Shape>());
    const auto cut = [&](int r) {
      return elems * static_cast<std::uint64_t>(r) / static_cast<std::uint64_t>(ranks);
    };
    if (!whole) {
      tensor["first"] = cut(rank);
      tensor["count"] = cut(rank + 1) - cut(rank);
    }
    out.Add(std::move(tensor));
  }
  return out;
}

class LiveLoadTest : public os::Scratch {};

TEST_F(LiveLoadTest, FillsEveryRankAndReadsEachByteOnce) {
  for (const std::string name : {"zero3_w2_sub_groups", "bf16_zero2_w2", "zero2_w3_frozen_tied"}) {
    SCOPED_TRACE(name);
    const std::vector<json> tensors = TensorsOf(Own(name));
    Rank whole = Sharded(tensors, 0, 1);
    const Result<Loaded> alone = LoadInto(From(Own(name)), &whole);
    ASSERT_TRUE(alone.has_value()) << alone.error().message;
    EXPECT_TRUE(alone->missing.empty());
    EXPECT_TRUE(alone->unused.empty());
    EXPECT_GT(alone->members_verified, 0U);
    const int ranks = 3;
    std::vector<Rank> all;
    all.reserve(ranks);
    for (int r = 0; r < ranks; ++r) all.push_back(Sharded(tensors, r, ranks));
    std::mutex mutex;
    std::uint64_t read = 0;
    const std::vector<Status> done = comm::RunThreads(ranks, [&](comm::Comm& comm) -> Status {
      Rank& mine = all[static_cast<std::size_t>(comm.rank())];
      NullSink sink;
      const std::vector<Memory> memory = mine.memory();
      SW_TRY_ASSIGN(const Loaded loaded, Load(comm, From(Own(name)), mine.held, memory, sink));
      const std::lock_guard lock(mutex);
      read = loaded.bytes_read;
      return {};
    });
    for (const Status& status : done) ASSERT_TRUE(status.has_value()) << status.error().message;
    EXPECT_EQ(read, alone->bytes_read);
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      SCOPED_TRACE(Label(whole.held[i]));
      std::vector<std::byte> joined;
      for (const Rank& rank : all) {
        if (rank.bytes[i].size() == whole.bytes[i].size()) {
          EXPECT_EQ(rank.bytes[i], whole.bytes[i]);
          joined = whole.bytes[i];
        } else {
          joined.insert(joined.end(), rank.bytes[i].begin(), rank.bytes[i].end());
        }
      }
      EXPECT_EQ(joined, whole.bytes[i]);
    }
  }
}

TEST_F(LiveLoadTest, NeedsOnlyAsMuchMemoryAsItIsGiven) {
  const std::vector<json> tensors = TensorsOf(Own("zero1_w2"));
  Rank whole = Sharded(tensors, 0, 1);
  LoadOptions options = From(Own("zero1_w2"));
  options.threads = 2;
  options.memory_bytes = 1 << 20;
  const Result<Loaded> loaded = LoadInto(options, &whole);
  ASSERT_FALSE(loaded.has_value());
  EXPECT_EQ(loaded.error().code, Errc::kLimit);
  EXPECT_NE(loaded.error().message.find("2 threads need 18"), std::string::npos)
      << loaded.error().message;
}

TEST_F(LiveLoadTest, WhatIsMissingOrUnusedIsRefusedOrListed) {
  const std::vector<json> tensors = TensorsOf(Own("zero1_w2"));
  Rank rank;
  for (std::size_t i = 1; i < tensors.size(); ++i) rank.Add(tensors[i]);
  const std::string left_out = tensors[0]["name"];
  json other = tensors[0];
  other["name"] = "another";
  rank.Add(other);
  LoadOptions options = From(Own("zero1_w2"));
  Result<Loaded> loaded = LoadInto(options, &rank);
  ASSERT_FALSE(loaded.has_value());
  EXPECT_EQ(loaded.error().code, Errc::kMismatch);
  EXPECT_NE(loaded.error().message.find("does not have \"another\""), std::string::npos)
      << loaded.error().message;
  EXPECT_EQ(rank.bytes[0][0], std::byte{0xAB}) << "nothing may be touched";
  options.strict = false;
  loaded = LoadInto(options, &rank);
  ASSERT_TRUE(loaded.has_value()) << loaded.error().message;
  EXPECT_EQ(loaded->missing.size(), 1U);
  EXPECT_EQ(rank.bytes.back()[0], std::byte{0xAB});
}

TEST(NamesTest, WrapperPartsOfTheSourceAreNoDifference) {
  checkpoints::Checkpoint source;
  const auto add = [&](const std::string& name, const std::string& alias_of = "") {
    checkpoints::Param param;
    param.name = name;
    param.alias_of = alias_of;
    source.params.push_back(std::move(param));
  };
  add("_orig_mod.a.weight");
  add("b._checkpoint_wrapped_module.bias");
  add("_orig_mod.c.weight", "_orig_mod.a.weight");
  add("d.weight");
  add("_orig_mod.d.weight");
  const Names names(source);
  EXPECT_EQ(names.Holder("a.weight"), "_orig_mod.a.weight");
  EXPECT_EQ(names.Holder("b.bias"), "b._checkpoint_wrapped_module.bias");
  EXPECT_EQ(names.Holder("c.weight"), "_orig_mod.a.weight");
  EXPECT_EQ(names.Holder("d.weight"), "d.weight");
  EXPECT_EQ(names.Holder("e.weight"), "e.weight");
}

TEST_F(LiveLoadTest, OtherShapesAndTypesAreRefused) {
  const std::vector<json> tensors = TensorsOf(Own("zero1_w2"));
  const auto refused = [&](const char* key, const json& value) {
    Rank rank;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      json tensor = tensors[i];
      if (i == 0) tensor[key] = value;
      rank.Add(std::move(tensor));
    }
    const Result<Loaded> loaded = LoadInto(From(Own("zero1_w2")), &rank);
    return loaded ? "accepted" : loaded.error().message;
  };
  EXPECT_NE(refused("shape", {2, 2}).find("the trainer has shape [2, 2], the checkpoint has ["),
            std::string::npos)
      << refused("shape", {2, 2});
  EXPECT_NE(refused("dtype", "int64").find("no conversion from float32 to int64"),
            std::string::npos)
      << refused("dtype", "int64");
}

TEST_F(LiveLoadTest, PiecesThatAreNotAllOfATensorAreRefused) {
  std::vector<json> tensors = TensorsOf(Own("zero1_w2"));
  tensors[0]["first"] = 0;
  tensors[0]["count"] = 1;
  Rank rank;
  for (const json& tensor : tensors) rank.Add(tensor);
  const Result<Loaded> loaded = LoadInto(From(Own("zero1_w2")), &rank);
  ASSERT_FALSE(loaded.has_value());
  EXPECT_EQ(loaded.error().code, Errc::kBadInput);
  EXPECT_NE(loaded.error().message.find(tensors[0]["name"].get<std::string>()), std::string::npos)
      << loaded.error().message;
}

TEST_F(LiveLoadTest, DamageIsFoundByChecksums) {
  const std::string copy = At("ckpt");
  fs::copy(Own("zero1_w2"), copy, fs::copy_options::recursive);
  const std::vector<json> tensors = TensorsOf(copy);
  std::string path;
  std::uintmax_t most = 0;
  for (const auto& entry : fs::recursive_directory_iterator(copy)) {
    const std::string name = entry.path().filename().string();
    if (name.find("optim_states") == std::string::npos || entry.file_size() <= most) continue;
    path = entry.path().string();
    most = entry.file_size();
  }
  ASSERT_FALSE(path.empty());
  {
    // The first of many equal bytes of a payload: somewhere in the middle of the file.
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(most / 2));
    file.put('\x5A');
  }
  Rank rank = Sharded(tensors, 0, 1);
  const Result<Loaded> loaded = LoadInto(From(copy), &rank);
  ASSERT_FALSE(loaded.has_value());
  EXPECT_EQ(loaded.error().code, Errc::kBadInput) << loaded.error().message;
}

TEST_F(LiveLoadTest, TellsStepsGroupsAndTheEnginesState) {
  const std::vector<json> tensors = TensorsOf(Own("fp16_zero2_w2"));
  Rank rank = Sharded(tensors, 0, 1);
  const Result<Loaded> loaded = LoadInto(From(Own("fp16_zero2_w2")), &rank);
  ASSERT_TRUE(loaded.has_value()) << loaded.error().message;
  const json told = LoadResultJson(*loaded);
  EXPECT_EQ(told["step"], 4);
  EXPECT_EQ(told["groups"].size(), 2U);
  EXPECT_FALSE(told["steps"].empty());
  std::map<std::string, json> engine;
  for (const json& entry : told["engine"]["dict"]) engine[entry[0]] = entry[1];
  EXPECT_EQ(engine["global_steps"], 4);
  EXPECT_EQ(engine["note"], "kept by whoever converts");
  EXPECT_TRUE(engine["lr_scheduler"].contains("dict"));
  EXPECT_FALSE(engine.contains("module"));
  std::map<std::string, json> scaler;
  for (const json& entry : told["scaler"]["dict"]) scaler[entry[0]] = entry[1];
  EXPECT_TRUE(scaler["loss_scaler"].contains("object")) << told["scaler"];
}

TEST(PlainJsonTest, TakesWhatIsPlainAndNamesTheRest) {
  pickle::Arena arena;
  pickle::Node* dict = arena.Dict();
  pickle::Set(arena, dict, "betas", arena.Tuple({arena.Float(0.5), arena.Int(2)}));
  pickle::Set(arena, dict, "most", arena.Float(std::numeric_limits<double>::infinity()));
  pickle::Set(arena, dict, "code", arena.Global("os.system"));
  pickle::Set(arena, dict, "list", arena.List({arena.None(), arena.Global("os.system")}));
  std::vector<std::string> left;
  const json made = PlainJson(dict, "", &left);
  EXPECT_EQ(made.dump(), R"({"dict":[["betas",{"tuple":[0.5,2]}],["most",{"float":"inf"}]]})");
  EXPECT_EQ(left, (std::vector<std::string>{"code", "list[1]", "list"}));
}

}  // namespace
}  // namespace shardwright::trainer
