// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "checkpoints/dtensor/local_shard_internal.h"
#include "checkpoints/dtensor/mesh_internal.h"
#include "checkpoints/dtensor/names_internal.h"
#include "checkpoints/registry.h"
#include "files/torch_pt/writer.h"
#include "same_checkpoint.h"
#include "support/base/crc32.h"

namespace shardwright::checkpoints::dtensor {

/// The bytes of a torch.save file: storages have `bytes` where they are known, otherwise ones.
inline std::string FileOf(const Document& document) {
  const auto layout = torch_pt::Layout::Make(document.root, document.storages);
  EXPECT_TRUE(layout) << layout.error().message;
  std::string file(layout->file_bytes(), '\0');
  std::vector<std::uint32_t> crcs;
  for (std::size_t i = 0; i < layout->storage_count(); ++i) {
    std::string payload(layout->payload_bytes(i), '\1');
    if (document.fills[i].kind == Fill::Kind::kInline) payload = document.fills[i].bytes;
    file.replace(layout->payload_offset(i), payload.size(), payload);
    crcs.push_back(Crc32(std::as_bytes(std::span(payload))));
  }
  for (const auto& piece : layout->Frame(crcs)) {
    file.replace(piece.offset, piece.bytes.size(), piece.bytes);
  }
  return file;
}

/// One made-up tensor of a model, spread over a mesh of one dimension or two.
struct MadeUp {
  std::string name = "layer.weight";
  Shape shape = {5, 3};
  std::vector<std::uint64_t> mesh = {2};
  std::vector<layout::MeshSplit> splits = {layout::MeshSplit::Shard(0)};
};

/// Writes verl files for all ranks of a mesh, after `change` has modified each one.
class Folder {
 public:
  using Change = std::function<void(std::uint64_t rank, const std::string& item, Document*)>;

  explicit Folder(MeshForm form = MeshForm::kNew) : form_(form) {}

  const MadeUp& tensor() const { return tensor_; }
  MadeUp* made_up() { return &tensor_; }
  std::string path() const { return (scratch_ / "").string(); }
  void Remove(const std::string& name) const { std::filesystem::remove(scratch_ / name); }
  void Text(const std::string& name, const std::string& text) const {
    std::ofstream(scratch_ / name, std::ios::binary) << text;
  }

  void Write(const Change& change = {}) const {
    std::uint64_t ranks = 1;
    for (const std::uint64_t size : tensor_.mesh) ranks *= size;
    for (std::uint64_t rank = 0; rank < ranks; ++rank) {
      for (const std::string item : {"model", "optim"}) {
        Document document;
        MakeItem(item, rank, ranks, &document);
        if (change) change(rank, item, &document);
        Text(RankFileName(Trainer::kVerl, item, ranks, rank), FileOf(document));
      }
    }
    Text(std::string(kVerlConfig),
         R"({"FSDP_version": 2, "world_size": )" + std::to_string(ranks) + "}");
  }

  Result<Checkpoint> Read() const {
    SW_TRY_ASSIGN(const SourceSet source, ScanSource({path()}));
    return ReadCheckpoint(source, Patterns());
  }

 private:
  const pickle::Node* Tensor(std::uint64_t rank, std::uint64_t ranks, Document* document,
                             const pickle::Node** mesh) const {
    DeviceMesh device;
    device.form = form_;
    device.device = "cuda";
    device.sizes = tensor_.mesh;
    device.strides = ContiguousStrides(tensor_.mesh);
    device.coordinate = layout::CoordinateOf(tensor_.mesh, rank);
    device.groups = GroupNames(device.sizes, device.coordinate);
    device.names = {"ddp", "fsdp"};
    if (device.sizes.size() == 1) device.names = {"fsdp"};
    for (std::uint64_t i = 0; i < ranks; ++i) device.ranks.push_back(i);
    device.all_ranks = device.ranks;
    const auto piece =
        layout::PieceAt(tensor_.shape, tensor_.mesh, tensor_.splits, device.coordinate);
    const pickle::Node* local = document->AddTensor(0, DType::kF32, piece->sizes);
    if (*mesh == nullptr) *mesh = MeshNode(*document, device, rank);
    return DTensorNode(document->arena, local, *mesh, form_, tensor_.mesh, tensor_.splits,
                       tensor_.shape, DType::kF32);
  }

