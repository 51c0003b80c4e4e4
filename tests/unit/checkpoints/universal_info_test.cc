// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/deepspeed/common/universal_info.h"

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <map>
#include <random>
#include <string>

#include "files/torch_pt/reader.h"
#include "fixtures.h"

namespace shardwright::checkpoints {
namespace {

using layout::Split;
using pickle::Arena;
using pickle::Node;

class Info : public testing::Test {
 protected:
  Info() : info_(arena_.Dict()) { Version(0.4); }

  void Version(double version) {
    Set(arena_, info_, "universal_checkpoint_version", arena_.Float(version));
  }
  const Node* Strings(const std::vector<std::string>& texts) {
    std::vector<const Node*> items;
    items.reserve(texts.size());
    for (const std::string& text : texts) items.push_back(arena_.String(text));
    return arena_.List(std::move(items));
  }
  const Node* Ints(const std::vector<std::int64_t>& values) {
    std::vector<const Node*> items;
    items.reserve(values.size());
    for (std::int64_t value : values) items.push_back(arena_.Int(value));
    return arena_.List(std::move(items));
  }
  void List(const std::string& key, const std::vector<std::string>& texts) {
    Set(arena_, info_, key, Strings(texts));
  }
  void Sub(const std::string& pattern, const Node* shape, std::int64_t dim) {
    Node* entry = arena_.Dict();
    Set(arena_, entry, "patterns", Strings({pattern}));
    Set(arena_, entry, "shape", shape);
    Set(arena_, entry, "partition_dim", arena_.Int(dim));
    Set(arena_, info_, "parameter_with_sub_params", arena_.List({entry}));
  }
  Result<std::optional<Ruled>> RuleFor(const std::string& name, const std::vector<Shape>& shards) {
    SW_TRY_ASSIGN(const UniversalInfo parsed, UniversalInfo::Parse(info_));
    return parsed.RuleFor(name, shards);
  }
  Ruled Rule(const std::string& name, const std::vector<Shape>& shards) {
    auto ruled = RuleFor(name, shards);
    EXPECT_TRUE(ruled.has_value()) << (ruled ? "" : ruled.error().message);
    return ruled && *ruled ? **ruled : Ruled{};
  }

