// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/registry.h"

#include <gtest/gtest.h>

#include <memory>
#include <random>

#include "checkpoints/deepspeed/common/file_name.h"
#include "checkpoints/deepspeed/native/deepspeed.h"
#include "fixtures.h"
#include "tiny_checkpoint.h"
#include "unit/support/os/scratch.h"

namespace shardwright::checkpoints {
namespace {

TEST(FileNames, AreTheOnesThatDeepSpeedWrites) {
  const auto model = ParseFileName("mp_rank_123_model_states.pt");
  ASSERT_TRUE(model);
  EXPECT_EQ(model->role, FileRole::kModel);
  EXPECT_EQ(model->mp, 123U);

  const auto shard = ParseFileName("bf16_zero_pp_rank_7_mp_rank_01_optim_states.pt");
  ASSERT_TRUE(shard);
  EXPECT_EQ(shard->role, FileRole::kShard);
  EXPECT_EQ(shard->rank, 7U);
  EXPECT_EQ(shard->mp, 1U);
  EXPECT_EQ(shard->prefix, "bf16_");

  const auto old = ParseFileName("zero_pp_rank_7_mp_rank_01optim_states.pt");
  ASSERT_TRUE(old);
  EXPECT_TRUE(old->old_style);

  const auto zero3 = ParseFileName("zero_pp_rank_10_mp_rank_00_model_states.pt");
  ASSERT_TRUE(zero3);
  EXPECT_EQ(zero3->role, FileRole::kModelZero3);

  const auto layer = ParseFileName("layer_07-model_01-model_states.pt");
  ASSERT_TRUE(layer);
  EXPECT_EQ(layer->role, FileRole::kLayer);
  EXPECT_EQ(layer->layer, 7U);
  EXPECT_EQ(layer->axes, "model_01");
  EXPECT_EQ(ParseFileName("layer_07-model_states.pt")->axes, "");

  const auto expert = ParseFileName("layer_3_expert_12_mp_rank_00_model_states.pt");
  ASSERT_TRUE(expert);
  EXPECT_EQ(expert->role, FileRole::kExpert);
  EXPECT_EQ(expert->layer, 3U);
  EXPECT_EQ(expert->expert, 12U);
  EXPECT_TRUE(ParseFileName("expert_12_mp_rank_00_model_states.pt")->old_style);
  EXPECT_EQ(ParseFileName("expp_rank_1_mp_rank_00_optim_states.pt")->role, FileRole::kExpertOptim);
}

TEST(FileNames, OthersAreNotTaken) {
  for (const char* name :
       {"mp_rank_0_model_states.pt", "mp_rank_00_model_states.pt.bak", "mp_rank_00_optim_states.pt",
        "xmp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_model_states.pt",
        "fp8_zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero_pp_rank__mp_rank_00_optim_states.pt",
        "layer_00-model_01-optim_states.pt", "layer_00--model_states.pt", "layer_1-model_states.pt",
        "zero_pp_rank_99999999999999999999_mp_rank_00_optim_states.pt", "latest", ""}) {
    EXPECT_FALSE(ParseFileName(name)) << name;
  }
}

TEST(FileNames, NumbersSortByValue) {
  EXPECT_TRUE(NaturalLess("rank_2_", "rank_10_"));
  EXPECT_FALSE(NaturalLess("rank_10_", "rank_2_"));
  EXPECT_TRUE(NaturalLess("mp_rank_99_", "mp_rank_100_"));
  EXPECT_TRUE(NaturalLess("a", "ab"));
  EXPECT_TRUE(NaturalLess("a01", "a1") != NaturalLess("a1", "a01"));
  EXPECT_FALSE(NaturalLess("a1", "a1"));
}

class Sources : public os::Scratch {
 protected:
  void SetUp() override {
    Scratch::SetUp();
    save_ = At("save");
    fs::create_directories(save_);
  }

  static void ExpectRefused(const std::vector<std::string>& roots, Errc code,
                            const std::string& word) {
    const auto source = ScanSource(roots);
    ASSERT_FALSE(source);
    EXPECT_EQ(source.error().code, code) << source.error().message;
    EXPECT_NE(source.error().message.find(word), std::string::npos) << source.error().message;
  }