  void MakeItem(const std::string& item, std::uint64_t rank, std::uint64_t ranks,
                Document* document) const {
    pickle::Arena& arena = document->arena;
    const pickle::Node* mesh = nullptr;
    pickle::Node* root = arena.Dict(item == "model");
    if (item == "model") {
      Set(arena, root, tensor_.name, Tensor(rank, ranks, document, &mesh));
      Set(arena, root, "positions", document->AddTensor(0, DType::kF32, {4}));
      document->root = root;
      return;
    }
    pickle::Node* slots = arena.Dict();
    Set(arena, slots, "step", document->AddInline(std::string("\0\0\x40\x40", 4), DType::kF32, {}));
    for (const char* state : {"exp_avg", "exp_avg_sq"}) {
      Set(arena, slots, state, Tensor(rank, ranks, document, &mesh));
    }
    pickle::Node* states = arena.Dict();
    states->items = {arena.Int(0), slots};
    pickle::Node* group = arena.Dict();
    Set(arena, group, "lr", arena.Float(0.5));
    Set(arena, group, "params", arena.List({arena.Int(0)}));
    Set(arena, root, "state", states);
    Set(arena, root, "param_groups", arena.List({group}));
    document->root = root;
  }

  Scratch scratch_;
  MeshForm form_;
  MadeUp tensor_;
};

/// Returns the object of a class with this number, or null if there are fewer.
inline pickle::Node* ObjectIn(Document* document, std::string_view cls, std::size_t number = 0) {
  for (pickle::Node& node : document->arena.nodes()) {
    const bool is_it = node.kind == pickle::Kind::kObject &&
                       node.callable->kind == pickle::Kind::kGlobal &&
                       node.callable->text.ends_with("." + std::string(cls));
    if (is_it && number-- == 0) return &node;
  }
  return nullptr;
}

inline pickle::Node* Mutable(const pickle::Node* node) { return const_cast<pickle::Node*>(node); }

/// Sets an attribute of the objects of a class.
inline void SetIn(Document* document, std::string_view cls, std::string_view key,
                  const pickle::Node* value) {
  for (pickle::Node& node : document->arena.nodes()) {
    const bool is_it = node.kind == pickle::Kind::kObject &&
                       node.callable->kind == pickle::Kind::kGlobal &&
                       node.callable->text.ends_with("." + std::string(cls));
    if (is_it) Set(document->arena, Mutable(node.state), key, value);
  }
}

inline void ExpectRefused(const Folder& folder, Errc code, std::string_view words) {
  const auto read = folder.Read();
  ASSERT_FALSE(read) << words;
  EXPECT_EQ(read.error().code, code) << read.error().message;
  EXPECT_NE(read.error().message.find(words), std::string::npos) << read.error().message;
}

/// Expects that reading the folder fails after a change to one item of rank 1.
inline void ExpectRefusedWith(const std::string& changed,
                              const std::function<void(Document*)>& change, Errc code,
                              std::string_view words) {
  Folder folder;
  folder.Write([&](std::uint64_t rank, const std::string& item, Document* document) {
    if (rank == 1 && item == changed) change(document);
  });
  ExpectRefused(folder, code, words);
}

/// Copies the model of rank 0 of two to another name and replaces the existing file.
inline void CopyRankZeroTo(const Folder& folder, const std::string& name) {
  const std::filesystem::path path(folder.path());
  std::filesystem::copy_file(path / "model_world_size_2_rank_0.pt", path / name,
                             std::filesystem::copy_options::overwrite_existing);
}

}  // namespace shardwright::checkpoints::dtensor