  Arena arena_;
  Node* info_;
};

TEST_F(Info, NothingIsKnownWithoutIt) {
  EXPECT_FALSE(UniversalInfo::Parse(nullptr)->says_anything());
  EXPECT_FALSE(UniversalInfo::Parse(arena_.None())->says_anything());
  EXPECT_FALSE(UniversalInfo::Parse(info_)->says_anything());
  EXPECT_FALSE(RuleFor("a", {{2}, {2}})->has_value());
}

TEST_F(Info, MegatronListsAreMatchedAtTheStart) {
  Version(0.2);
  List("parameter_with_row_parallelism_patterns", {R"(\d+.mlp.dense_4h_to_h.weight)"});
  List("tp_replicated_parameter_patterns", {R"(\d+.input_layernorm.weight)"});
  EXPECT_EQ(Rule("3.mlp.dense_4h_to_h.weight", {{4, 3}, {4, 3}}).whole, (Shape{4, 6}));
  EXPECT_EQ(Rule("3.mlp.dense_4h_to_h.weight_more", {{4, 3}, {4, 3}}).rule.dim, 1U);
  EXPECT_EQ(Rule("3.input_layernorm.weight", {{4}, {4}}).rule.split, Split::kReplicated);
  // A name that no pattern matches from its start is cut along dimension 0.
  EXPECT_EQ(Rule("layers.3.mlp.dense_4h_to_h.weight", {{4, 3}, {4, 3}}).whole, (Shape{8, 3}));
  // With one rank there is no default.
  EXPECT_FALSE(RuleFor("3.mlp.dense_h_to_4h.weight", {{4, 3}})->has_value());
  EXPECT_EQ(Rule("3.mlp.dense_4h_to_h.weight", {{4, 3}}).rule.dim, 1U);
}

TEST_F(Info, PrecedenceIsReplicatedAverageHalvesSubRow) {
  List("parameter_with_row_parallelism_patterns", {"a"});
  EXPECT_EQ(Rule("a", {{4, 4}, {4, 4}}).rule.split, Split::kDim);
  List("parameter_with_2_sub_params_cat_dim_0", {"a"});
  EXPECT_EQ(Rule("a", {{4, 4}, {4, 4}}).rule.split, Split::kSub);
  List("parameter_to_average_patterns", {"a"});
  EXPECT_EQ(Rule("a", {{4, 4}, {4, 4}}).rule.split, Split::kAverage);
  List("tp_replicated_parameter_patterns", {"a"});
  EXPECT_EQ(Rule("a", {{4, 4}, {4, 4}}).rule.split, Split::kReplicated);
}

TEST_F(Info, HalvesOfEveryShard) {
  List("parameter_with_2_sub_params_cat_dim_0", {"w"});
  const Ruled ruled = Rule("w", {{4, 1}, {4, 1}});
  EXPECT_EQ(ruled.whole, (Shape{8, 1}));
  EXPECT_EQ(ruled.rule.sub_sizes, (std::vector<std::uint64_t>{4, 4}));
  const layout::Cut cut = layout::MakeCut(ruled.rule, ruled.whole, 2, 1).value();
  ASSERT_EQ(cut.boxes().size(), 2U);
  EXPECT_EQ(cut.boxes()[0].at_view, (Shape{2, 0}));
  EXPECT_EQ(cut.boxes()[1].at_view, (Shape{6, 0}));
}

TEST_F(Info, SubParametersWithWidths) {
  // The fused gate and up weight of deepspeed.md: [12, 4] over two ranks.
  Sub("w", arena_.List({arena_.Tuple({arena_.Int(6), arena_.Int(6)}), arena_.Int(-1)}), 0);
  EXPECT_EQ(RuleFor("w", {{6, 4}, {6, 4}}).error().code, Errc::kBadInput);
  Node* widths = arena_.Dict();
  Set(arena_, widths, "w", arena_.List({Ints({3, 3}), Ints({3, 3})}));
  Set(arena_, info_, "sub_param_shard_widths", widths);
  const Ruled ruled = Rule("w", {{6, 4}, {6, 4}});
  EXPECT_EQ(ruled.whole, (Shape{12, 4}));
  EXPECT_EQ(ruled.rule.split, Split::kSub);
  EXPECT_TRUE(ruled.rule.view.empty());
  EXPECT_EQ(RuleFor("w", {{4, 4}, {4, 4}, {4, 4}}).error().code, Errc::kBadInput);
  EXPECT_EQ(RuleFor("w", {{6, 4}, {6, 5}}).error().code, Errc::kBadInput);
  // One rank may own nothing.
  Set(arena_, widths, "w", arena_.List({Ints({6, 0}), Ints({3, 3})}));
  EXPECT_EQ(Rule("w", {{9, 4}, {3, 4}}).whole, (Shape{12, 4}));
  // One sub-tensor is a plain cut.
  Sub("w", arena_.List({arena_.Tuple({arena_.Int(12)}), arena_.Int(4)}), 0);
  Set(arena_, widths, "w", arena_.List({Ints({8, 4})}));
  EXPECT_EQ(Rule("w", {{8, 4}, {4, 4}}).rule.split, Split::kDim);
}

TEST_F(Info, SubParametersBeforeVersion04AreCounted) {
  Version(0.3);
  Sub("w", Ints({3, -1}), 0);
  const Ruled ruled = Rule("w", {{6, 2}, {6, 2}});
  EXPECT_EQ(ruled.rule.sub_sizes, (std::vector<std::uint64_t>{4, 4, 4}));
  EXPECT_EQ(ruled.whole, (Shape{12, 2}));
  EXPECT_EQ(RuleFor("w", {{5, 2}, {5, 2}}).error().code, Errc::kBadInput);
  EXPECT_EQ(RuleFor("w", {{3, 2}, {6, 2}}).error().code, Errc::kUnsupported);
}

TEST_F(Info, VocabularyPaddingIsCutOff) {
  Version(0.2);
  List("vocabulary_parameter_patterns", {"emb.weight"});
  EXPECT_EQ(RuleFor("emb.weight", {{128, 2}, {128, 2}}).error().code, Errc::kBadInput);
  Set(arena_, info_, "original_vocab_size", arena_.Int(200));
  const Ruled ruled = Rule("emb.weight", {{128, 2}, {128, 2}});
  EXPECT_EQ(ruled.whole, (Shape{200, 2}));
  EXPECT_TRUE(ruled.rule.padded);
  EXPECT_EQ(ruled.rule.granule, (std::vector<std::uint64_t>{128}));
  EXPECT_EQ(layout::ShardShape(ruled.rule, ruled.whole, 2, 1).value(), (Shape{128, 2}));
  EXPECT_EQ(layout::ShardShape(ruled.rule, ruled.whole, 3, 2).value(), (Shape{128, 2}));
  EXPECT_EQ(layout::ShardShape(ruled.rule, ruled.whole, 1, 0).value(), (Shape{256, 2}));
  EXPECT_EQ(RuleFor("emb.weight", {{64, 2}, {64, 2}}).error().code, Errc::kBadInput);
}

TEST_F(Info, RefusesWhatItCannotKnow) {
  List("tp_replicated_parameter_patterns", {"a(?=b)"});
  auto parsed = UniversalInfo::Parse(info_);
  ASSERT_FALSE(parsed.has_value());
  EXPECT_EQ(parsed.error().code, Errc::kUnsupported);
  EXPECT_NE(parsed.error().message.find("a(?=b)"), std::string::npos);
  List("tp_replicated_parameter_patterns", {"a", "a.*"});
  auto twice = RuleFor("ab", {{1}, {1}});
  ASSERT_FALSE(twice.has_value());
  EXPECT_NE(twice.error().message.find("a.*"), std::string::npos);
  EXPECT_NE(twice.error().message.find("\"ab\""), std::string::npos);
  List("tp_replicated_parameter_patterns", {});
  Node* reasons = arena_.Dict();
  Set(arena_, reasons, "^q$", arena_.String("interleaved heads"));
  Set(arena_, info_, "autotp_unsupported_parameter_patterns", reasons);
  auto refused = RuleFor("q", {{1}, {1}});
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, Errc::kUnsupported);
  EXPECT_NE(refused.error().message.find("interleaved heads"), std::string::npos);
  Version(0.5);
  EXPECT_EQ(UniversalInfo::Parse(info_).error().code, Errc::kUnsupported);
  EXPECT_EQ(UniversalInfo::Parse(arena_.Int(3)).error().code, Errc::kBadInput);
  Version(0.4);
  List("tp_replicated_parameter_patterns", {"a"});
  EXPECT_EQ(RuleFor("a", {{1}, {2}}).error().code, Errc::kBadInput);
}

// --- affine maps ---------------------------------------------------------------------------------

struct Side {
  std::int64_t offset;
  std::vector<std::int64_t> strides;
};

class Affine : public Info {
 protected:
  const Node* Piece(const std::vector<std::int64_t>& shape, const Side& source, const Side& dest,
                    const std::vector<std::int64_t>& locations, double scale = 1.0) {
    Node* piece = arena_.Dict();
    Set(arena_, piece, "shape", Ints(shape));
    Set(arena_, piece, "source", arena_.List({arena_.Int(source.offset), Ints(source.strides)}));
    Set(arena_, piece, "dest", arena_.List({arena_.Int(dest.offset), Ints(dest.strides)}));
    Set(arena_, piece, "locations", Ints(locations));
    if (scale != 1.0) Set(arena_, piece, "scale", arena_.Float(scale));
    return piece;
  }
  void Map(const std::vector<std::int64_t>& whole, const std::vector<std::int64_t>& shard,
           const std::vector<std::vector<const Node*>>& pieces) {
    Node* ranks = arena_.Dict();
    for (std::size_t rank = 0; rank < pieces.size(); ++rank) {
      Node* entry = arena_.Dict();
      Set(arena_, entry, "shard_shape", Ints(shard));
      Set(arena_, entry, "pieces", arena_.List(pieces[rank]));
      ranks->items.push_back(arena_.Int(static_cast<std::int64_t>(rank)));
      ranks->items.push_back(entry);
    }
    Node* entry = arena_.Dict();
    Set(arena_, entry, "logical_shape", Ints(whole));
    Set(arena_, entry, "ranks", ranks);
    Node* params = arena_.Dict();
    Set(arena_, params, "^w$", entry);
    Node* map = arena_.Dict();
    Set(arena_, map, "version", arena_.Int(1));
    Set(arena_, map, "params", params);
    Set(arena_, info_, "affine_map", map);
  }
};

TEST_F(Affine, ListsBlocksThatNoRuleDescribes) {
  // Each rank holds rows in another order than the whole tensor's.
  Map({4, 1}, {2, 1},
      {{Piece({1, 1}, {3, {1, 1}}, {0, {1, 1}}, {0}), Piece({1, 1}, {0, {1, 1}}, {1, {1, 1}}, {0})},
       {Piece({2, 1}, {1, {1, 1}}, {0, {1, 1}}, {1})}});
  const Ruled ruled = Rule("w", {{2, 1}, {2, 1}});
  EXPECT_EQ(ruled.rule.split, Split::kListed);
  EXPECT_EQ(ruled.whole, (Shape{4, 1}));
  const layout::Cut cut = layout::MakeCut(ruled.rule, ruled.whole, 2, 0).value();
  ASSERT_EQ(cut.boxes().size(), 2U);
  EXPECT_EQ(cut.boxes()[0].at_view, (Shape{3, 0}));
  EXPECT_EQ(layout::MakeCut(ruled.rule, ruled.whole, 4, 0).error().code, Errc::kUnsupported);
}

// AutoTP stores the shards of a layer with a `shape` as matrices, and describes them in that shape.
TEST_F(Affine, OfAViewIsForTheParameterAsItIsStored) {
  const std::vector<std::int64_t> view{12, 2, 1};
  const auto half = [&](std::int64_t rank) {
    return Piece({3, 3, 2}, {6 * rank, view}, {0, {6, 2, 1}}, {rank});
  };
  Map({3, 6, 2}, {3, 3, 2}, {{half(0)}, {half(1)}});
  const Ruled ruled = Rule("w", {{9, 2}, {9, 2}});
  EXPECT_EQ(ruled.whole, (Shape{18, 2}));
  EXPECT_EQ(ruled.rule.split, Split::kSub);
  EXPECT_EQ(ruled.rule.view, (Shape{3, 6, 2}));
  EXPECT_EQ(layout::ShardShape(ruled.rule, ruled.whole, 3, 1).value(), (Shape{6, 2}));
  const layout::Cut cut = layout::MakeCut(ruled.rule, ruled.whole, 2, 1).value();
  ASSERT_EQ(cut.boxes().size(), 1U);
  EXPECT_EQ(cut.boxes()[0].at_view, (Shape{0, 3, 0}));
  EXPECT_EQ(RuleFor("w", {{6, 3}, {6, 3}}).error().code, Errc::kBadInput);
  EXPECT_EQ(RuleFor("w", {{9, 1}, {9, 1}}).error().code, Errc::kBadInput);
}

TEST_F(Affine, OfAViewOfCopiesIsOfCopies) {
  const auto all = [&] { return Piece({3, 4}, {0, {4, 1}}, {0, {4, 1}}, {0, 1}); };
  Map({3, 4}, {3, 4}, {{all()}, {all()}});
  const Ruled ruled = Rule("w", {{12}, {12}});
  EXPECT_EQ(ruled.whole, (Shape{12}));
  EXPECT_EQ(ruled.rule.split, Split::kReplicated);
}

TEST_F(Affine, BlocksOfAViewThatNoRuleDescribesAreRefused) {
  Map({2, 2, 1}, {1, 2, 1},
      {{Piece({1, 1, 1}, {3, {2, 1, 1}}, {0, {2, 1, 1}}, {0}),
        Piece({1, 1, 1}, {0, {2, 1, 1}}, {1, {2, 1, 1}}, {0})},
       {Piece({1, 1, 1}, {1, {2, 1, 1}}, {0, {2, 1, 1}}, {1}),
        Piece({1, 1, 1}, {2, {2, 1, 1}}, {1, {2, 1, 1}}, {1})}});
  EXPECT_EQ(RuleFor("w", {{2, 1}, {2, 1}}).error().code, Errc::kUnsupported);
}

TEST_F(Affine, RefusesScaledSharedAndForeignPieces) {
  Map({2}, {2},
      {{Piece({2}, {0, {1}}, {0, {1}}, {0, 1}, 0.5)},
       {Piece({2}, {0, {1}}, {0, {1}}, {0, 1}, 0.5)}});
  EXPECT_EQ(RuleFor("w", {{2}, {2}}).error().code, Errc::kUnsupported);
  Map({3}, {2},
      {{Piece({1}, {0, {1}}, {0, {1}}, {0}), Piece({1}, {2, {1}}, {1, {1}}, {0, 1})},
       {Piece({1}, {1, {1}}, {0, {1}}, {1}), Piece({1}, {2, {1}}, {1, {1}}, {0, 1})}});
  EXPECT_EQ(RuleFor("w", {{2}, {2}}).error().code, Errc::kUnsupported);
  Map({4}, {2}, {{Piece({2}, {0, {2}}, {0, {1}}, {0})}, {Piece({2}, {1, {2}}, {0, {1}}, {1})}});
  EXPECT_EQ(RuleFor("w", {{2}, {2}}).error().code, Errc::kUnsupported);
  Map({4}, {2}, {{Piece({2}, {0, {1}}, {0, {1}}, {0})}, {Piece({2}, {2, {1}}, {0, {1}}, {0})}});
  EXPECT_EQ(RuleFor("w", {{2}, {2}}).error().code, Errc::kBadInput);  // not at its own rank
  Map({4}, {2}, {{Piece({2}, {0, {1}}, {0, {1}}, {0})}, {Piece({2}, {9, {1}}, {0, {1}}, {1})}});
  EXPECT_EQ(RuleFor("w", {{2}, {2}}).error().code, Errc::kBadInput);  // outside
  EXPECT_EQ(RuleFor("w", {{2}, {3}}).error().code, Errc::kBadInput);  // another shard
  EXPECT_EQ(RuleFor("w", {{2}, {2}, {2}}).error().code, Errc::kBadInput);
}

TEST_F(Affine, OfRealAutoTpWinsOverTheLists) {
  const fs::path folder = OwnCheckpoints() / "autotp2_dp2_zero1" / "ckpt";
  const auto source = ScanSource({folder.string()});
  ASSERT_TRUE(source.has_value()) << source.error().message;
  const auto file =
      std::find_if(source->files.begin(), source->files.end(),
                   [](const SourceFile& one) { return one.name == "mp_rank_00_model_states.pt"; });
  ASSERT_NE(file, source->files.end());
  const auto document = torch_pt::Parse(*file->containers.front().metadata);
  ASSERT_TRUE(document.has_value());
  const auto info = UniversalInfo::Parse(document->root->Find("universal_checkpoint_info"));
  ASSERT_TRUE(info.has_value()) << info.error().message;
  const std::vector<Shape> uneven{{9, 8}, {8, 8}};
  const auto ruled = info->RuleFor("blocks.0.widen.weight", uneven);
  ASSERT_TRUE(ruled.has_value()) << ruled.error().message;
  EXPECT_EQ((*ruled)->whole, (Shape{17, 8}));
  EXPECT_FALSE((*ruled)->rule.padded);
  const std::vector<Shape> columns{{8, 4}, {8, 4}};
  EXPECT_EQ((*info->RuleFor("blocks.1.attended.weight", columns))->rule.dim, 1U);
  const std::vector<Shape> fused{{12, 8}, {12, 8}};
  EXPECT_EQ((*info->RuleFor("blocks.0.attend.weight", fused))->rule.split, Split::kSub);
  const std::vector<Shape> embedding{{13, 8}, {13, 8}};
  EXPECT_EQ((*info->RuleFor("embed.emb.weight", embedding))->rule.split, Split::kReplicated);
}

// AutoTP of 0.18 lists only parameters that it cuts in another way than along dimension 0. Cutting
// all others doubled embeddings and norms.
TEST(AutoTp, OfReleasesThatNameOnlyCutsLeavesTheRestOpen) {
  const fs::path folder = OwnCheckpoints() / "0.18.9_autotp2_dp2_zero1" / "ckpt";
  const auto source = ScanSource({folder.string()});
  ASSERT_TRUE(source.has_value()) << source.error().message;
  const auto refused = ReadCheckpoint(*source, Patterns());
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, Errc::kUnsupported);
  EXPECT_NE(refused.error().message.find("\"embed.emb.weight\": no rule specifies how 2"),
            std::string::npos)
      << refused.error().message;