  fs::path save_;
};

TEST_F(Sources, SaveFolderAndTagFolderAreTheSame) {
  TinyZero().Write(save_ / "a");
  const auto by_save = ScanSource({(save_ / "a").string()});
  const auto by_tag = ScanSource({(save_ / "a" / "global_step4" / "").string()});
  ASSERT_TRUE(by_save) << by_save.error().message;
  ASSERT_TRUE(by_tag) << by_tag.error().message;
  EXPECT_EQ(by_save->tag, "global_step4");
  EXPECT_EQ(by_tag->tag, "global_step4");
  EXPECT_EQ(by_save->files.size(), 3U);
  EXPECT_EQ(by_tag->files.size(), 3U);
  EXPECT_EQ(by_save->files[0].name, "mp_rank_00_model_states.pt");
}

TEST_F(Sources, PartsOnSeveralNodesAreUnited) {
  TinyZero().Write(save_ / "all");
  const fs::path all = save_ / "all" / "global_step4";
  for (const int node : {0, 1}) {
    const fs::path part = save_ / ("node" + std::to_string(node)) / "global_step4";
    fs::create_directories(part);
    const std::string shard =
        "zero_pp_rank_" + std::to_string(node) + "_mp_rank_00_optim_states.pt";
    fs::copy(all / shard, part / shard);
    fs::copy(all / "mp_rank_00_model_states.pt", part / "mp_rank_00_model_states.pt");
  }
  std::ofstream(save_ / "node0" / "latest") << "global_step4";
  const std::vector<std::string> roots{(save_ / "node0").string(), (save_ / "node1").string()};
  const auto source = ScanSource(roots);
  ASSERT_TRUE(source) << source.error().message;
  EXPECT_EQ(source->files.size(), 3U);
  Patterns patterns;
  EXPECT_TRUE(ReadDeepSpeed(*source, patterns));

  TinyZero other;
  other.steps = 9;
  other.WriteModel(save_ / "node1" / "global_step4");
  ExpectRefused(roots, Errc::kBadInput, "mp_rank_00_model_states.pt");
}

TEST_F(Sources, PartsThatRanksSeeAreUnited) {
  TinyZero().Write(save_);
  const fs::path tag = save_ / "global_step4";
  const fs::path other = save_ / "other" / "global_step4";
  fs::create_directories(other);
  const char* shard = "zero_pp_rank_1_mp_rank_00_optim_states.pt";
  fs::rename(tag / shard, other / shard);
  const auto scan = [&](const fs::path& root) {
    auto part = ScanPart({root.string()}, "global_step4");
    EXPECT_TRUE(part) << part.error().message;
    return *std::move(part);
  };
  const SourceSet nothing = scan(save_ / "absent");
  EXPECT_TRUE(nothing.files.empty());
  EXPECT_FALSE(ScanPart({(save_ / "latest").string()}, "global_step4"));
  std::vector<int> owner;
  const auto all = UniteParts({nothing, scan(save_), scan(other)}, &owner);
  ASSERT_TRUE(all) << all.error().message;
  EXPECT_EQ(all->tag, "global_step4");
  EXPECT_EQ(owner, (std::vector<int>{1, 1, 2}));
  EXPECT_EQ(all->files[2].name, shard);

  const auto refused = UniteParts({nothing, nothing}, &owner);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Errc::kNotFound);
}

// A node that keeps a shard of an earlier run under the same tag must not contribute it. Every node
// writes model states, which may differ in everything except the weights.
TEST_F(Sources, TwoVersionsOfAShardAreRefusedAndOfModelStatesTold) {
  TinyZero().Write(save_ / "a");
  TinyZero again;
  again.steps = 9;
  again.Write(save_ / "b");
  auto a = ScanPart({(save_ / "a").string()}, "global_step4");
  auto b = ScanPart({(save_ / "b").string()}, "global_step4");
  ASSERT_TRUE(a && b);
  std::vector<int> owner;
  const auto same = UniteParts({*a, *a}, &owner);
  ASSERT_TRUE(same);
  EXPECT_TRUE(same->warnings.empty());
  const auto refused = UniteParts({*a, *b}, &owner);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Errc::kBadInput);
  EXPECT_NE(refused.error().message.find("optim_states.pt on rank 0 ("), std::string::npos);
  b->files.resize(1);
  ASSERT_EQ(b->files[0].name, "mp_rank_00_model_states.pt");
  const auto told = UniteParts({*a, *b}, &owner);
  ASSERT_TRUE(told);
  ASSERT_EQ(told->warnings.size(), 1U);
  EXPECT_NE(told->warnings[0].find("mp_rank_00_model_states.pt"), std::string::npos);
}

