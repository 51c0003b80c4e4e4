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

SourceSet MadeUp() {
  std::mt19937 random(7);
  SourceSet out;
  out.format = "universal";
  out.tag = "global_step12";
  out.manifest = std::string("{}\0x", 4);
  out.warnings = {"one", ""};
  for (int i = 0; i < 20; ++i) {
    SourceFile file;
    file.name = "zero/p" + std::to_string(i) + "/fp32.pt";
    file.path = "/somewhere/" + file.name;
    file.identity = {random(), -static_cast<std::int64_t>(random()), random()};
    Container& container = file.containers.emplace_back();
    files::ContainerMetadata metadata;
    metadata.last = 1 << 20;
    for (std::uint32_t s = 0; s < random() % 6; ++s) {
      files::Storage storage;
      storage.key = s % 2 == 0 ? std::to_string(s) : "key" + std::to_string(random());
      storage.offset = random() % (1 << 19);
      storage.bytes = s == 0 ? 4 : random() % (1 << 19);
      if (s % 3 != 0) storage.crc32 = static_cast<std::uint32_t>(random());
      metadata.storages.push_back(storage);
      if (s == 0) container.inlined[0] = "abcd";
    }
    metadata.header.resize(random() % 300000, static_cast<char>(random()));
    for (char& c : metadata.header) c = static_cast<char>(random() % 3);
    container.metadata = std::make_shared<const files::ContainerMetadata>(std::move(metadata));
    out.files.push_back(std::move(file));
  }
  return out;
}

TEST(Catalogues, HoldContainersOfAnyKind) {
  SourceSet source = MadeUp();
  SourceFile& file = source.files.front();
  files::ContainerMetadata metadata;
  metadata.head = files::Head::kJson;
  metadata.header = "{}";
  metadata.first = 1 << 20;
  metadata.last = 1 << 21;
  metadata.storages = {{"a.weight", (1 << 20) + 8, 64, std::nullopt}};
  const Container json{
      std::make_shared<const files::ContainerMetadata>(std::move(metadata)), {}, {}};
  file.containers.push_back(json);
  const std::string bytes = Serialize(source);
  EXPECT_EQ(bytes.substr(0, 12), std::string("SWsource\0\0\0\4", 12));
  const auto again = DeserializeSource(bytes);
  ASSERT_TRUE(again) << again.error().message;
  EXPECT_EQ(Serialize(*again), bytes);
  ASSERT_EQ(again->files.front().containers.size(), 2U);
  const files::ContainerMetadata& back = *again->files.front().containers[1].metadata;
  EXPECT_EQ(back.head, files::Head::kJson);
  EXPECT_EQ(back.header, "{}");
  EXPECT_EQ(back.first, 1U << 20);
  EXPECT_EQ(back.storages.at(0).key, "a.weight");
  EXPECT_FALSE(back.storages.at(0).crc32.has_value());
  EXPECT_EQ(again->format, "universal");
  source.format = "none such";
  EXPECT_FALSE(DeserializeSource(Serialize(source)));
}

TEST(Catalogues, OfFilesWithoutContainersAreRefused) {
  SourceSet source = MadeUp();
  ASSERT_TRUE(DeserializeSource(Serialize(source)));
  source.files.back().containers.clear();
  const auto set = DeserializeSource(Serialize(source));
  ASSERT_FALSE(set);
  EXPECT_EQ(set.error().code, Errc::kBadInput);
  EXPECT_NE(set.error().message.find(source.files.back().name), std::string::npos);
}

TEST(Catalogues, GiveBackWhatTheyWereGiven) {
  const SourceSet source = MadeUp();
  const std::string bytes = Serialize(source);
  EXPECT_EQ(Serialize(source), bytes);
  const auto again = DeserializeSource(bytes);
  ASSERT_TRUE(again) << again.error().message;
  EXPECT_EQ(again->format, source.format);
  EXPECT_EQ(again->tag, source.tag);
  EXPECT_EQ(again->manifest, source.manifest);
  EXPECT_EQ(again->warnings, source.warnings);
  ASSERT_EQ(again->files.size(), source.files.size());
  for (std::size_t i = 0; i < source.files.size(); ++i) {
    const SourceFile& was = source.files[i];
    const SourceFile& is = again->files[i];
    EXPECT_EQ(was.name, is.name);
    EXPECT_EQ(was.path, is.path);
    EXPECT_EQ(was.identity, is.identity);
    ASSERT_EQ(is.containers.size(), 1U);
    const Container& a = was.containers.front();
    const Container& b = is.containers.front();
    EXPECT_EQ(a.inlined, b.inlined);
    EXPECT_TRUE(*a.metadata == *b.metadata);
  }
}

// The files of ranks differ only in their payloads.
TEST(Catalogues, HoldASkeletonOnce) {
  SourceSet source = MadeUp();
  source.files.resize(2);
  const std::size_t two = Serialize(source).size();
  for (int rank = 0; rank < 100; ++rank) {
    SourceFile file = source.files.back();
    file.containers[0].metadata = std::make_shared<const files::ContainerMetadata>(
        *file.containers[0].metadata);  // equal, not the same
    source.files.push_back(std::move(file));
  }
  const std::string bytes = Serialize(source);
  EXPECT_LT(bytes.size(), two + std::size_t{100} * 100);
  const auto again = DeserializeSource(bytes);
  ASSERT_TRUE(again) << again.error().message;
  EXPECT_EQ(Serialize(*again), bytes);
  const auto metadata = [&](std::size_t file) { return again->files[file].containers[0].metadata; };
  EXPECT_NE(metadata(0), metadata(1));
  for (std::size_t file = 2; file < again->files.size(); ++file)
    EXPECT_EQ(metadata(file), metadata(1));
}

