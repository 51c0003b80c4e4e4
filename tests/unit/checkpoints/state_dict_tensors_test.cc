// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <string>
#include <unordered_set>

#include "checkpoints/deepspeed/common/entries.h"
#include "same_checkpoint.h"
#include "state_dict_entries.h"
#include "tiny_checkpoint.h"

// Tensors of a module's state dict beyond parameters in row-major order: parameters that were
// frozen late, strided tensors, names of one module.

namespace shardwright::checkpoints {
namespace {

TEST_F(StateDictEntries, AWeightThatWasFrozenLaterAndLeftOutComesFromItsMaster) {
  WriteSource(2, [](PtFile&, Node*, Node*) {});
  const std::vector<float> weight = Values("source", "l1.bias", "weight");
  fs::remove_all(scratch_ / "source");
  for (const std::int64_t stage : {1, 2}) {
    WriteSource(stage, [](PtFile&, Node*, Node* module) { pickle::Remove(module, "l1.bias"); });
    for (const std::string target : {"zero=1,dp=1", "zero=3,dp=2"}) {
      Convert("source", "out", target);
      ASSERT_EQ(warnings_.size(), 1U);
      EXPECT_NE(warnings_[0].find("l1.bias"), std::string::npos);
      Convert("out", "again", "zero=2,dp=2");
      EXPECT_EQ(Values("again", "l1.bias", "weight"), weight) << target;
      fs::remove_all(scratch_ / "out");
      fs::remove_all(scratch_ / "again");
    }
    fs::remove_all(scratch_ / "source");
  }
  // If the file lists the frozen parameters, no tensor was omitted.
  WriteSource(2, [](PtFile& file, Node* root, Node* module) {
    pickle::Remove(module, "l1.bias");
    Set(file.arena, root, "frozen_param_shapes", file.arena.Dict(true));
    Set(file.arena, root, "frozen_param_fragments", file.arena.Dict(true));
  });
  const auto refused = Read(scratch_ / "source");
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, Errc::kBadInput);
}

// With exclude_frozen_parameters the state of a quantised weight is left without the weight.
TEST(EntryNames, WithoutAListOfTrainedParametersOnlyNamesDecide) {
  PtFile file;
  Node* module = file.arena.Dict(true);
  Set(file.arena, module, "q.weight.absmax", file.Flat({1}));
  Set(file.arena, module, "l.weight", file.Flat({1, 2}));
  const auto known = [](const std::string&) { return false; };
  using Names = std::unordered_set<std::string>;
  EXPECT_EQ(EntryNames(module, "", {}, known, false), (Names{"q.weight.absmax"}));
  EXPECT_EQ(EntryNames(module, "", {}, known, true), (Names{"q.weight.absmax", "l.weight"}));
}

TEST_F(StateDictEntries, AParametrizedWeightOfStage1IsAFrozenParameter) {
  WriteSource(1, [](PtFile& file, Node*, Node* module) {
    Set(file.arena, module, "p.parametrizations.weight.original0", file.Flat({1, 2}));
  });
  Convert("source", "out", "zero=3,dp=2");
  EXPECT_NE(Model("out", "zero_pp_rank_0_")
                .root->Find("frozen_param_shapes")
                ->Find("p.parametrizations.weight.original0"),
            nullptr);
}

TEST_F(StateDictEntries, AParameterFrozenAfterTheStartIsInBothLists) {
  WriteSource(2, [](PtFile& file, Node* root, Node* module) {
    Set(file.arena, root, "frozen_param_shapes", file.Dict({{"l1.bias", file.arena.SizeOf({7})}}));
    Set(file.arena, root, "frozen_param_fragments",
        file.Dict({{"l1.bias", module->Find("l1.bias")}}));
  });
  Convert("source", "three", "zero=3,dp=3");
  Convert("three", "atoms", "", "universal");
  Convert("atoms", "two", "zero=2,dp=2");
  const auto three = Model("three", "zero_pp_rank_0_");
  const auto two = Model("two");
  for (const torch_pt::Document* model : {&three, &two}) {
    const Node* shapes = model->root->Find("frozen_param_shapes");
    ASSERT_TRUE(shapes->is_dict());
    ASSERT_EQ(shapes->entry_count(), 1U);
    EXPECT_EQ(shapes->key(0)->text, "l1.bias");
    bool trained = false;
    for (const Node* group : model->root->Find("param_shapes")->items) {
      trained = trained || group->Find("l1.bias") != nullptr;
    }
    EXPECT_TRUE(trained);
  }
  EXPECT_EQ(three.root->Find("frozen_param_fragments")->Find("l1.bias")->tensor->shape, Shape{3});
  EXPECT_EQ(two.root->Find("frozen_param_fragments")->Find("l1.bias")->tensor->shape, Shape{7});
  EXPECT_EQ(Values("two", "l1.bias", "fp32"), Values("source", "l1.bias", "fp32"));
  EXPECT_EQ(Values("two", "l1.bias", "weight"), Values("source", "l1.bias", "weight"));
}

TEST_F(StateDictEntries, StridedTensorsAreWrittenInRowMajorOrder) {
  WriteSource(2, [](PtFile& file, Node* root, Node* module) {
    const auto view = [&](std::vector<float> values, Shape shape,
                          std::vector<std::uint64_t> strides, std::uint64_t offset) {
      pickle::Tensor tensor;
      tensor.storage = file.Storage(std::move(values));
      tensor.shape = std::move(shape);
      tensor.strides = std::move(strides);
      tensor.offset = offset;
      return file.arena.TensorOf(std::move(tensor));
    };
    Set(file.arena, module, "turned", view({1, 2, 3, 4, 5, 6}, {3, 2}, {1, 3}, 0));
    Set(file.arena, module, "columns", view({1, 2, 3, 4, 5, 6, 7, 8}, {2, 2}, {4, 1}, 1));
    Set(file.arena, root, "buffer_names",
        file.arena.List({file.arena.String("turned"), file.arena.String("columns")}));
    const Node* frozen = view({1, 2, 3, 4, 5, 6}, {2, 3}, {1, 2}, 0);
    Set(file.arena, module, "f.weight", frozen);
    Set(file.arena, root, "frozen_param_shapes",
        file.Dict({{"f.weight", file.arena.SizeOf({2, 3})}}));
    Set(file.arena, root, "frozen_param_fragments", file.Dict({{"f.weight", frozen}}));
  });
  Convert("source", "three", "zero=3,dp=2");
  Convert("three", "two", "zero=2,dp=2");
  for (const char* folder : {"source", "three", "two"}) {
    EXPECT_EQ(Values(folder, "turned", "buffer"), (std::vector<float>{1, 4, 2, 5, 3, 6})) << folder;
    EXPECT_EQ(Values(folder, "columns", "buffer"), (std::vector<float>{2, 3, 6, 7})) << folder;
    EXPECT_EQ(Values(folder, "f.weight", "frozen"), (std::vector<float>{1, 3, 5, 2, 4, 6}))
        << folder;
  }
  const auto two = Model("two");
  const Node* turned = two.root->Find("module")->Find("turned");
  EXPECT_EQ(turned->tensor->strides, (std::vector<std::uint64_t>{2, 1}));
}

TEST_F(StateDictEntries, BuffersOfAModuleUnderTwoNamesAreTied) {
  WriteSource(2, [](PtFile& file, Node* root, Node* module) {
    const Node* scale = file.Flat({1, 2});
    Set(file.arena, module, "p.scale", scale);
    Set(file.arena, module, "q.scale", scale);
    Set(file.arena, root, "buffer_names",
        file.arena.List({file.arena.String("p.scale"), file.arena.String("q.scale")}));
  });
  Convert("source", "zero3", "zero=3,dp=2");
  const auto model = Model("zero3", "zero_pp_rank_0_");
  EXPECT_EQ(Texts(model.root->Find("buffer_names")),
            (std::vector<std::string>{"p.scale", "q.scale"}));
  EXPECT_EQ(model.root->Find("module")->Find("p.scale")->tensor->shape, Shape{2});
  EXPECT_EQ(model.root->Find("module")->Find("q.scale")->tensor->shape, Shape{2});
  EXPECT_EQ(Values("zero3", "p.scale", "buffer"), (std::vector<float>{1, 2}));
  Convert("zero3", "again", "zero=1,dp=3");
  EXPECT_EQ(Texts(Model("again").root->Find("buffer_names")),
            (std::vector<std::string>{"p.scale", "q.scale"}));
}

TEST_F(StateDictEntries, ViewsOfOneStorageWithOtherStridesAreNotTied) {
  WriteSource(1, [](PtFile& file, Node*, Node* module) {
    const std::uint32_t storage = file.Storage({1, 2, 3, 4});
    pickle::Tensor turned;
    turned.storage = storage;
    turned.shape = {2, 2};
    turned.strides = {1, 2};
    Set(file.arena, module, "f.weight", file.View(storage, {2, 2}));
    Set(file.arena, module, "g.weight", file.arena.TensorOf(std::move(turned)));
  });
  EXPECT_EQ(Values("source", "f.weight", "frozen"), (std::vector<float>{1, 2, 3, 4}));
  EXPECT_EQ(Values("source", "g.weight", "frozen"), (std::vector<float>{1, 3, 2, 4}));
  const auto refused = TryConvert("source", "out", "zero=2,dp=1");
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, Errc::kUnsupported);
  EXPECT_NE(refused.error().message.find("views of the same elements"), std::string::npos)
      << refused.error().message;
}

