// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/dtensor/item_table_internal.h"

#include <algorithm>

#include "checkpoints/dtensor/names_internal.h"
#include "files/pickle/reader.h"
#include "support/base/text.h"

namespace shardwright::checkpoints::dtensor {
namespace {

using pickle::Kind;
using pickle::Node;

tl::unexpected<Error> TableError(const std::string& what) {
  return BadInput(kItemTable, ": ", what);
}

Result<const Node*> NeedEntry(const Node* dict, std::string_view key) {
  const Node* value = dict->Find(key);
  if (value == nullptr) return TableError("no " + Quoted(key) + " in " + pickle::Describe(dict));
  return value;
}

Result<std::vector<std::uint64_t>> Counts(const Node* dict, std::string_view key) {
  SW_TRY_ASSIGN(const Node* value, NeedEntry(dict, key));
  auto counts = pickle::AsShape(value);
  if (!counts) return TableError(Quoted(key) + ": " + counts.error().message);
  return *std::move(counts);
}

Result<layout::MeshSplit> ListedSplit(const Node* node) {
  const Node* type = node->Find("type");
  if (type == nullptr || !type->is_string()) return TableError("a placement without a type");
  if (type->text == "Replicate") return layout::MeshSplit::Replicate();
  const auto dim = pickle::AsCount(node->Find("dim"));
  if (!dim || *dim > 0xFFFF)
    return TableError("a placement " + Quoted(type->text) + " without a dimension");
  const auto tensor_dim = static_cast<std::uint32_t>(*dim);
  if (type->text == "Shard") return layout::MeshSplit::Shard(tensor_dim);
  const auto factor = pickle::AsCount(node->Find("split_factor"));
  if (type->text == "StridedShard" && factor) {
    return layout::MeshSplit::StridedShard(tensor_dim, *factor);
  }
  return Fail(Errc::kUnsupported, kItemTable, ": unknown placement type ", Quoted(type->text));
}

Result<ListedTensor> ListedOf(const std::string& path, const Node* group) {
  ListedTensor tensor;
  tensor.path = path;
  SW_TRY_ASSIGN(tensor.ranks, Counts(group, "ranks"));
  SW_TRY_ASSIGN(const Node* sharding, NeedEntry(group, "sharding_metadata"));
  const Node* type = sharding->Find("type");
  if (type == nullptr || !type->is_string() || type->text != "DTensorShardingMetadata") {
    return Fail(Errc::kUnsupported, kItemTable, ": ", path,
                ": sharding of a DTensor expected, found another kind");
  }
  SW_TRY_ASSIGN(const Node* data, NeedEntry(sharding, "data"));
  SW_TRY_ASSIGN(tensor.shape, Counts(data, "global_shape"));
  const Node* dtype = data->Find("dtype");
  if (dtype != nullptr && dtype->is_string()) tensor.dtype = dtype->text;
  SW_TRY_ASSIGN(const Node* mesh, NeedEntry(data, "mesh_spec"));
  SW_TRY_ASSIGN(tensor.mesh, Counts(mesh, "mesh_shape"));
  SW_TRY_ASSIGN(const Node* placements, NeedEntry(data, "placements"));
  for (const Node* one : placements->items) {
    SW_TRY_ASSIGN(const layout::MeshSplit split, ListedSplit(one));
    tensor.splits.push_back(split);
  }
  return tensor;
}

Status CheckLayoutInfo(const std::string& item, const Node* info) {
  if (info == nullptr || !info->is_dict()) return {};
  for (std::size_t i = 0; i < info->entry_count(); ++i) {
    if (info->value(i)->is_none()) continue;
    return Fail(Errc::kUnsupported, kItemTable, ": item ", Quoted(item),
                " has a file layout of its own: only torch.save files are supported");
  }
  return {};
}

Result<ItemTable::Of> ItemOf(const std::string& name, const Node* entry) {
  ItemTable::Of item{name, {}};
  SW_TRY(CheckLayoutInfo(name, entry->Find("rank_to_layout_info")));
  SW_TRY_ASSIGN(const Node* paths, NeedEntry(entry, "nested_path_to_metadata"));
  if (!paths->is_dict()) return TableError("item " + Quoted(name) + " lists no paths");
  for (std::size_t i = 0; i < paths->entry_count(); ++i) {
    const Node* path = paths->key(i);
    const Node* groups = paths->value(i);
    if (!path->is_string() || !groups->is_list()) return TableError("a path without a list");
    for (const Node* group : groups->items) {
      SW_TRY_ASSIGN(ListedTensor tensor, ListedOf(path->text, group));
      item.tensors.push_back(std::move(tensor));
    }
  }
  return item;
}

}  // namespace

Result<ItemTable> ReadItemTable(std::string_view bytes) {
  if (bytes.empty()) return TableError("the file is missing");
  auto graph = pickle::Load(bytes);
  if (!graph) return Within(kItemTable, std::move(graph).error());
  const Node* root = graph->root;
  const Node* version = root->Find("version");
  if (version == nullptr || !version->is_string()) return TableError("no version");
  if (version->text != "2.0") {
    return Fail(Errc::kUnsupported, kItemTable, ": version 2.0 expected, found ", version->text);
  }
  ItemTable table;
  auto world = pickle::AsCount(root->Find("world_size"));
  if (!world) return TableError("world_size: " + world.error().message);
  table.world = *world;
  SW_TRY_ASSIGN(const Node* items, NeedEntry(root, "metadata"));
  if (!items->is_dict()) return TableError("no items");
  for (std::size_t i = 0; i < items->entry_count(); ++i) {
    if (!items->key(i)->is_string()) return TableError("an item without a name");
    SW_TRY_ASSIGN(ItemTable::Of item, ItemOf(items->key(i)->text, items->value(i)));
    table.items.push_back(std::move(item));
  }
  return table;
}

}  // namespace shardwright::checkpoints::dtensor