// tests/data/catalogues: as earlier versions wrote them.
TEST(Catalogues, OfEarlierFormsAreRead) {
  for (int form = 1; form <= 3; ++form) {
    const std::string path =
        std::string(SW_SOURCE_DIR) + "/tests/data/catalogues/form" + std::to_string(form) + ".swc";
    const auto bytes = os::ReadWholeText(path, 1 << 20);
    ASSERT_TRUE(bytes) << bytes.error().message;
    const auto set = DeserializeSource(*bytes);
    ASSERT_TRUE(set) << path << ": " << set.error().message;
    EXPECT_EQ(set->format, form == 3 ? "safetensors" : "deepspeed");
    EXPECT_EQ(set->files.size(), form == 3 ? 1U : 3U);
    EXPECT_EQ(set->siblings.size(), form == 1 ? 0U : 1U);
    const auto read = ReadCheckpoint(*set, Patterns());
    ASSERT_TRUE(read) << path << ": " << read.error().message;
    EXPECT_FALSE(read->params.empty());
    const auto again = DeserializeSource(Serialize(*set));
    ASSERT_TRUE(again);
    for (std::size_t i = 0; i < set->files.size(); ++i) {
      EXPECT_EQ(*again->files[i].containers[0].metadata, *set->files[i].containers[0].metadata);
    }
  }
}

TEST(Catalogues, HoldSiblings) {
  SourceSet source = MadeUp();
  source.files.resize(1);
  const std::string without = Serialize(source);
  source.siblings = {{"/somewhere/a", "a", {3, -5, 7}, true, "abc"},
                     {"/somewhere/b", "b", {1ULL << 40, 5, 8}, false, std::nullopt}};
  source.left_out = {{"runs", "a folder"}};
  const std::string bytes = Serialize(source);
  const auto again = DeserializeSource(bytes);
  ASSERT_TRUE(again) << again.error().message;
  EXPECT_EQ(Serialize(*again), bytes);
  ASSERT_EQ(again->siblings.size(), 2U);
  EXPECT_EQ(again->siblings[0].content, "abc");
  EXPECT_TRUE(again->siblings[0].executable);
  EXPECT_EQ(again->siblings[1].identity.bytes, 1ULL << 40);
  EXPECT_FALSE(again->siblings[1].content);
  EXPECT_EQ(again->left_out.at(0).why, "a folder");
  EXPECT_TRUE(DeserializeSource(without)->siblings.empty());

  for (const char* name : {"../a", "", ".", "a/b", "latest", "latest_universal", "shardwright.json",
                           ".journal", "x.lock"}) {
    source.siblings[0].name = name;
    EXPECT_FALSE(DeserializeSource(Serialize(source))) << name;
  }
  source.siblings[0].name = "a";
  source.siblings[0].content = "longer";
  EXPECT_FALSE(DeserializeSource(Serialize(source)));
}

TEST(Catalogues, ATagIsTheNameOfAFolder) {
  SourceSet source = MadeUp();
  source.files.resize(1);
  for (const char* tag : {"..", ".", "a/b", "../../../evil", "/evil", "a/"}) {
    source.tag = tag;
    EXPECT_FALSE(DeserializeSource(Serialize(source))) << tag;
  }
  source.tag.clear();
  EXPECT_TRUE(DeserializeSource(Serialize(source)));
}

TEST(Catalogues, DamageIsFound) {
  SourceSet source = MadeUp();
  source.files.resize(2);
  source.siblings = {{"/somewhere/a", "a", {3, -5, 7}, true, "abc"}};
  const std::string bytes = Serialize(source);
  for (std::size_t n = 0; n < bytes.size(); n += n < 64 ? 1 : 997) {
    EXPECT_FALSE(DeserializeSource(std::string_view(bytes).substr(0, n))) << n;
  }
  for (std::size_t n = 0; n < bytes.size(); n += n < 64 ? 1 : 997) {
    std::string flipped = bytes;
    flipped[n] = static_cast<char>(flipped[n] ^ 0x10);
    EXPECT_FALSE(DeserializeSource(flipped)) << n;
  }
  EXPECT_FALSE(DeserializeSource(bytes + "x"));
  EXPECT_FALSE(DeserializeSource(""));
}

// Any bit of any of them, also of those that earlier versions wrote.
TEST(Catalogues, NoBitOfThemIsTakenForAnother) {
  std::vector<std::string> catalogues;
  for (const char* form : {"form1.swc", "form2.swc", "form3.swc"}) {
    const auto bytes =
        os::ReadWholeText(std::string(SW_SOURCE_DIR) + "/tests/data/catalogues/" + form, 1 << 20);
    ASSERT_TRUE(bytes) << bytes.error().message;
    const auto set = DeserializeSource(*bytes);
    ASSERT_TRUE(set) << set.error().message;
    catalogues.push_back(*bytes);
    catalogues.push_back(Serialize(*set));
  }
  for (std::string& bytes : catalogues) {
    for (std::size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
      char& byte = bytes[bit / 8];
      const char sound = byte;
      byte = static_cast<char>(byte ^ 1 << bit % 8);
      EXPECT_FALSE(DeserializeSource(bytes)) << bit << " of " << 8 * bytes.size();
      byte = sound;
    }
  }
}

}  // namespace
}  // namespace shardwright::checkpoints