  Patterns patterns;
  std::ifstream file(folder.parent_path() / "rules.json");
  const std::string rules{std::istreambuf_iterator<char>(file), {}};
  ASSERT_TRUE(patterns.AddFile(rules, "rules.json").has_value());
  const auto read = ReadCheckpoint(*source, patterns);
  ASSERT_TRUE(read.has_value()) << read.error().message;
  const std::map<std::string, Shape> wanted{
      {"embed.emb.weight", {13, 8}},       {"blocks.0.norm.weight", {8}},
      {"blocks.0.attend.weight", {24, 8}}, {"blocks.0.attended.weight", {8, 8}},
      {"blocks.0.widen.weight", {17, 8}},  {"blocks.0.widen.bias", {17}},
      {"blocks.0.narrow.weight", {8, 17}}, {"score.head.weight", {13, 8}}};
  std::size_t found = 0;
  for (const Param& param : read->params) {
    const auto one = wanted.find(param.name);
    if (one == wanted.end()) continue;
    ++found;
    EXPECT_EQ(param.shape, one->second) << param.name;
  }
  EXPECT_EQ(found, wanted.size());
}

// --- and back ------------------------------------------------------------------------------------

Param Named(const std::string& name, Shape shape, layout::SplitRule rule,
            ParamKind kind = ParamKind::kTrainable) {
  Param param;
  param.name = name;
  param.shape = std::move(shape);
  param.rule = std::move(rule);
  param.kind = kind;
  return param;
}

