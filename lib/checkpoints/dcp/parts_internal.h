// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoints/model/source.h"
#include "files/dcp/index.h"
#include "files/dcp/items.h"
#include "support/base/result.h"

namespace shardwright::checkpoints::dcp {

/// One item of a data file: a chunk of a tensor, or an object.
struct ItemRef {
  std::uint32_t entry = 0;  ///< into Index::entries
  std::uint32_t chunk = 0;
  /// For a copy: 1 + its index in Index::copies. Otherwise 0.
  std::uint32_t copy = 0;
};

/// The text of an index file, and its name in messages.
struct IndexText {
  std::string_view name;  ///< without a folder: ".metadata", "__3.metadata"
  std::string_view text;
  std::string where;
};

/// Parses the index of one folder, or merges the indexes of all ranks that
/// saved there into one. The result is the same as that of a joint save.
/// \param texts  one, or several by rank
/// \error as shardwright::dcp::ReadIndex; kBadInput  ranks contradict each other or one is missing
Result<shardwright::dcp::Index> UnderstandIndexes(const std::vector<IndexText>& texts);

/// Returns the items of every file of an index, in the order of their offsets.
std::vector<std::vector<ItemRef>> ItemsByFile(const shardwright::dcp::Index& index);

/// Returns the file and byte range of an item.
const shardwright::dcp::Place& PlaceOf(const shardwright::dcp::Index& index, const ItemRef& ref);

/// Returns the content that the index requires for an item of its data file.
shardwright::dcp::Wanted WantedOf(const shardwright::dcp::Index& index, const ItemRef& ref);

/// Returns the folder part of a file name with its trailing slash, or empty.
std::string_view FolderOf(std::string_view name);

/// Return true for folder names that Accelerate and transformers use for a model or an optimizer.
bool IsModelFolder(std::string_view name);
bool IsOptimizerFolder(std::string_view name);

}  // namespace shardwright::checkpoints::dcp