TEST_F(Sources, WithoutAPointerTheOnlyCheckpointIsTaken) {
  TinyZero().Write(save_);
  fs::remove(save_ / "latest");
  ASSERT_TRUE(ScanSource({save_.string()}));
  fs::copy(save_ / "global_step4", save_ / "global_step5");
  fs::copy(save_ / "global_step4", save_ / "global_step10");
  ExpectRefused({save_.string()}, Errc::kNotFound,
                "no \"latest\" here, but global_step10, global_step5 and global_step4 are "
                "checkpoints: name one of them");
  for (int step = 11; step < 20; ++step) {
    fs::copy(save_ / "global_step4", save_ / ("global_step" + std::to_string(step)));
  }
  ExpectRefused({save_.string()}, Errc::kNotFound, "global_step19, global_step18, ");
  ExpectRefused({save_.string()}, Errc::kNotFound, "global_step15 and 7 older ones are");
}

// The Trainer makes a save folder for every step and writes no pointer above them.
TEST_F(Sources, SaveFoldersBelowAreNamedNewestFirst) {
  TinyZero().Write(save_ / "checkpoint-10");
  fs::create_directories(save_ / "runs");
  ExpectRefused({save_.string()}, Errc::kNotFound,
                "no \"latest\" here, but checkpoint-10 is a checkpoint: name it");
  TinyZero().Write(save_ / "checkpoint-9");
  TinyZero().Write(save_ / "checkpoint-14");
  fs::remove(save_ / "checkpoint-14" / "latest");
  ExpectRefused({save_.string()}, Errc::kNotFound,
                "no \"latest\" here, but checkpoint-14, checkpoint-10 and checkpoint-9 are "
                "checkpoints: name one of them");
}

// verl's pointer file has the name of Megatron's, but its folders are named differently.
TEST_F(Sources, APointerToNowhereNamesTheCheckpointsBesideIt) {
  std::ofstream(save_ / "latest_checkpointed_iteration.txt") << "4";
  const std::string named = save_.string() + "/latest_checkpointed_iteration.txt names it";
  ExpectRefused({save_.string()}, Errc::kNotFound,
                "iter_0000004: no such folder, although " + named);
  TinyZero().Write(save_ / "global_step_4");
  fs::rename(save_ / "global_step_4" / "global_step4", save_ / "global_step_4" / "actor");
  fs::remove(save_ / "global_step_4" / "latest");
  ExpectRefused({save_.string()}, Errc::kNotFound,
                named + ", but global_step_4 is a checkpoint: name it");
}

TEST_F(Sources, FoldersThatOnlyNameAtomsAreNamed) {
  fs::create_directories(save_ / "atoms");
  std::ofstream(save_ / "atoms" / "latest_universal") << "step4_universal";
  ExpectRefused({save_.string()}, Errc::kNotFound, "atoms is a checkpoint: name it");
}

TEST_F(Sources, FilesInPlaceOfFoldersAreSaid) {
  TinyZero().Write(save_);
  const auto latest = (save_ / "latest").string();
  ExpectRefused({latest}, Errc::kNotFound, latest + ": a file, where a folder is expected");
}

TEST_F(Sources, BadPointersAreRefused) {
  TinyZero().Write(save_);
  std::ofstream(save_ / "latest") << " \n";
  ExpectRefused({save_.string()}, Errc::kNotFound, "tag is empty");
  std::ofstream(save_ / "latest") << "../elsewhere";
  ExpectRefused({save_.string()}, Errc::kBadInput, "latest");
  std::ofstream(save_ / "latest") << "global_step7";
  ExpectRefused({save_.string()}, Errc::kNotFound, "global_step7");
}