// Trained or frozen, which the information describes in different ways.
TEST(BuildInfo, OfViewsIsUnderstoodAgain) {
  Checkpoint checkpoint;
  layout::SplitRule experts;
  experts.split = Split::kSub;
  experts.view = {3, 6, 5};
  experts.dim = 1;
  experts.sub_sizes = {4, 2};
  for (const ParamKind kind : {ParamKind::kTrainable, ParamKind::kFrozen}) {
    const bool trained = kind == ParamKind::kTrainable;
    checkpoint.params.push_back(Named(trained ? "trained" : "frozen", {18, 5}, experts, kind));
  }
  Arena arena;
  const auto built = BuildUniversalInfo(arena, checkpoint.params, 2);
  ASSERT_TRUE(built.has_value()) << built.error().message;
  const Node* subs = (*built)->Find("parameter_with_sub_params");
  ASSERT_EQ(subs->items.size(), 1U);
  EXPECT_EQ(subs->items[0]->Find("patterns")->items[0]->text, "^trained$");
  EXPECT_EQ((*built)->Find("affine_map")->Find("params")->key(0)->text, "^frozen$");
  const auto info = UniversalInfo::Parse(*built);
  ASSERT_TRUE(info.has_value()) << info.error().message;
  const std::vector<Shape> shards{{9, 5}, {9, 5}};
  for (const Param& param : checkpoint.params) {
    const auto ruled = info->RuleFor(param.name, shards);
    ASSERT_TRUE(ruled.has_value() && ruled->has_value()) << param.name;
    EXPECT_EQ((*ruled)->whole, (Shape{18, 5})) << param.name;
    EXPECT_EQ((*ruled)->rule.view, experts.view) << param.name;
    EXPECT_EQ((*ruled)->rule.sub_sizes, experts.sub_sizes) << param.name;
  }
}

