// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "convert/convert.h"
#include "convert/input.h"
#include "same_checkpoint.h"
#include "support/comm/comm.h"
#include "tiny_checkpoint.h"

// Checkpoints without their frozen parameters (exclude_frozen_parameters), as LoRA runs save them.
// DeepSpeed leaves each out under one name; other names of a tied one stay, with the data.

namespace shardwright::checkpoints {
namespace {

using pickle::Arena;
using pickle::Node;

class LeftOutFrozen : public testing::Test {
 protected:
  /// Writes a stage 1 or 2 checkpoint of trained adapters, with the additions of `change`.
  void WriteSource(std::int64_t stage, std::function<void(PtFile&, Node* root)> change) {
    TinyZero tiny;
    tiny.stage = stage;
    tiny.change_model = [change = std::move(change)](PtFile& file, Node* root) {
      Set(file.arena, root, "frozen_param_shapes", file.arena.None());
      Set(file.arena, root, "frozen_param_fragments", file.arena.None());
      change(file, root);
    };
    tiny.Write(scratch_ / "source");
  }
  void WriteSource(std::int64_t stage) {
    WriteSource(stage, [](PtFile&, Node*) {});
  }

  /// A model in which the frozen "base.weight" is tied to "head.weight" and "tail.weight".
  static void TieLeftOut(PtFile& file, Node* root) {
    Node* module = pickle::CopyDict(file.arena, root->Find("module"));
    const Node* data = file.Tensor({1, 2, 3, 4, 5, 6}, {2, 3});
    Set(file.arena, module, "head.weight", data);
    Set(file.arena, module, "tail.weight", data);
    Set(file.arena, root, "module", module);
    Set(file.arena, root, "shared_params",
        file.Dict({{"head.weight", file.arena.String("base.weight")},
                   {"tail.weight", file.arena.String("base.weight")}}));
  }

  void Convert(const std::string& from, const std::string& to, const std::string& target,
               const std::string& name = "deepspeed") {
    const auto comm = comm::MakeSerialComm();
    NullSink sink;
    const auto input = convert::OpenInput(*comm, {{(scratch_ / from).string()}, {}, false}, sink);
    ASSERT_TRUE(input.has_value()) << input.error().message;
    const Format& format = *FindFormat(name);
    const auto spec = ParseTarget(format, target);
    ASSERT_TRUE(spec.has_value());
    convert::ConvertOptions options;
    options.output = (scratch_ / to).string();
    const auto done = convert::Convert(*comm, **input, *spec, format, "test", options, sink);
    ASSERT_TRUE(done.has_value()) << done.error().message;
  }

  torch_pt::Document Model(const std::string& folder, const std::string& rank) {
    return ParsedFile(scratch_ / folder / "global_step4" / (rank + "mp_rank_00_model_states.pt"));
  }

  void ExpectNoFrozenListed(const torch_pt::Document& model) {
    for (const char* key : {"frozen_param_shapes", "frozen_param_fragments"}) {
      ASSERT_NE(model.root->Find(key), nullptr) << key;
      EXPECT_TRUE(model.root->Find(key)->is_none()) << key;
    }
  }

  void ExpectSame(const std::string& before, const std::string& after) {
    const auto a = Read(scratch_ / before);
    const auto b = Read(scratch_ / after);
    ASSERT_TRUE(a.has_value()) << a.error().message;
    ASSERT_TRUE(b.has_value()) << b.error().message;
    ExpectSameParams(*a, *b);
    EXPECT_EQ(a->frozen_unknown, b->frozen_unknown);
    const layout::TensorIndex index(b->map);
    Gatherer whole_a(a->map);
    Gatherer whole_b(b->map);
    for (const layout::LogicalTensor& tensor : a->map.tensors) {
      if (tensor.state == "weight") continue;
      const auto found = index.Find(tensor.name, tensor.state);
      ASSERT_TRUE(found.has_value()) << tensor.name << " " << tensor.state;
      EXPECT_EQ(whole_a.Whole(tensor), whole_b.Whole(b->map.tensors[*found])) << tensor.name;
    }
  }