// Together they are smaller than the storage.
TEST_F(StateDictEntries, ViewsThatOverlapInALargerStorageAreRefused) {
  WriteSource(1, [](PtFile& file, Node*, Node* module) {
    const std::uint32_t storage = file.Storage({1, 2, 3, 4, 5, 6, 7, 8, 9, 10});
    Set(file.arena, module, "f.weight", file.View(storage, {5}));
    Set(file.arena, module, "g.weight", file.View(storage, {3}));
  });
  const auto refused = TryConvert("source", "out", "zero=2,dp=1");
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, Errc::kUnsupported);
  EXPECT_NE(refused.error().message.find("views of the same elements"), std::string::npos)
      << refused.error().message;
}

TEST_F(StateDictEntries, PlaceholdersThatShareAStorageAreNamesOfOneParameter) {
  WriteSource(2, [](PtFile&, Node* root, Node*) {
    static Arena names;
    Set(names, root, "frozen_param_shapes", names.Dict(true));
    Set(names, root, "frozen_param_fragments", names.Dict(true));
  });
  Convert("source", "three", "zero=3,dp=1");
  // As DeepSpeed saves it: a storage for each placeholder, and names that no list has.
  const fs::path path =
      scratch_ / "three" / "global_step4" / "zero_pp_rank_0_mp_rank_00_model_states.pt";
  const auto write = [&](bool alone) {
    const auto model = Model("three", "zero_pp_rank_0_");
    PtFile file;
    Node* root = pickle::CopyDict(file.arena, model.root);
    Node* module = file.arena.Dict(true);
    for (const char* name : {"emb.weight", "l1.weight", "l2.weight", "l1.bias", "l2.bias"}) {
      const std::uint32_t storage = file.Storage({});
      Set(file.arena, module, name, file.View(storage, {0}));
      if (std::string(name) != "l1.bias") continue;
      Set(file.arena, module, "again.bias", file.View(alone ? file.Storage({}) : storage, {0}));
    }
    Set(file.arena, root, "module", module);
    file.Write(path, root);
    fs::remove(scratch_ / "three" / "shardwright.json");
  };
  write(false);
  Convert("three", "two", "zero=2,dp=2");
  const auto model = Model("two");
  const Node* module = model.root->Find("module");
  ASSERT_NE(module->Find("again.bias"), nullptr);
  EXPECT_EQ(module->Find("again.bias")->tensor->storage, module->Find("l1.bias")->tensor->storage);
  EXPECT_EQ(Values("two", "l1.bias", "fp32"), Values("source", "l1.bias", "fp32"));
  write(true);
  const auto refused = Read(scratch_ / "three");
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, Errc::kUnsupported);
  EXPECT_NE(refused.error().message.find("again.bias"), std::string::npos);
}

}  // namespace
}  // namespace shardwright::checkpoints
