// SPDX-License-Identifier: Apache-2.0
#include <map>
#include <unordered_map>
#include <utility>

#include "checkpoints/dcp/parts_internal.h"
#include "checkpoints/dcp/reader_internal.h"
#include "support/base/text.h"

// Reads the indexes of the folders, and locates the items of their entries in the data files.

namespace shardwright::checkpoints::dcp {

namespace file_format = shardwright::dcp;
using file_format::Entry;
using pickle::Node;

namespace {

/// Checks an item against its index. Scanned items always
/// match, but a catalogue may contain arbitrary values.
Status CheckItem(const file_format::Index& index, const ItemRef& ref, const Node* node,
                 const std::string& file) {
  const Entry& entry = index.entries[ref.entry];
  if (!entry.is_tensor) return {};
  const bool tensor = node != nullptr && node->is_tensor() && node->tensor->dtype == entry.dtype &&
                      node->tensor->shape == entry.chunks[ref.chunk].sizes;
  if (tensor) return {};
  return Fail(Errc::kBadInput, file, ": ", Quoted(entry.name), ": tensor ", Name(entry.dtype), " ",
              ToString(entry.chunks[ref.chunk].sizes), " expected, found ",
              (node == nullptr ? "bytes" : Describe(node)));
}

}  // namespace

Status FolderReader::ReadFolder(std::string folder_name,
                                const std::vector<std::uint32_t>& indexes) {
  Folder folder;
  folder.name = std::move(folder_name);
  std::vector<IndexText> texts;
  for (const std::uint32_t file : indexes) {
    const SourceFile& source = source_.files[file];
    if (source.containers.size() != 1) {
      return Fail(Errc::kBadInput, source.name, ": one pickle expected, found ",
                  source.containers.size());
    }
    texts.push_back({std::string_view(source.name).substr(folder.name.size()),
                     source.containers.front().metadata->header, source.name});
  }
  const std::string where = texts.front().where;
  folder.index_name = texts.size() == 1 ? texts.front().name : "__*.metadata";
  SW_TRY_ASSIGN(folder.index, UnderstandIndexes(texts));
  std::unordered_map<std::string_view, std::uint32_t> by_name;
  for (std::uint32_t i = 0; i < source_.files.size(); ++i)
    by_name.emplace(source_.files[i].name, i);
  const std::vector<std::vector<ItemRef>> items = ItemsByFile(folder.index);
  std::size_t count = 0;
  folder.first.reserve(folder.index.entries.size());
  for (const Entry& entry : folder.index.entries) {
    folder.first.push_back(static_cast<std::uint32_t>(count));
    count += entry.is_tensor ? entry.chunks.size() : 1;
  }
  folder.first.push_back(static_cast<std::uint32_t>(count));
  folder.numbers.resize(count + folder.index.copies.size());
  for (std::uint32_t i = 0; i < items.size(); ++i) {
    const std::string name = folder.name + folder.index.files[i];
    const auto found = by_name.find(name);
    if (found == by_name.end() || source_.files[found->second].containers.size() != 1) {
      return Fail(Errc::kNotFound, where, ": data file ", name, " listed in the index is missing");
    }
    folder.source.push_back(found->second);
    auto parsed =
        file_format::ParseItems(*source_.files[found->second].containers.front().metadata);
    if (!parsed) return Within(name, parsed.error());
    file_format::ItemValues& values = items_[found->second];
    values = *std::move(parsed);
    if (values.items.size() != items[i].size()) {
      return Fail(Errc::kBadInput, name, ": ", items[i].size(), " items expected, found ",
                  values.items.size());
    }
    for (std::uint32_t k = 0; k < items[i].size(); ++k) {
      SW_TRY(CheckItem(folder.index, items[i][k], values.NodeOf(values.items[k]), name));
      const ItemRef& ref = items[i][k];
      const std::size_t at =
          ref.copy > 0 ? folder.first.back() + ref.copy - 1 : folder.first[ref.entry] + ref.chunk;
      folder.numbers[at] = k;
    }
    for (const pickle::Graph& graph : values.values) own_->arenas.push_back(graph.arena);
  }
  folders_.push_back(std::move(folder));
  return {};
}

Status FolderReader::ReadFolders() {
  items_.resize(source_.files.size());
  struct Indexes {
    std::vector<std::uint32_t> common;
    std::map<std::uint64_t, std::uint32_t> by_rank;
  };
  std::map<std::string_view, Indexes> found;  // by folder
  for (std::uint32_t file = 0; file < source_.files.size(); ++file) {
    const std::string_view name = source_.files[file].name;
    const std::string_view folder = FolderOf(name);
    const std::string_view last = name.substr(folder.size());
    if (last == file_format::kIndexName) found[folder].common.push_back(file);
    if (const auto rank = file_format::RankOfIndex(last))
      found[folder].by_rank.emplace(*rank, file);
  }
  for (const auto& [folder, indexes] : found) {
    std::vector<std::uint32_t> all = indexes.common;
    for (const auto& [rank, file] : indexes.by_rank) {
      if (indexes.common.empty()) all.push_back(file);
    }
    SW_TRY(ReadFolder(std::string(folder), all));
  }
  if (folders_.empty()) return Fail(Errc::kNotFound, source_.tag, ": no .metadata");
  return ChooseFolders();
}

StoredItem FolderReader::ItemOf(EntryRef ref, std::uint32_t chunk) const {
  const Folder& folder = folders_[ref.folder];
  const Entry& entry = At(ref);
  StoredItem held;
  held.file = folder.source[(entry.is_tensor ? entry.chunks[chunk].at : entry.at).file];
  const file_format::ItemValues& values = items_[held.file];
  held.item = values.items[folder.numbers[folder.first[ref.entry] + chunk]];
  held.node = values.NodeOf(held.item);
  return held;
}

/// Returns the elements of a small contiguous tensor.
Result<std::string> FolderReader::BytesOf(const StoredItem& held) const {
  const pickle::Tensor& tensor = *held.node->tensor;
  const SourceFile& source = source_.files[held.file];
  const auto& inlined = source.containers.front().inlined;
  const auto found = inlined.find(held.item.storage + tensor.storage);
  const std::uint64_t bytes = Elems(tensor.shape) * ItemSize(tensor.dtype);
  const std::uint64_t first = tensor.offset * ItemSize(tensor.dtype);
  if (found == inlined.end() || first + bytes > found->second.size()) {
    return Fail(Errc::kUnsupported, source.name, ": number expected, found ", Describe(held.node));
  }
  return found->second.substr(first, bytes);
}

/// Returns an item as a document of its own.
Extra::Value FolderReader::ValueOf(const StoredItem& held) {
  Extra::Value value;
  const auto add = [&](torch_pt::Document::StorageRef ref, std::uint32_t storage) {
    const files::Storage& stored = StorageOf(held, storage);
    ref.bytes = stored.bytes;
    ref.offset = stored.offset;
    ref.crc32 = stored.crc32;
    value.document.storages.push_back(std::move(ref));
    value.members.push_back(map_.MemberOf(held.file, 0, held.item.storage + storage));
  };
  if (held.node == nullptr) {
    add({}, 0);
    return value;
  }
  const pickle::Graph& graph = items_[held.file].values[held.item.value];
  value.document.arena = graph.arena;
  value.document.root = graph.root;
  for (std::uint32_t i = 0; i < graph.storages.size(); ++i) {
    torch_pt::Document::StorageRef ref;
    ref.dtype = graph.storages[i].dtype;
    ref.untyped = graph.storages[i].untyped;
    ref.member = "data/" + graph.storages[i].key;
    add(std::move(ref), i);
  }
  return value;
}

}  // namespace shardwright::checkpoints::dcp
