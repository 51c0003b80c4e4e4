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

using pickle::Kind;
using pickle::Node;

Node* ObjectIn(Document* document, std::string_view cls, std::size_t number = 0) {
  for (Node& node : document->arena.nodes()) {
    const bool is_it = node.kind == Kind::kObject && node.callable->kind == Kind::kGlobal &&
                       node.callable->text.ends_with("." + std::string(cls));
    if (is_it && number-- == 0) return &node;
  }
  return nullptr;
}

Node* Mutable(const Node* node) { return const_cast<Node*>(node); }

/// Sets an attribute of the objects of a class.
void SetIn(Document* document, std::string_view cls, std::string_view key, const Node* value) {
  for (Node& node : document->arena.nodes()) {
    const bool is_it = node.kind == Kind::kObject && node.callable->kind == Kind::kGlobal &&
                       node.callable->text.ends_with("." + std::string(cls));
    if (is_it) Set(document->arena, Mutable(node.state), key, value);
  }
}

void ExpectRefused(const Folder& folder, Errc code, std::string_view words) {
  const auto read = folder.Read();
  ASSERT_FALSE(read) << words;
  EXPECT_EQ(read.error().code, code) << read.error().message;
  EXPECT_NE(read.error().message.find(words), std::string::npos) << read.error().message;
}

/// Expects that reading the folder fails after a change to one item of rank 1.
void ExpectRefusedWith(const std::string& changed, const std::function<void(Document*)>& change,
                       Errc code, std::string_view words) {
  Folder folder;
  folder.Write([&](std::uint64_t rank, const std::string& item, Document* document) {
    if (rank == 1 && item == changed) change(document);
  });
  ExpectRefused(folder, code, words);
}

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

TEST(DTensor, MissingAndForeignRanksAreNamed) {
  Folder folder;
  folder.Write();
  folder.Remove("optim_world_size_2_rank_1.pt");
  ExpectRefused(folder, Errc::kNotFound, "optim_world_size_2_rank_1.pt");
  folder.Write();
  folder.Text("model_world_size_2_rank_2.pt", FileOf([] {
                static Document document;
                document.root = document.arena.Dict();
                return std::ref(document);
              }()));
  ExpectRefused(folder, Errc::kBadInput, "model_world_size_2_rank_2.pt");
  folder.Remove("model_world_size_2_rank_2.pt");
  folder.Text(std::string(kVerlConfig), R"({"FSDP_version": 2, "world_size": 3})");
  ExpectRefused(folder, Errc::kUnsupported, "files of several worlds");
  folder.Text(std::string(kVerlConfig), R"({"FSDP_version": 7, "world_size": 2})");
  ExpectRefused(folder, Errc::kUnsupported, "FSDP_version 7");
}

/// Copies the model of rank 0 of two to another name and replaces the existing file.
void CopyRankZeroTo(const Folder& folder, const std::string& name) {
  const std::filesystem::path path(folder.path());
  std::filesystem::copy_file(path / "model_world_size_2_rank_0.pt", path / name,
                             std::filesystem::copy_options::overwrite_existing);
}

TEST(DTensor, FilesOfTwoWorldsInOneFolderAreRefused) {
  Folder folder;
  folder.Write();
  CopyRankZeroTo(folder, "model_world_size_3_rank_0.pt");
  ExpectRefused(folder, Errc::kUnsupported, "files of several worlds");
}

TEST(DTensor, OneRanksFileInThePlaceOfAnotherIsRefused) {
  Folder folder;
  folder.Write();
  CopyRankZeroTo(folder, "model_world_size_2_rank_1.pt");
  ExpectRefused(folder, Errc::kBadInput, "model_world_size_2_rank_1.pt: tensor \"layer.weight\"");
}

TEST(DTensor, TwoRanksOfOneCoordinateAreRefused) {
  Folder folder;
  folder.made_up()->shape = {4, 3};  // equal pieces: their shapes do not distinguish the ranks
  folder.Write([&](std::uint64_t rank, const std::string& item, Document* document) {
    if (rank != 1 || item != "model") return;
    SetIn(document, "DeviceMesh", "_coordinate_on_dim",
          document->arena.Tuple({document->arena.Int(0)}));
  });
  ExpectRefused(folder, Errc::kBadInput, "model_world_size_2_rank_1.pt: tensor \"layer.weight\"");
  ExpectRefused(folder, Errc::kBadInput, "rank 1 cannot stand at coordinate [0]");
  // The file of one rank in the place of another.
  folder.Write();
  CopyRankZeroTo(folder, "model_world_size_2_rank_1.pt");
  ExpectRefused(folder, Errc::kBadInput, "model_world_size_2_rank_1.pt: tensor \"layer.weight\"");
}