TEST(BuildInfo, IsUnderstoodAgain) {
  std::mt19937_64 random(11);
  const auto upto = [&](std::uint64_t n) { return random() % n; };
  for (int round = 0; round < 200; ++round) {
    const std::uint64_t tp = 2 + upto(3);
    Checkpoint checkpoint;
    for (int i = 0; i < 6; ++i) {
      Shape shape{1 + upto(8), 1 + upto(8)};
      layout::SplitRule rule;
      constexpr Split kSplits[] = {Split::kReplicated, Split::kAverage, Split::kDim, Split::kSub};
      rule.split = kSplits[upto(4)];
      rule.uneven = true;
      if (rule.split == Split::kDim || rule.split == Split::kSub) {
        rule.dim = static_cast<std::uint32_t>(upto(2));
      }
      for (std::uint64_t left = rule.split == Split::kSub ? shape[rule.dim] : 0; left > 0;) {
        rule.sub_sizes.push_back(1 + upto(left));
        left -= rule.sub_sizes.back();
      }
      const auto kind = upto(4) == 0 ? ParamKind::kFrozen : ParamKind::kTrainable;
      checkpoint.params.push_back(
          Named("layer." + std::to_string(i) + ".w+[x]", shape, rule, kind));
    }
    layout::SplitRule padded;
    padded.split = Split::kDim;
    padded.padded = true;
    padded.granule = {4};
    checkpoint.params.push_back(Named("embed", {1 + upto(40), 2}, padded));
    Arena arena;
    const auto built = BuildUniversalInfo(arena, checkpoint.params, tp);
    ASSERT_TRUE(built.has_value()) << built.error().message;
    const auto info = UniversalInfo::Parse(*built);
    ASSERT_TRUE(info.has_value()) << info.error().message;
    for (const Param& param : checkpoint.params) {
      std::vector<Shape> shards;
      for (std::uint64_t rank = 0; rank < tp; ++rank) {
        shards.push_back(layout::ShardShape(param.rule, param.shape, tp, rank).value());
      }
      const auto ruled = info->RuleFor(param.name, shards);
      ASSERT_TRUE(ruled.has_value()) << ruled.error().message;
      ASSERT_TRUE(ruled->has_value()) << param.name;
      EXPECT_EQ((*ruled)->whole, param.shape);
      for (std::uint64_t rank = 0; rank < tp; ++rank) {
        const auto before = layout::MakeCut(param.rule, param.shape, tp, rank).value();
        const auto after = layout::MakeCut((*ruled)->rule, (*ruled)->whole, tp, rank);
        ASSERT_TRUE(after.has_value()) << after.error().message;
        EXPECT_EQ(before.Explain(), after->Explain());
        std::vector<std::uint64_t> a, b;
        const auto note = [](std::vector<std::uint64_t>& out) {
          return [&out](const layout::Run& run) {
            for (std::uint64_t e = 0; e < run.elems; ++e) {
              out.push_back(run.shard + e);
              out.push_back(run.logical + e);
            }
          };
        };
        before.ForShardRange(0, before.shard_elems(), note(a));
        after->ForShardRange(0, after->shard_elems(), note(b));
        EXPECT_EQ(a, b) << param.name << " " << layout::Explain(param.rule);
      }
    }
  }
}

