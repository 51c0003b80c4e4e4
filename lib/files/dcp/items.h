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

/// An item that a data file must have.
struct Wanted {
  Place at;
  bool is_tensor = false;
  DType dtype = DType::kF32;  ///< is_tensor
  Shape sizes;                ///< is_tensor: of its box
  std::string name;           ///< for messages
};

/// All items of one data file. The metadata's header is a pickle of ours: a tuple of the list of
/// their different pickles, as bytes, and of numbers into it, 32 bits little-endian, one for each
/// item in the order in which they lie; ItemValues has numbers that are none. Its storages are
/// those of one item after another, each in the order in which its pickle first uses them. So items
/// that are alike, as all steps and many small tensors, share what describes them.
struct FileItems {
  files::ContainerMetadata metadata;
  std::map<std::uint32_t, std::string> inlined;  ///< as checkpoints::Container
  std::vector<zstd::CompressedItem> stretches;   ///< likewise
};

/// Looks into the items of a data file; payloads of tensors stay unread, but for small ones.
/// \param wanted        in the order in which they lie
/// \param transforms    Index::transforms
/// \param inline_bytes  the most bytes of a storage whose payload is read
/// \error kBadInput  items that overlap, end after the file does or before it, or are not what the
///        index says; kUnsupported  an unknown transform; kLimit
/// Local; reads the file, compressed items whole.
Result<FileItems> ReadItems(const os::File& file, std::span<const Wanted> wanted,
                            const std::vector<std::vector<std::string>>& transforms,
                            std::uint64_t inline_bytes);

/// The values of a FileItems' metadata.
struct ItemValues {
  /// An item that is not understood: one storage, which is all of its bytes.
  static constexpr std::uint32_t kRaw = ~std::uint32_t{0};
  /// One that lies where the item before it lies, and has its storages. Items have its value here.
  static constexpr std::uint32_t kAsBefore = kRaw - 1;

  struct Item {
    std::uint32_t value = kRaw;  ///< into values
    std::uint32_t storage = 0;   ///< its first one, into the metadata's storages
  };
  /// What is different. Storages of their tensors count from an item's first one.
  std::vector<pickle::Graph> values;
  std::vector<Item> items;

  /// Null for one that is not understood.
  const pickle::Node* NodeOf(const Item& item) const {
    return item.value == kRaw ? nullptr : values[item.value].root;
  }
};

/// \error kBadInput  the metadata is no list of items, or they do not have the storages that their
///        pickles ask for
/// Pure.
Result<ItemValues> ParseItems(const files::ContainerMetadata& metadata);

}  // namespace shardwright::dcp