  Scratch scratch_;
};

TEST_F(LeftOutFrozen, ListsOfFrozenParametersStayNone) {
  for (const std::int64_t stage : {1, 2}) {
    WriteSource(stage);
    for (const std::string target : {"zero=1,dp=3", "zero=2,dp=3", "zero=3,dp=3"}) {
      Convert("source", "out", target);
      ExpectNoFrozenListed(Model("out", target.starts_with("zero=3") ? "zero_pp_rank_2_" : ""));
      ExpectSame("source", "out");
      Convert("out", "back", "zero=2,dp=2");
      ExpectNoFrozenListed(Model("back", ""));
      fs::remove_all(scratch_ / "out");
      fs::remove_all(scratch_ / "back");
    }
    fs::remove_all(scratch_ / "source");
  }
}

TEST_F(LeftOutFrozen, AnEmptyListStaysEmpty) {
  WriteSource(2, [](PtFile& file, Node* root) {
    Set(file.arena, root, "frozen_param_shapes", file.arena.Dict(true));
    Set(file.arena, root, "frozen_param_fragments", file.arena.Dict(true));
  });
  Convert("source", "out", "zero=3,dp=3");
  const auto model = Model("out", "zero_pp_rank_0_");
  const Node* listed = model.root->Find("frozen_param_fragments");
  ASSERT_TRUE(listed->is_dict());
  EXPECT_EQ(listed->entry_count(), 0U);
}

TEST_F(LeftOutFrozen, FrozenParametersOfStage1AreListedAtStage3) {
  WriteSource(1, [](PtFile& file, Node* root) {
    Node* module = pickle::CopyDict(file.arena, root->Find("module"));
    Set(file.arena, module, "base.weight", file.Flat({1, 2, 3}));
    Set(file.arena, root, "module", module);
  });
  Convert("source", "out", "zero=3,dp=3");
  const auto model = Model("out", "zero_pp_rank_2_");
  EXPECT_NE(model.root->Find("frozen_param_fragments")->Find("base.weight"), nullptr);
  ExpectSame("source", "out");
}

TEST_F(LeftOutFrozen, TheFirstNameThatIsThereHoldsTheDataOfATiedOne) {
  WriteSource(2, TieLeftOut);
  const auto checkpoint = Read(scratch_ / "source");
  ASSERT_TRUE(checkpoint.has_value()) << checkpoint.error().message;
  ASSERT_EQ(checkpoint->params.size(), 7U);
  EXPECT_EQ(checkpoint->params[5].kind, ParamKind::kFrozen);
  EXPECT_EQ(checkpoint->params[5].alias_of, "");
  EXPECT_EQ(checkpoint->params[6].alias_of, "head.weight");
  EXPECT_TRUE(checkpoint->frozen_unknown);
  const auto found = layout::TensorIndex(checkpoint->map).Find("head.weight", "frozen");
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(checkpoint->map.tensors[*found].shape, (Shape{2, 3}));
}

TEST_F(LeftOutFrozen, OtherNamesOfTiedOnesKeepTheirDataThroughEveryStage) {
  for (const std::int64_t stage : {1, 2}) {
    WriteSource(stage, TieLeftOut);
    Convert("source", "two", "zero=2,dp=3");
    ExpectNoFrozenListed(Model("two", ""));
    ExpectSame("source", "two");
    Convert("two", "three", "zero=3,dp=3");
    ExpectSame("source", "three");
    Convert("three", "one", "zero=1,dp=2");
    ExpectSame("source", "one");
    Convert("one", "none", "zero=0,dp=1");
    ExpectSame("source", "none");
    Convert("three", "atoms", "", "universal");
    ExpectSame("source", "atoms");
    Convert("atoms", "again", "zero=3,dp=2");
    ExpectNoFrozenListed(Model("again", "zero_pp_rank_1_"));
    ExpectSame("source", "again");
    for (const char* out : {"source", "two", "three", "one", "none", "atoms", "again"}) {
      fs::remove_all(scratch_ / out);
    }
  }
}

TEST_F(LeftOutFrozen, AtStage3OtherNamesOfTiedOnesAreEmptyWhereDeepSpeedLooks) {
  WriteSource(2, TieLeftOut);
  Convert("source", "out", "zero=3,dp=3");
  const auto first = Model("out", "zero_pp_rank_0_");
  ExpectNoFrozenListed(first);
  EXPECT_EQ(first.root->Find("module")->Find("head.weight")->tensor->shape, Shape{0});
  EXPECT_EQ(first.root->Find("module")->Find("tail.weight")->tensor->shape, Shape{0});
  EXPECT_NE(first.root->Find("shardwright_frozen"), nullptr);
  EXPECT_EQ(Model("out", "zero_pp_rank_1_").root->Find("shardwright_frozen"), nullptr);
  // Only our own files keep it.
  Convert("out", "two", "zero=2,dp=2");
  EXPECT_EQ(Model("two", "").root->Find("shardwright_frozen"), nullptr);
}

TEST_F(LeftOutFrozen, ATiedNameWithoutDataIsLeftOutWithAWarning) {
  WriteSource(2, TieLeftOut);
  Convert("source", "out", "zero=3,dp=1");
  // As DeepSpeed's own stage 3 saves it.
  const fs::path path =
      scratch_ / "out" / "global_step4" / "zero_pp_rank_0_mp_rank_00_model_states.pt";
  const auto model = Model("out", "zero_pp_rank_0_");
  PtFile file;
  Node* root = pickle::CopyDict(file.arena, model.root);
  pickle::Remove(root, "shardwright_frozen");
  Node* module = file.arena.Dict(true);
  const std::uint32_t empty = file.Storage({});
  for (std::size_t i = 0; i < root->Find("module")->entry_count(); ++i) {
    Set(file.arena, module, root->Find("module")->key(i)->text, file.View(empty, {0}));
  }
  Set(file.arena, root, "module", module);
  file.Write(path, root);
  fs::remove(scratch_ / "out" / "shardwright.json");
  const auto checkpoint = Read(scratch_ / "out");
  ASSERT_TRUE(checkpoint.has_value()) << checkpoint.error().message;
  EXPECT_EQ(checkpoint->params.size(), 5U);
  ASSERT_EQ(checkpoint->warnings.size(), 1U);
  EXPECT_NE(checkpoint->warnings[0].find("\"head.weight\""), std::string::npos);
  Convert("out", "two", "zero=2,dp=2");
  EXPECT_EQ(Model("two", "").root->Find("module")->Find("head.weight"), nullptr);
}

TEST_F(LeftOutFrozen, AHolderThatAListOfFrozenParametersLacksIsRefused) {
  WriteSource(2, [](PtFile& file, Node* root) {
    TieLeftOut(file, root);
    Set(file.arena, root, "frozen_param_shapes", file.arena.Dict(true));
  });
  const auto checkpoint = Read(scratch_ / "source");
  ASSERT_FALSE(checkpoint.has_value());
  EXPECT_EQ(checkpoint.error().code, Errc::kBadInput);
  EXPECT_NE(checkpoint.error().message.find("base.weight"), std::string::npos);
}

TEST_F(LeftOutFrozen, RanksThatDisagreeOnFrozenParametersAreNamed) {
  WriteSource(2);
  Convert("source", "without", "zero=3,dp=2");
  fs::remove_all(scratch_ / "source");
  WriteSource(1, [](PtFile& file, Node* root) {
    Node* module = pickle::CopyDict(file.arena, root->Find("module"));
    Set(file.arena, module, "base.weight", file.Flat({1, 2, 3}));
    Set(file.arena, root, "module", module);
  });
  Convert("source", "with", "zero=3,dp=2");
  const std::string rank1 = "zero_pp_rank_1_mp_rank_00_model_states.pt";
  const fs::path with = scratch_ / "with" / "global_step4" / rank1;
  const fs::path without = scratch_ / "without" / "global_step4" / rank1;
  fs::rename(with, scratch_ / "kept");
  fs::rename(without, with);
  fs::rename(scratch_ / "kept", without);
  for (const char* folder : {"with", "without"}) {
    fs::remove(scratch_ / folder / "shardwright.json");
    const auto checkpoint = Read(scratch_ / folder);
    ASSERT_FALSE(checkpoint.has_value()) << folder;
    EXPECT_EQ(checkpoint.error().code, Errc::kBadInput);
    EXPECT_NE(checkpoint.error().message.find(rank1), std::string::npos)
        << checkpoint.error().message;
  }
}

}  // namespace
}  // namespace shardwright::checkpoints
