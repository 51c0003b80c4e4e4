// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "checkpoints/deepspeed/common/entries.h"
#include "convert/convert.h"
#include "convert/describe.h"
#include "convert/input.h"
#include "same_checkpoint.h"
#include "state_dict_entries.h"
#include "tiny_checkpoint.h"

// Entries of a module's state dict beyond parameters in row-major order: quantisation state and
// extra states of modules, and tensors that no list names.

namespace shardwright::checkpoints {
namespace {

/// io.BytesIO as pickle writes it.
const Node* BytesObject(PtFile& file) {
  Node* bytes = file.arena.New(pickle::Kind::kBytes);
  bytes->text = std::string("\0amax\xff", 6);
  return file.arena.Object("_io.BytesIO",
                           file.arena.Tuple({bytes, file.arena.Int(0), file.arena.None()}));
}

/// A module with an entry of every kind that is not a tensor, and a tensor inside of one.
void AddOpaqueEntries(PtFile& file, Node* module) {
  Node* dict = file.Dict({{"seen", file.arena.Int(3)}, {"hist", file.Flat({1, 2, 3})}});
  Set(file.arena, module, "a._extra_state", file.arena.None());
  Set(file.arena, module, "b._extra_state", dict);
  Set(file.arena, module, "c._extra_state", BytesObject(file));
  Set(file.arena, module, "d._extra_state", file.arena.Object("my.Own", file.arena.Int(7)));
}

TEST_F(StateDictEntries, OpaqueEntriesPassThroughEveryStageAndAtoms) {
  WriteSource(2, [](PtFile& file, Node*, Node* module) { AddOpaqueEntries(file, module); });
  const auto source = Model("source");
  const auto expect_same = [&](const torch_pt::Document& model) {
    const Node* before = source.root->Find("module");
    const Node* after = model.root->Find("module");
    ASSERT_EQ(before->entry_count(), after->entry_count());
    for (std::size_t i = 0; i < before->entry_count(); ++i) {
      EXPECT_EQ(before->key(i)->text, after->key(i)->text);
      if (before->value(i)->is_tensor()) continue;
      EXPECT_TRUE(SameNode(before->value(i), after->value(i))) << before->key(i)->text;
    }
    EXPECT_EQ(after->Find("b._extra_state")->Find("hist")->tensor->shape, Shape{3});
  };
  Convert("source", "zero3", "zero=3,dp=3");
  expect_same(Model("zero3", "zero_pp_rank_0_"));
  expect_same(Model("zero3", "zero_pp_rank_2_"));
  Convert("zero3", "zero0", "zero=0,dp=1");
  expect_same(Model("zero0"));
  Convert("zero0", "zero1", "zero=1,dp=3");
  expect_same(Model("zero1"));
  EXPECT_EQ(Convert("zero1", "atoms", "", "universal"), std::vector<std::string>());
  Convert("atoms", "again", "zero=2,dp=2");
  expect_same(Model("again"));
}

TEST_F(StateDictEntries, OpaqueEntriesAreListedAndCompared) {
  WriteSource(2, [](PtFile& file, Node*, Node* module) { AddOpaqueEntries(file, module); });
  Convert("source", "out", "zero=3,dp=3");
  const auto before = Read(scratch_ / "source");
  const auto after = Read(scratch_ / "out");
  ASSERT_TRUE(before.has_value() && after.has_value());
  EXPECT_EQ(EntryDifferences(*before, *after), std::vector<std::string>());
  EXPECT_EQ(convert::List(*after).back().kind, "state entry, object my.Own");
  fs::remove_all(scratch_ / "source");
  WriteSource(2, [](PtFile& file, Node*, Node* module) {
    AddOpaqueEntries(file, module);
    Set(file.arena, module, "b._extra_state",
        file.Dict({{"seen", file.arena.Int(3)}, {"hist", file.Flat({1, 2, 4})}}));
    pickle::Remove(module, "d._extra_state");
  });
  const auto other = Read(scratch_ / "source");
  ASSERT_TRUE(other.has_value());
  const std::vector<std::string> lines = EntryDifferences(*other, *after);
  ASSERT_EQ(lines.size(), 2U);
  EXPECT_NE(lines[0].find("b._extra_state"), std::string::npos);
  EXPECT_NE(lines[1].find("\"d._extra_state\": only in the second"), std::string::npos);
}

TEST_F(StateDictEntries, OpaqueEntriesAreReportedWhereTheTargetHasNoPlaceForThem) {
  WriteSource(2, [](PtFile& file, Node*, Node* module) { AddOpaqueEntries(file, module); });
  for (const char* format : {"safetensors", "dcp"}) {
    const std::vector<std::string> lost = Convert("source", format, "", format);
    const bool named = std::any_of(lost.begin(), lost.end(), [](const std::string& one) {
      return one.find("c._extra_state (object _io.BytesIO)") != std::string::npos;
    });
    EXPECT_TRUE(named) << format;
  }
}

TEST_F(StateDictEntries, QuantisationStateIsNoFrozenParameter) {
  for (const std::int64_t stage : {1, 2}) {
    WriteSource(stage, [&](PtFile& file, Node* root, Node* module) {
      Set(file.arena, module, "q.weight", file.Flat({1, 2, 3}));
      Set(file.arena, module, "q.weight.absmax", file.Flat({4, 5}));
      Set(file.arena, module, "q.weight.quant_state.bitsandbytes__nf4", file.Flat({6}));
      if (stage == 1) return;
      Set(file.arena, root, "frozen_param_shapes",
          file.Dict({{"q.weight", file.arena.SizeOf({3})}}));
      Set(file.arena, root, "frozen_param_fragments",
          file.Dict({{"q.weight", module->Find("q.weight")}}));
    });
    for (const std::string target : {"zero=2,dp=3", "zero=3,dp=3"}) {
      Convert("source", "out", target);
      const auto model = Model("out", target.starts_with("zero=3") ? "zero_pp_rank_1_" : "");
      const Node* listed = model.root->Find("frozen_param_fragments");
      ASSERT_TRUE(listed->is_dict());
      ASSERT_EQ(listed->entry_count(), 1U);
      EXPECT_EQ(listed->key(0)->text, "q.weight");
      EXPECT_TRUE(model.root->Find("buffer_names")->items.empty());
      EXPECT_EQ(model.root->Find("module")->Find("q.weight.absmax")->tensor->shape, Shape{2});
      EXPECT_EQ(Values("out", "q.weight.absmax", "buffer"), (std::vector<float>{4, 5}));
      fs::remove_all(scratch_ / "out");
    }
    fs::remove_all(scratch_ / "source");
  }
}

TEST_F(StateDictEntries, QuantisationStateOfLeftOutWeightsLeavesTheListsNone) {
  for (const std::int64_t stage : {1, 2}) {
    WriteSource(stage, [](PtFile& file, Node*, Node* module) {
      Set(file.arena, module, "q.weight.absmax", file.Flat({4, 5}));
      Set(file.arena, module, "q.other", file.Flat({6}));
    });
    Convert("source", "atoms", "", "universal");
    for (const std::string from : {"source", "atoms"}) {
      for (const std::string target : {"zero=2,dp=3", "zero=3,dp=3"}) {
        Convert(from, "out", target);
        const auto model = Model("out", target.starts_with("zero=3") ? "zero_pp_rank_1_" : "");
        EXPECT_TRUE(model.root->Find("frozen_param_shapes")->is_none());
        EXPECT_TRUE(model.root->Find("frozen_param_fragments")->is_none());
        EXPECT_TRUE(model.root->Find("buffer_names")->items.empty());
        EXPECT_EQ(Values("out", "q.weight.absmax", "buffer"), (std::vector<float>{4, 5}));
        EXPECT_EQ(Values("out", "q.other", "buffer"), (std::vector<float>{6}));
        fs::remove_all(scratch_ / "out");
      }
    }
    fs::remove_all(scratch_ / "source");
    fs::remove_all(scratch_ / "atoms");
  }
}

/// A frozen weight with quantisation state in its module, and a frozen parameter of unusual name.
void AddUnlisted(PtFile& file, Node*, Node* module) {
  Set(file.arena, module, "q.weight", file.Flat({1, 2, 3}));
  Set(file.arena, module, "q.absmax", file.Flat({4, 5}));
  Set(file.arena, module, "n.gain", file.Flat({6, 7}));
}

TEST_F(StateDictEntries, UnlistedTensorsOfUnusualNamesStayUndecided) {
  WriteSource(1, AddUnlisted);
  Convert("source", "atoms", "", "universal");
  for (const std::string from : {"source", "atoms"}) {
    Convert(from, "two", "zero=2,dp=3");
    const auto two = Model("two");
    // DeepSpeed's loader looks up every frozen parameter in the lists, and ignores other names.
    for (const char* name : {"q.weight", "q.absmax", "n.gain"}) {
      EXPECT_NE(two.root->Find("module")->Find(name), nullptr) << name;
      EXPECT_NE(two.root->Find("frozen_param_fragments")->Find(name), nullptr) << name;
    }
    Convert("two", "zero", "zero=1,dp=1");
    EXPECT_TRUE(Model("zero").root->Find("frozen_param_shapes")->is_none());
    for (const char* folder : {"two", "zero"}) {
      EXPECT_EQ(Values(folder, "q.absmax", "buffer"), (std::vector<float>{4, 5})) << folder;
      ExpectUndecided(folder, "q.absmax");
      ExpectUndecided(folder, "n.gain");
      fs::remove_all(scratch_ / folder);
    }
    ExpectUndecided(from, "q.absmax");
  }
  const auto read = Read(scratch_ / "source");
  ASSERT_TRUE(read.has_value());
  const auto rows = convert::List(*read);
  const auto row = std::find_if(rows.begin(), rows.end(),
                                [](const convert::ListRow& one) { return one.name == "n.gain"; });
  ASSERT_NE(row, rows.end());
  EXPECT_EQ(row->kind, "state entry or frozen");
  const auto refused = TryConvert("source", "files", "", "dtensor");
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, Errc::kUnsupported);
}

TEST_F(StateDictEntries, APatternFileDecidesUnlistedTensors) {
  WriteSource(1, AddUnlisted);
  Convert("source", "two", "zero=2,dp=3");
  Decide(
      R"({"family": "mine", "frozen_parameters": ["n\\..*"], "not_parameters": ["q\\.absmax"]})");
  for (const char* from : {"source", "two"}) {
    Convert(from, "three", "zero=3,dp=2");
    const auto three = Model("three", "zero_pp_rank_1_");
    const Node* shapes = three.root->Find("frozen_param_shapes");
    ASSERT_EQ(shapes->entry_count(), 2U);
    EXPECT_NE(shapes->Find("q.weight"), nullptr);
    EXPECT_NE(shapes->Find("n.gain"), nullptr);
    const Node* module = three.root->Find("module");
    EXPECT_EQ(module->Find("n.gain")->tensor->shape, Shape{0});
    EXPECT_EQ(module->Find("q.absmax")->tensor->shape, Shape{2});
    EXPECT_EQ(Values("three", "n.gain", "frozen"), (std::vector<float>{6, 7}));
    fs::remove_all(scratch_ / "three");
  }
}

TEST_F(StateDictEntries, KnownKindsPassThroughStagesWithoutLists) {
  WriteSource(2, [](PtFile& file, Node* root, Node* module) {
    AddUnlisted(file, root, module);
    Set(file.arena, root, "frozen_param_shapes",
        file.Dict({{"q.weight", file.arena.SizeOf({3})}, {"n.gain", file.arena.SizeOf({2})}}));
    Set(file.arena, root, "frozen_param_fragments",
        file.Dict({{"q.weight", module->Find("q.weight")}, {"n.gain", module->Find("n.gain")}}));
  });
  for (const std::string between : {"zero=1,dp=3", "zero=0,dp=1"}) {
    Convert("source", "between", between);
    EXPECT_TRUE(Model("between").root->Find("frozen_param_shapes")->is_none());
    Convert("between", "three", "zero=3,dp=2");
    const auto three = Model("three", "zero_pp_rank_0_");
    EXPECT_EQ(three.root->Find("frozen_param_shapes")->entry_count(), 2U);
    EXPECT_NE(three.root->Find("frozen_param_shapes")->Find("n.gain"), nullptr);
    EXPECT_EQ(three.root->Find("module")->Find("q.absmax")->tensor->shape, Shape{2});
    EXPECT_EQ(three.root->Find("shardwright_kinds"), nullptr);
    fs::remove_all(scratch_ / "between");
    fs::remove_all(scratch_ / "three");
  }
}

TEST_F(StateDictEntries, NamesLikeThoseOfTrainedParametersAreParameters) {
  WriteSource(1, [](PtFile& file, Node*, Node* module) {
    Set(file.arena, module, "a.in_proj_bias", file.Flat({1, 2}));
    Set(file.arena, module, "b.weight_g", file.Flat({1, 2}));
  });
  const auto read = Read(scratch_ / "source");
  ASSERT_TRUE(read.has_value());
  for (const Param& param : read->params) {
    EXPECT_EQ(param.undecided, param.name == "b.weight_g") << param.name;
  }
  UnlistedParameters unlisted;
  unlisted.AddTrained("layers.3.norm.gain");
  EXPECT_TRUE(unlisted.Contains("layers.11.norm.gain"));
  EXPECT_FALSE(unlisted.Contains("layers.norm.gain"));
  EXPECT_FALSE(unlisted.Contains("layers.x.norm.gain"));
}

TEST_F(StateDictEntries, ADcpFolderLeavesUntrainedTensorsUndecided) {
  WriteSource(2, [](PtFile& file, Node* root, Node* module) {
    Set(file.arena, module, "f.weight", file.Flat({1, 2, 3}));
    Set(file.arena, module, "b.scale", file.Flat({4, 5}));
    Set(file.arena, module, "n.running_mean", file.Flat({6}));
    Set(file.arena, root, "buffer_names",
        file.arena.List({file.arena.String("b.scale"), file.arena.String("n.running_mean")}));
    Set(file.arena, root, "frozen_param_shapes", file.Dict({{"f.weight", file.arena.SizeOf({3})}}));
    Set(file.arena, root, "frozen_param_fragments",
        file.Dict({{"f.weight", module->Find("f.weight")}}));
  });
  Convert("source", "dcp", "", "dcp");
  ExpectUndecided("dcp", "f.weight");
  Convert("dcp", "two", "zero=2,dp=2");
  EXPECT_TRUE(Model("two").root->Find("frozen_param_shapes")->is_none());
  ExpectUndecided("two", "f.weight");
  Decide(R"({"family": "mine", "frozen_parameters": [".*weight"], "not_parameters": [".*scale"]})");
  for (const char* from : {"dcp", "two"}) {
    Convert(from, "three", "zero=3,dp=2");
    const auto three = Model("three", "zero_pp_rank_0_");
    ASSERT_EQ(three.root->Find("frozen_param_shapes")->entry_count(), 1U);
    EXPECT_EQ(Values("three", "f.weight", "frozen"), (std::vector<float>{1, 2, 3}));
    EXPECT_EQ(three.root->Find("module")->Find("b.scale")->tensor->shape, Shape{2});
    EXPECT_EQ(three.root->Find("module")->Find("n.running_mean")->tensor->shape, Shape{1});
    fs::remove_all(scratch_ / "three");
  }
}
}  // namespace
}  // namespace shardwright::checkpoints