TEST(DTensor, ARankFileOfAnotherSaveIsRefused) {
  Folder folder;
  const auto later = [&](const std::string& item, std::size_t fill, const std::string& bytes) {
    folder.Write([&](std::uint64_t rank, const std::string& changed, Document* document) {
      if (rank != 1 || changed != item) return;
      document->fills[fill].kind = Fill::Kind::kInline;
      document->fills[fill].bytes = bytes;
    });
  };
  later("optim", 0, std::string("\0\0\x80\x40", 4));  // one step more
  ExpectRefused(folder, Errc::kBadInput, "optim_world_size_2_rank_1.pt");
  ExpectRefused(folder, Errc::kBadInput, "files of two saves");
  // A buffer that every rank has whole.
  folder.made_up()->shape = {4, 3};
  folder.Write([](std::uint64_t rank, const std::string& item, Document* document) {
    if (rank != 1 || item != "model") return;
    document->fills.back().kind = Fill::Kind::kInline;
    document->fills.back().bytes = std::string(16, '\2');
  });
  ExpectRefused(folder, Errc::kBadInput, "tensor \"positions\" buffer: the copies in");
  ExpectRefused(folder, Errc::kBadInput, "model_world_size_2_rank_1.pt");
}

TEST(DTensor, RanksThatContradictEachOtherAreRefused) {
  const auto model = [](const auto& change, Errc code, std::string_view words) {
    ExpectRefusedWith("model", change, code, words);
  };
  model([](Document* d) { Mutable(d->root)->items[0] = d->arena.String("other"); }, Errc::kBadInput,
        "other ranks do not have it");
  model([](Document* d) { Mutable(d->root)->items.resize(2); }, Errc::kBadInput,
        "\"positions\" is not there");
  model([](Document* d) { SetIn(d, "Shard", "dim", d->arena.Int(1)); }, Errc::kBadInput,
        "shard_order contradicts");
  model([](Document* d) { SetIn(d, "Shard", "dim", d->arena.Int(-1)); }, Errc::kBadInput,
        "Shard of no dimension");
  model([](Document* d) { SetIn(d, "Shard", "dim", d->arena.Int(2)); }, Errc::kBadInput,
        "shard_order contradicts");
  model([](Document* d) { SetIn(d, "DTensorSpec", "placements", d->arena.Tuple({})); },
        Errc::kBadInput, "placements () for a mesh of 1 dimension");
  model(
      [](Document* d) {
        SetIn(d, "DeviceMesh", "_coordinate_on_dim", d->arena.Tuple({d->arena.Int(0)}));
      },
      Errc::kBadInput, "mesh: ");
  model(
      [](Document* d) {
        SetIn(d, "DeviceMesh", "_coordinate_on_dim", d->arena.Tuple({d->arena.Int(2)}));
      },
      Errc::kBadInput, "coordinate");
  model([](Document* d) { SetIn(d, "DeviceMesh", "_coordinate_on_dim", d->arena.None()); },
        Errc::kBadInput, "rank 1 is not in it");
  model(
      [](Document* d) {
        SetIn(d, "DeviceMesh", "_mesh_dim_names", d->arena.Tuple({d->arena.String("tp")}));
      },
      Errc::kBadInput, "on rank 0 it is");
}

TEST(DTensor, PlacementsThatAreNoneAreRefused) {
  const auto placement = [](const std::string& cls, const auto& state) {
    return [cls, state](Document* d) {
      Node* node = d->arena.Dict();
      state(d, node);
      SetIn(d, "DTensorSpec", "shard_order", d->arena.None());
      SetIn(d, "DTensorSpec", "placements",
            d->arena.Tuple(
                {d->arena.Object("torch.distributed.tensor.placement_types." + cls, node)}));
    };
  };
  ExpectRefusedWith("model",
                    placement("Partial",
                              [](Document* d, Node* node) {
                                Set(d->arena, node, "reduce_op", d->arena.String("sum"));
                              }),
                    Errc::kUnsupported, "Partial");
  ExpectRefusedWith("model",
                    placement("_StridedShard",
                              [](Document* d, Node* node) {
                                Set(d->arena, node, "dim", d->arena.Int(0));
                                Set(d->arena, node, "split_factor", d->arena.Int(3));
                              }),
                    Errc::kBadInput, "fits no order");
  ExpectRefusedWith("model", placement("Replicate", [](Document*, Node*) {}), Errc::kBadInput,
                    "the piece of the rank is");
  ExpectRefusedWith("model", placement("Surprise", [](Document*, Node*) {}), Errc::kUnsupported,
                    "unknown");
}