TEST_F(Sources, EmptyAndAbsentFoldersAreSaid) {
  ExpectRefused({save_.string()}, Errc::kNotFound, "no checkpoint here");
  ExpectRefused({(save_ / "none").string()}, Errc::kNotFound, "no such folder");
  ExpectRefused({}, Errc::kUsage, "no source");
  fs::create_directories(save_ / "global_step1");
  std::ofstream(save_ / "latest") << "global_step1";
  ExpectRefused({save_.string()}, Errc::kNotFound, "no files");
}

TEST_F(Sources, OtherFilesAreLeftAloneAndNamed) {
  TinyZero().Write(save_);
  std::ofstream(save_ / "global_step4" / "notes.txt") << "mine";
  std::ofstream(save_ / "global_step4" / "zero_to_fp32.py") << "script";
  const auto source = ScanSource({save_.string()});
  ASSERT_TRUE(source);
  EXPECT_EQ(source->files.size(), 3U);
  ASSERT_EQ(source->warnings.size(), 1U);
  EXPECT_NE(source->warnings[0].find("notes.txt"), std::string::npos);
  EXPECT_EQ(source->warnings[0].find("zero_to_fp32.py"), std::string::npos);
}

TEST_F(Sources, SmallPayloadsAreInlined) {
  TinyZero().Write(save_);
  const auto source = ScanSource({save_.string()});
  ASSERT_TRUE(source);
  std::size_t steps = 0;
  for (const SourceFile& file : source->files) {
    for (const auto& [storage, bytes] : file.containers.front().inlined) {
      ASSERT_EQ(bytes.size(), file.containers.front().metadata->storages[storage].bytes);
      float value = 0;
      if (bytes.size() == sizeof(value)) std::memcpy(&value, bytes.data(), sizeof(value));
      steps += value == 4.0F ? 1 : 0;
    }
  }
  EXPECT_EQ(steps, 4U);  // two groups on two ranks
}

TEST(Siblings, LargeOnesOfRanksThatCannotBeComparedAreTold) {
  const auto warnings = [](const SiblingFile& a, const SiblingFile& b) {
    std::vector<SourceSet> parts(2);
    for (SourceSet& part : parts) {
      part.tag = "t";
      part.format = "deepspeed";
      part.files.resize(1);
      part.files[0].name = "mp_rank_00_model_states.pt";
    }
    parts[0].siblings = {a};
    parts[1].siblings = {b};
    std::vector<int> owner;
    const auto all = UniteParts(std::move(parts), &owner);
    EXPECT_TRUE(all);
    EXPECT_EQ(all->siblings.size(), 1U);
    return all->warnings;
  };
  const SiblingFile large{"/0/big", "big", {1 << 20, 5, 7}, false, std::nullopt};
  SiblingFile other = large;
  EXPECT_TRUE(warnings(large, other).empty());
  other.identity.inode = 8;
  EXPECT_NE(warnings(large, other).at(0).find("could not be compared"), std::string::npos);
  other.identity.bytes = 1 << 21;
  EXPECT_NE(warnings(large, other).at(0).find("differs"), std::string::npos);
  const SiblingFile small{"/0/small", "small", {1, 5, 7}, false, "a"};
  other = small;
  other.identity.inode = 8;
  EXPECT_TRUE(warnings(small, other).empty());
}

TEST(Siblings, SomeAreOfOneRank) {
  EXPECT_EQ(RankOfSibling("rng_state_12.pth"), 12U);
  EXPECT_EQ(RankOfSibling("random_states_0.pkl"), 0U);
  for (const char* name :
       {"rng_state.pth", "rng_state_.pth", "rng_state_1.pt", "rng_state_1x.pth", "rng_state_-1.pth",
        "rng_state_99999999999999999999.pth", "_1.pth", ""}) {
    EXPECT_FALSE(RankOfSibling(name)) << name;
  }
}
}  // namespace
}  // namespace shardwright::checkpoints
