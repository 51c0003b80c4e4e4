// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include "checkpoints/dcp/parts_internal.h"
#include "checkpoints/dcp/pieces_internal.h"
#include "checkpoints/dcp/reader_internal.h"
#include "support/base/text.h"

namespace shardwright::checkpoints::dcp {

using pickle::Node;

std::pair<std::uint32_t, std::uint32_t> Folder::CopiesOf(std::uint32_t entry) const {
  const auto from = [&](std::uint32_t least) {
    const auto at = std::lower_bound(
        index.copies.begin(), index.copies.end(), least,
        [](const shardwright::dcp::Copy& copy, std::uint32_t of) { return copy.entry < of; });
    return static_cast<std::uint32_t>(at - index.copies.begin());
  };
  return {from(entry), from(entry + 1)};
}

StoredItem FolderReader::CopyOf(std::uint32_t number, std::uint32_t copy) const {
  const Folder& folder = folders_[number];
  StoredItem held;
  held.file = folder.source[folder.index.copies[copy].at.file];
  const shardwright::dcp::ItemValues& values = items_[held.file];
  held.item = values.items[folder.numbers[folder.first.back() + copy]];
  held.node = values.NodeOf(held.item);
  return held;
}

/// Returns true if two items are certainly equal: by values, or by checksums of their bytes.
bool FolderReader::SameValue(const StoredItem& a, const StoredItem& b) const {
  if (a.node == nullptr || b.node == nullptr) return false;
  if (!a.node->is_tensor()) return SameOptions(a.node, b.node);
  const pickle::Tensor& one = *a.node->tensor;
  const pickle::Tensor& other = *b.node->tensor;
  if (one.offset != other.offset || one.strides != other.strides) return false;
  const files::Storage& stored = StorageOf(a, one.storage);
  const files::Storage& again = StorageOf(b, other.storage);
  return stored.bytes == again.bytes && stored.crc32 && stored.crc32 == again.crc32;
}

/// Returns true if two tensors of one shape certainly differ. Compares the elements
/// if they are few, otherwise the checksums of storages that contain nothing else.
bool FolderReader::AreDifferent(const StoredItem& a, const StoredItem& b) const {
  const auto bytes = BytesOf(a);
  const auto again = BytesOf(b);
  if (bytes && again) return *bytes != *again;
  const std::uint64_t all = Elems(a.node->tensor->shape) * ItemSize(a.node->tensor->dtype);
  const files::Storage& stored = StorageOf(a, a.node->tensor->storage);
  const files::Storage& other = StorageOf(b, b.node->tensor->storage);
  return a.node->tensor->strides == b.node->tensor->strides && stored.bytes == all &&
         other.bytes == all && stored.crc32 && other.crc32 && *stored.crc32 != *other.crc32;
}

/// Fails if ranks saved different values under one name, unless it is an extra. Tensors
/// without checksums become replicas in the map, which --verify=replicas compares.
Status FolderReader::CompareCopy(std::uint32_t folder, std::uint32_t number) {
  const shardwright::dcp::Copy& copy = folders_[folder].index.copies[number];
  const EntryRef ref{folder, copy.entry};
  const Sorted& sorted = sorted_[folder][copy.entry];
  const StoredItem first = ItemOf(ref, copy.chunk);
  const StoredItem other = CopyOf(folder, number);
  if (sorted.kind == Sorted::Kind::kExtra) {
    if (SameValue(first, other)) return {};
    std::string name = Quoted(At(ref).name);
    if (differing_.empty() || differing_.back() != name) differing_.push_back(std::move(name));
    return {};
  }
  bool same = true;
  if (At(ref).is_tensor) {
    same = !AreDifferent(first, other);
  } else {
    same = (first.node == nullptr && other.node == nullptr) || SameValue(first, other);
  }
  if (same) return {};
  return Fail(Errc::kBadInput, Where(ref), ": ", source_.files[first.file].name, " and ",
              source_.files[other.file].name, " have different values");
}

Status FolderReader::CompareCopies() {
  for (std::uint32_t folder = 0; folder < folders_.size(); ++folder) {
    for (std::uint32_t i = 0; i < folders_[folder].index.copies.size(); ++i) {
      SW_TRY(CompareCopy(folder, i));
    }
  }
  if (differing_.empty()) return {};
  out_.left_out.push_back("values that ranks other than the first saved under the same name: " +
                          FirstFew(differing_));
  return {};
}

}  // namespace shardwright::checkpoints::dcp
