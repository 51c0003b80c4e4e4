// SPDX-License-Identifier: Apache-2.0
#include <functional>
#include <string>
#include <string_view>

#include "checkpoints/dtensor/dtensor.h"
#include "dtensor_folder.h"

// Folders that do not fit together.

namespace shardwright::checkpoints::dtensor {
namespace {

using pickle::Kind;
using pickle::Node;

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
  ExpectRefused(folder, Errc::kUnsupported, "different numbers of ranks");
  folder.Text(std::string(kVerlConfig), R"({"FSDP_version": 7, "world_size": 2})");
  ExpectRefused(folder, Errc::kUnsupported, "FSDP_version 1 or 2 expected, found 7");
}

TEST(DTensor, FilesOfTwoWorldsInOneFolderAreRefused) {
  Folder folder;
  folder.Write();
  CopyRankZeroTo(folder, "model_world_size_3_rank_0.pt");
  ExpectRefused(folder, Errc::kUnsupported, "different numbers of ranks");
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
  ExpectRefused(folder, Errc::kBadInput, "rank 1 cannot be at coordinate [0]");
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
  ExpectRefused(folder, Errc::kBadInput, "different saves");
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
        "\"positions\" is missing");
  model([](Document* d) { SetIn(d, "Shard", "dim", d->arena.Int(1)); }, Errc::kBadInput,
        "shard_order contradicts");
  model([](Document* d) { SetIn(d, "Shard", "dim", d->arena.Int(-1)); }, Errc::kBadInput,
        "Shard without a valid tensor dimension");
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
                    Errc::kBadInput, "no order of the splits fits");
  ExpectRefusedWith("model", placement("Replicate", [](Document*, Node*) {}), Errc::kBadInput,
                    "the local tensor is");
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
      "its DTensorSpec has");
  refused([&](Document* d) { wrapper(d)->items[1] = d->arena.Global("torch.float64"); },
          "its DTensorSpec has");
  refused(
      [](Document* d) {
        for (Node& node : d->arena.nodes()) {
          if (node.kind == Kind::kTensor && node.tensor->shape == Shape{2, 3}) {
            node.tensor->shape = {1, 3};
          }
        }
      },
      "its placement requires [2, 3]");
}

TEST(DTensor, TheOptimizerFitsTheModel) {
  const auto refused = [](const std::function<void(Document*)>& change, Errc code,
                          std::string_view words) {
    ExpectRefusedWith("optim", change, code, words);
  };
  const auto group = [](Document* d) { return Mutable(d->root->Find("param_groups")->items[0]); };
  const auto slots = [](Document* d) { return Mutable(d->root->Find("state")->items[1]); };
  refused([&](Document* d) { Set(d->arena, group(d), "lr", d->arena.Float(0.25)); },
          Errc::kBadInput, "hyperparameters");
  refused(
      [&](Document* d) {
        d->fills[0].kind = Fill::Kind::kInline;
        d->fills[0].bytes = std::string(4, '\0');
      },
      Errc::kBadInput, "different saves");
  refused([&](Document* d) { Mutable(d->root->Find("state"))->items[0] = d->arena.Int(1); },
          Errc::kBadInput, "which no parameter group lists");
  refused([&](Document* d) { Remove(slots(d), "exp_avg_sq"); }, Errc::kBadInput,
          "but other ranks have it");
  refused([](Document* d) { Mutable(d->root->Find("state"))->items.clear(); }, Errc::kBadInput,
          "other ranks have state of 1");
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
      Errc::kUnsupported, "0, 1, 2, ... expected");
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

}  // namespace
}  // namespace shardwright::checkpoints::dtensor