TEST(DTensor, TheWrapperSaysWhatItsSpecSays) {
  const auto wrapper = [](Document* d) {
    return Mutable(ObjectIn(d, "_rebuild_from_type_v2")->args->items[2]);
  };
  const auto refused = [](const std::function<void(Document*)>& change, std::string_view words) {
    ExpectRefusedWith("model", change, Errc::kBadInput, words);
  };
  refused([&](Document* d) { wrapper(d)->items[4] = d->arena.Int(3); }, "wrapper with an offset");
  refused(
      [&](Document* d) {
        wrapper(d)->items[2] = d->arena.Tuple({d->arena.Int(6), d->arena.Int(3)});
      },
      "its spec says");
  refused([&](Document* d) { wrapper(d)->items[1] = d->arena.Global("torch.float64"); },
          "its spec says");
  refused(
      [](Document* d) {
        for (Node& node : d->arena.nodes()) {
          if (node.kind == Kind::kTensor && node.tensor->shape == Shape{2, 3}) {
            node.tensor->shape = {1, 3};
          }
        }
      },
      "its placement gives [2, 3]");
}

TEST(DTensor, TheOptimizerFitsTheModel) {
  const auto refused = [](const std::function<void(Document*)>& change, Errc code,
                          std::string_view words) {
    ExpectRefusedWith("optim", change, code, words);
  };
  const auto group = [](Document* d) { return Mutable(d->root->Find("param_groups")->items[0]); };
  const auto slots = [](Document* d) { return Mutable(d->root->Find("state")->items[1]); };
  refused([&](Document* d) { Set(d->arena, group(d), "lr", d->arena.Float(0.25)); },
          Errc::kBadInput, "hyper-parameters");
  refused(
      [&](Document* d) {
        d->fills[0].kind = Fill::Kind::kInline;
        d->fills[0].bytes = std::string(4, '\0');
      },
      Errc::kBadInput, "files of two saves");
  refused([&](Document* d) { Mutable(d->root->Find("state"))->items[0] = d->arena.Int(1); },
          Errc::kBadInput, "which is in no group");
  refused([&](Document* d) { Remove(slots(d), "exp_avg_sq"); }, Errc::kBadInput,
          "only other ranks have it");
  refused([](Document* d) { Mutable(d->root->Find("state"))->items.clear(); }, Errc::kBadInput,
          "other ranks have it");
  Folder folder;
  const auto everywhere = [&](const std::function<void(Document*)>& change, Errc code,
                              std::string_view words) {
    folder.Write([&](std::uint64_t, const std::string& item, Document* document) {
      if (item == "optim") change(document);
    });
    ExpectRefused(folder, code, words);
  };
  everywhere(
      [&](Document* d) { Set(d->arena, group(d), "params", d->arena.List({d->arena.Int(3)})); },
      Errc::kUnsupported, "are not 0, 1, 2");
  everywhere(
      [&](Document* d) {
        Set(d->arena, group(d), "params", d->arena.List({d->arena.Int(0), d->arena.Int(1)}));
      },
      Errc::kUnsupported, "which is which");
  everywhere(
      [&](Document* d) {
        Node* second = CopyDict(d->arena, group(d));
        Set(d->arena, second, "params", d->arena.List({}));
        Mutable(d->root->Find("param_groups"))->items.push_back(second);
      },
      Errc::kUnsupported, "2 parameter groups without names");
  everywhere(
      [&](Document* d) {
        Set(d->arena, slots(d), "exp_avg", d->AddTensor(0, DType::kF32, {3, 5}));
      },
      Errc::kBadInput, "exp_avg is [3, 5]");
}

TEST(DTensor, UnequalCopiesAreRefused) {
  Folder folder;
  folder.made_up()->mesh = {2, 2};
  folder.made_up()->splits = {layout::MeshSplit::Replicate(), layout::MeshSplit::Shard(0)};
  folder.Write([](std::uint64_t rank, const std::string& item, Document* document) {
    if (rank != 2 || item != "model") return;
    document->fills[0].kind = Fill::Kind::kInline;
    document->fills[0].bytes = std::string(36, '\2');
  });
  ExpectRefused(folder, Errc::kBadInput,
                "the copies in model_world_size_4_rank_0.pt and model_world_size_4_rank_2.pt");
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
  ExpectRefused(folder, Errc::kBadInput, "hyper-parameters");
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
  const std::vector<std::string> names = {
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
/// outside of blocks first.
TEST(DTensor, NumbersOfParametersAreTheirPlacesInTheModel) {
  const auto read = checkpoints::Read(fs::path(SW_SOURCE_DIR) / "tests/data/dtensor/flat_w2/ckpt");
  ASSERT_TRUE(read) << read.error().message;
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

INSTANTIATE_TEST_SUITE_P(DTensor, RealFiles,
                         ::testing::Values("fsdp_w1", "fsdp_w3", "hsdp_w4", "fsdp2_tp2_w4",
                                           "flat_w2", "old_fsdp_w3", "accelerate_w2"),
                         [](const auto& one) { return TestName(one.param); });

}  // namespace
}  // namespace shardwright::checkpoints::dtensor
