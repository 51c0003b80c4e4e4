// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "files/container_metadata.h"
#include "files/dcp/index.h"
#include "files/pickle/node.h"
#include "files/pickle/reader.h"
#include "support/base/result.h"
#include "support/os/file.h"
#include "support/zstd/compressed_item.h"

namespace shardwright::dcp {

/// An item that must be in a data file.
struct Wanted {
  Place at;
  bool is_tensor = false;
  DType dtype = DType::kF32;  ///< is_tensor
  Shape sizes;                ///< is_tensor: sizes of its box
  std::string name;           ///< for messages
};

/// All items of one data file. The header of `metadata` is a pickle in this project's own
/// format: a tuple of the list of distinct item pickles, as bytes, and of one index into it per
/// item, in file order, as 32-bit little-endian numbers; ItemValues defines special indexes. The
/// storages are those of one item after the other, each in the order of first use in its pickle.
/// Items with equal pickles, such as all steps and many small tensors, thus share one pickle.
struct FileItems {
  files::ContainerMetadata metadata;
  std::map<std::uint32_t, std::string> inlined;  ///< see checkpoints::Container
  std::vector<zstd::CompressedItem> stretches;   ///< see checkpoints::Container
};

/// Reads the items of a data file, but of tensor payloads only small ones.
/// \param wanted        in file order
/// \param transforms    Index::transforms
/// \param inline_bytes  maximum size of a storage that is read with its payload
/// \error kBadInput  items overlap, end outside the file, or do not
///        match the index; kUnsupported  an unknown transform; kLimit
/// Local; reads the file, and all bytes of compressed items.
Result<FileItems> ReadItems(const os::File& file, std::span<const Wanted> wanted,
                            const std::vector<std::vector<std::string>>& transforms,
                            std::uint64_t inline_bytes);

/// The parsed items of a FileItems' metadata.
struct ItemValues {
  /// Marks an item that could not be parsed: it has one storage with all of its bytes.
  static constexpr std::uint32_t kRaw = ~std::uint32_t{0};
  /// Marks an item at the same place as the one before, which ParseItems replaces by its value.
  static constexpr std::uint32_t kAsBefore = kRaw - 1;

  struct Item {
    std::uint32_t value = kRaw;  ///< index into values
    std::uint32_t storage = 0;   ///< index of its first storage in the metadata
  };
  /// Distinct values. Storage numbers of their tensors start at an item's first storage.
  std::vector<pickle::Graph> values;
  std::vector<Item> items;

  /// Returns null for an item that could not be parsed.
  const pickle::Node* NodeOf(const Item& item) const {
    return item.value == kRaw ? nullptr : values[item.value].root;
  }
};

/// \error kBadInput  the metadata is not a list of items, or their
///        storages do not match those that their pickles use
/// Pure.
Result<ItemValues> ParseItems(const files::ContainerMetadata& metadata);

}  // namespace shardwright::dcp