TEST(BuildInfo, WithOneRankKeepsWhatAnInfoSaid) {
  Arena arena;
  Checkpoint checkpoint;
  layout::SplitRule row;
  row.split = Split::kDim;
  row.dim = 1;
  checkpoint.params.push_back(Named("w", {4, 4}, row));
  EXPECT_EQ(BuildUniversalInfo(arena, checkpoint.params, 1).value(), nullptr);
  checkpoint.params[0].rule.origin = "universal_checkpoint_info";
  const Node* built = BuildUniversalInfo(arena, checkpoint.params, 1).value();
  ASSERT_NE(built, nullptr);
  const auto info = UniversalInfo::Parse(built);
  const std::vector<Shape> one{{4, 4}};
  EXPECT_EQ((*info->RuleFor("w", one))->rule.dim, 1U);
}

TEST(BuildInfo, NamesTheParameterThatHasNoRule) {
  Arena arena;
  Checkpoint checkpoint;
  layout::SplitRule unknown;
  unknown.split = Split::kUnknown;
  checkpoint.params.push_back(Named("model.layers.0.strange.weight", {4, 4}, unknown));
  const auto built = BuildUniversalInfo(arena, checkpoint.params, 2);
  ASSERT_FALSE(built.has_value());
  EXPECT_EQ(built.error().code, Errc::kUnsupported);
  EXPECT_NE(built.error().message.find("model.layers.0.strange.weight"), std::string::npos);
  EXPECT_NE(built.error().message.find(R"("match": "model\\.layers\\.\\d+\\.strange\\.weight")"),
            std::string::npos);
}

}  // namespace
}  // namespace shardwright::checkpoints
