// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/dtensor/dtensor.h"

#include <filesystem>
#include <map>

#include "checkpoints/dtensor/flat_units_internal.h"
#include "checkpoints/dtensor/item_table_internal.h"
#include "checkpoints/dtensor/layout_internal.h"
#include "checkpoints/dtensor/write_internal.h"
#include "dtensor_folder.h"
#include "files/pickle/writer.h"

namespace shardwright::checkpoints::dtensor {
namespace {

using pickle::Node;

TEST(DTensor, NamesOfFiles) {
  const auto verl = ParseRankFile("optim_world_size_12_rank_3.pt");
  ASSERT_TRUE(verl);
  EXPECT_EQ(verl->item, Item::kOptimizer);
  EXPECT_EQ(verl->world, 12U);
  EXPECT_EQ(verl->rank, 3U);
  const auto accelerate = ParseRankFile("pytorch_model_fsdp_0_rank11.bin");
  ASSERT_TRUE(accelerate);
  EXPECT_EQ(accelerate->trainer, Trainer::kAccelerate);
  EXPECT_EQ(accelerate->name, "pytorch_model_fsdp_0");
  EXPECT_EQ(accelerate->rank, 11U);
  EXPECT_TRUE(ParseRankFile("pytorch_model_fsdp_rank0.bin"));
  const auto whole = ParseRankFile("optimizer.bin");
  ASSERT_TRUE(whole);
  EXPECT_EQ(whole->item, Item::kOptimizer);
  EXPECT_EQ(whole->name, "optimizer_0");
  EXPECT_EQ(whole->world, 1U);
  const auto item = ParseRankFile("lr_scheduler_2.pt");
  ASSERT_TRUE(item);
  EXPECT_EQ(item->trainer, Trainer::kTorchCheckpointing);
  EXPECT_EQ(item->name, "lr_scheduler");
  for (const char* name :
       {"model.pt", "model_world_size_2_rank_.bin", "_3.pt", "optimizer_rank0.bin", "scheduler.bin",
        "pytorch_model.bin", "model_rank0.bin", "rng_03.pt"}) {
    EXPECT_FALSE(ParseRankFile(name)) << name;
  }
  for (const char* name : {"model_world_size_2_rank_1.pt", "optimizer_0_rank7.bin", "step_1.pt"}) {
    const auto parsed = ParseRankFile(name);
    ASSERT_TRUE(parsed);
    EXPECT_EQ(RankFileName(parsed->trainer, parsed->name, parsed->world.value_or(0), parsed->rank),
              name);
  }
}

TEST(DTensor, AMadeUpFolderIsRead) {
  for (const MeshForm form : {MeshForm::kNew, MeshForm::kOld}) {
    Folder folder(form);
    folder.Write();
    const auto read = folder.Read();
    ASSERT_TRUE(read) << read.error().message;
    EXPECT_EQ(read->iteration.value(), 3U);
    EXPECT_EQ(read->layout.mesh.dp_shard, 2U);
    ASSERT_EQ(read->params.size(), 2U);
    EXPECT_EQ(read->params[0].kind, ParamKind::kTrainable);
    EXPECT_EQ(read->params[1].kind, ParamKind::kBuffer);
    EXPECT_EQ(read->groups.at(0).hyper.lr, 0.5);
    EXPECT_EQ(read->map.tensors.size(), 4U);
  }
}

TEST(DTensor, MeshesOfTwoDimensionsAndStridedShards) {
  using layout::MeshSplit;
  const std::vector<std::vector<MeshSplit>> all = {
      {MeshSplit::Replicate(), MeshSplit::Shard(0)},
      {MeshSplit::Shard(1), MeshSplit::Shard(0)},
      {MeshSplit::StridedShard(0, 2), MeshSplit::Shard(0)},
      {MeshSplit::Shard(0), MeshSplit::Shard(0)},
  };
  for (const auto& splits : all) {
    for (const MeshForm form : {MeshForm::kNew, MeshForm::kOld}) {
      Folder folder(form);
      folder.made_up()->mesh = {3, 2};
      folder.made_up()->splits = splits;
      folder.Write();
      const auto read = folder.Read();
      ASSERT_TRUE(read) << layout::Explain(splits) << ": " << read.error().message;
    }
  }
}

TEST(DTensor, StridedBuffersAndExtraStates) {
  const Folder folder;
  folder.Write([](std::uint64_t rank, const std::string& item, Document* document) {
    if (item != "model") return;
    std::string bytes(6 * sizeof(float), '\0');
    for (int i = 0; i < 6; ++i) {
      const auto value = static_cast<float>(i);
      std::memcpy(bytes.data() + static_cast<std::size_t>(i) * sizeof(float), &value,
                  sizeof(value));
    }
    pickle::Node* root = CopyDict(document->arena, document->root);
    // Rank 1 stores the same tensor in row-major order.
    pickle::Tensor turned = *document->AddInline(bytes, DType::kF32, {3, 2})->tensor;
    if (rank == 0) turned.strides = {1, 3};
    Set(document->arena, root, "turned", document->arena.TensorOf(std::move(turned)));
    Set(document->arena, root, "x._extra_state", document->arena.None());
    document->root = root;
  });
  const auto checkpoint = folder.Read();
  ASSERT_TRUE(checkpoint.has_value()) << checkpoint.error().message;
  const auto found = layout::TensorIndex(checkpoint->map).Find("turned", "buffer");
  ASSERT_TRUE(found.has_value());
  const layout::LogicalTensor& tensor = checkpoint->map.tensors[*found];
  ASSERT_EQ(tensor.fragments.size(), 1U);
  std::vector<float> values(6);
  const std::string whole = Gatherer(checkpoint->map).Whole(tensor);
  std::memcpy(values.data(), whole.data(), whole.size());
  EXPECT_EQ(values, (std::vector<float>{0, 3, 1, 4, 2, 5}));
  ASSERT_EQ(checkpoint->left_out.size(), 1U);
  EXPECT_NE(checkpoint->left_out[0].find("x._extra_state"), std::string::npos);
}

TEST(DTensor, AdaptersAloneAreRead) {
  Folder folder;
  folder.made_up()->name = "q.lora_A.weight";
  folder.Write([](std::uint64_t, const std::string& item, Document* document) {
    if (item == "model") Mutable(document->root)->items.resize(2);
  });
  const auto read = folder.Read();
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(read->params.front().name, "q.lora_A.weight");
}

TEST(DTensor, OnOneRankShapesTellBuffersFromParameters) {
  Folder folder;
  folder.made_up()->mesh = {1};
  const auto write = [&](const Shape& buffer) {
    folder.Write([&](std::uint64_t, const std::string& item, Document* document) {
      pickle::Arena& arena = document->arena;
      const auto plain = [&](const Shape& shape) {
        return document->AddTensor(0, DType::kF32, shape);
      };
      if (item == "model") {
        pickle::Node* root = arena.Dict(true);
        Set(arena, root, "first", plain(buffer));
        Set(arena, root, "layer.weight", plain({5, 3}));
        Set(arena, root, "last", plain({4}));
        document->root = root;
        return;
      }
      Node* slots = Mutable(document->root->Find("state")->value(0));
      for (const char* state : {"exp_avg", "exp_avg_sq"}) Set(arena, slots, state, plain({5, 3}));
    });
  };
  write({4});
  const auto read = folder.Read();
  ASSERT_TRUE(read) << read.error().message;
  ASSERT_EQ(read->params.size(), 3U);
  for (const Param& param : read->params) {
    EXPECT_EQ(param.kind == ParamKind::kTrainable, param.name == "layer.weight") << param.name;
  }
  write({5, 3});  // it may be the buffer that has no state
  ExpectRefused(folder, Errc::kUnsupported, "which is which");
}

TEST(DTensor, HyperParametersThatAreTensorsAreRead) {
  Folder folder;
  const auto set = [&](const std::string& of_second) {
    folder.Write([&](std::uint64_t rank, const std::string& item, Document* document) {
      if (item != "optim") return;
      Node* group = Mutable(document->root->Find("param_groups")->items[0]);
      const std::string half("\0\0\0\x3f", 4);
      Set(document->arena, group, "lr",
          document->AddInline(rank == 1 ? of_second : half, DType::kF32, {}));
    });
  };
  set(std::string("\0\0\0\x3f", 4));
  const auto read = folder.Read();
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(read->groups[0].hyper.lr, 0.5);
  EXPECT_EQ(read->groups[0].options->Find("lr")->real, 0.5);
  ASSERT_EQ(read->groups[0].tensors.size(), 1U);
  EXPECT_EQ(read->groups[0].tensors[0].state, "lr");
  set(std::string("\0\0\x80\x3f", 4));
  ExpectRefused(folder, Errc::kBadInput, "hyperparameters");
}

TEST(DTensor, AMeshThatLeadsBackToItselfIsRead) {
  Folder folder;
  folder.Write([](std::uint64_t, const std::string&, Document* document) {
    Node* mesh = ObjectIn(document, "DeviceMesh");
    Node* root = CopyDict(document->arena, mesh->state);
    Set(document->arena, Mutable(mesh->state), "_root_mesh",
        document->arena.Object("torch.distributed.device_mesh.DeviceMesh", root));
  });
  const auto read = folder.Read();
  EXPECT_TRUE(read) << read.error().message;
}

TEST(DTensor, NamesOfProcessGroups) {
  using Names = std::vector<std::string>;
  EXPECT_EQ(GroupNames({4}, {2}), (Names{"0"}));
  EXPECT_EQ(GroupNames({2, 2}, {0, 1}), (Names{"2", "3"}));
  EXPECT_EQ(GroupNames({2, 2}, {1, 0}), (Names{"1", "4"}));
  EXPECT_EQ(GroupNames({2, 3}, {1, 2}), (Names{"3", "5"}));
}

TEST(DTensor, UnitsOfFlatVectorsFollowFromLengths) {
  const std::vector<std::string_view> names = {
      "embed.w",    "layers.0.a", "layers.0.experts.0.w", "layers.0.experts.1.w",
      "layers.1.a", "head.w"};
  const std::vector<Shape> shapes = {{5}, {3}, {2, 2}, {2, 2}, {7}, {4}};
  const auto blocks = UnitsOfLengths(names, shapes, {5, 6, 4}, 2);
  ASSERT_TRUE(blocks) << blocks.error().message;
  EXPECT_EQ(blocks->index, BlockIndex::kFirst);
  EXPECT_EQ(blocks->units[0].params, (std::vector<std::uint32_t>{0, 5}));
  EXPECT_EQ(blocks->units[1].offsets, (std::vector<std::uint64_t>{0, 3, 7}));
  const auto experts = UnitsOfLengths(names, shapes, {5, 2, 2, 2, 4}, 2);
  ASSERT_TRUE(experts) << experts.error().message;
  EXPECT_EQ(experts->index, BlockIndex::kLast);
  EXPECT_EQ(UnitsOfLengths(names, shapes, {5, 6, 5}, 2).error().code, Errc::kUnsupported);
}

TEST(DTensor, ATableOfAnotherVersionIsRefused) {
  Document document;
  Node* root = document.arena.Dict();
  Set(document.arena, root, "version", document.arena.String("3.0"));
  const auto bytes = pickle::Dump(root, {});
  EXPECT_EQ(ReadItemTable(bytes->bytes).error().code, Errc::kUnsupported);
  EXPECT_EQ(ReadItemTable("").error().code, Errc::kBadInput);
  EXPECT_EQ(ReadItemTable("garbage").error().code, Errc::kBadInput);
}

/// A verl optimizer numbers its parameters by their places in the model. FSDP1 lists parameters
/// outside of blocks first, but the group has the model's order, as other trainers list them.
TEST(DTensor, NumbersOfParametersAreTheirPlacesInTheModel) {
  const auto read = checkpoints::Read(fs::path(SW_SOURCE_DIR) / "tests/data/dtensor/flat_w2/ckpt");
  ASSERT_TRUE(read) << read.error().message;
  ASSERT_EQ(read->groups.size(), 1U);
  EXPECT_TRUE(std::is_sorted(read->groups[0].params.begin(), read->groups[0].params.end()));
  const auto layout = Resolve({.settings = {{"fsdp_version", "2"}}}, *read);
  ASSERT_TRUE(layout) << layout.error().message;
  const auto plan = MakePlan(*read, dynamic_cast<const FilesLayout&>(*layout->own));
  ASSERT_TRUE(plan) << plan.error().message;
  ASSERT_EQ(plan->groups.size(), 1U);
  std::vector<std::uint32_t> places;
  for (std::uint32_t i = 0; i < plan->params.size(); ++i) {
    if (plan->params[i].param.kind != ParamKind::kBuffer) places.push_back(i);
  }
  EXPECT_EQ(plan->groups.front().params, places);
}

TEST(DTensor, ATransposedViewIsNotTied) {
  const auto alias_of = [](const std::vector<std::uint64_t>& strides) {
    Folder folder;
    folder.Write([&](std::uint64_t, const std::string& item, Document* document) {
      if (item != "model") return;
      pickle::Arena& arena = document->arena;
      const Node* square = document->AddInline(std::string(16, '\1'), DType::kF32, {2, 2});
      pickle::Tensor view = *square->tensor;
      view.strides = strides;
      auto* root = const_cast<Node*>(document->root);
      pickle::Set(arena, root, "square", square);
      pickle::Set(arena, root, "view", arena.TensorOf(view));
    });
    const auto read = folder.Read();
    EXPECT_TRUE(read) << read.error().message;
    const auto view = std::find_if(read->params.begin(), read->params.end(),
                                   [](const Param& param) { return param.name == "view"; });
    return view == read->params.end() ? "absent" : view->alias_of;
  };
  EXPECT_EQ(alias_of({2, 1}), "square");
  EXPECT_EQ(alias_of({1, 2}), "");
}

/// FSDP1 does not shard among one rank, and refuses DTensors then.
TEST(DTensor, FlatVectorsNeedTwoShards) {
  const auto read = checkpoints::Read(fs::path(SW_SOURCE_DIR) / "tests/data/dtensor/flat_w2/ckpt");
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_TRUE(Resolve({.settings = {{"dp_shard", "3"}}}, *read));
  const auto alone = Resolve({.settings = {{"dp_shard", "1"}}}, *read);
  ASSERT_FALSE(alone);
  EXPECT_EQ(alone.error().code, Errc::kUnsupported);
  EXPECT_NE(alone.error().message.find("dp_shard=1"), std::string::npos);
  EXPECT_TRUE(Resolve({.settings = {{"dp_shard", "1"}, {"fsdp_version", "2"}}}, *read));
}

/// Checkpoints from PyTorch itself, made by tests/data/dtensor.py.
class RealFiles : public ::testing::TestWithParam<const char*> {
 protected:
  static fs::path Case() { return fs::path(SW_SOURCE_DIR) / "tests/data/dtensor" / GetParam(); }
};

TEST_P(RealFiles, HoldWhatTheTrainerHeld) {
  const auto read = checkpoints::Read(Case() / "ckpt");
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(read->origin, kName);
  EXPECT_EQ(read->iteration.value(), 3U);
  ExpectTensors(*read, Expected::Read(Case() / "expected.safetensors"));
}

TEST(DTensor, SeveralTensorParallelDimensionsAreOneRule) {
  const fs::path data = fs::path(SW_SOURCE_DIR) / "tests/data/dtensor/tp2x2_w4/ckpt";
  const auto read = checkpoints::Read(data);
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(read->layout.mesh.tp, 4U);
  for (const Param& param : read->params) {
    if (param.kind == ParamKind::kBuffer) continue;
    EXPECT_EQ(layout::Explain(param.rule), param.shape.size() == 2
                                               ? "mesh 2 x 2: rows (dim 0), columns (dim 1)"
                                               : "mesh 2 x 2: rows (dim 0), replicated")
        << param.name;
  }
  // The source's own axes stay, whether they are named or only counted.
  for (const auto& settings :
       std::vector<TargetSpec>{{}, {.settings = {{"tp", "4"}}}, {.settings = {{"tp", "2x2"}}}}) {
    const auto layout = Resolve(settings, *read);
    ASSERT_TRUE(layout) << layout.error().message;
    EXPECT_EQ(layout->Json(), read->layout.Json());
  }
  const auto wide = Resolve({.settings = {{"tp", "2x3"}, {"dp_shard", "2"}}}, *read);
  ASSERT_TRUE(wide) << wide.error().message;
  EXPECT_EQ(*wide->ranks, 12U);
  EXPECT_NE(wide->Json().find("fsdp:tp0:tp1"), std::string::npos) << wide->Json();
}

INSTANTIATE_TEST_SUITE_P(DTensor, RealFiles,
                         ::testing::Values("fsdp_w1", "fsdp_w3", "hsdp_w4", "fsdp2_tp2_w4",
                                           "flat_w2", "old_fsdp_w3", "accelerate_w2", "tp2x2_w4"),
                         [](const auto& one) { return TestName(one.param); });

}  // namespace
}  // namespace shardwright::checkpoints::dtensor
