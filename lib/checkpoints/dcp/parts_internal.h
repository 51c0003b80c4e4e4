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
  /// Of a copy: 1 + its number in Index::copies.
  std::uint32_t copy = 0;
};

/// The text of an index, and what messages call it.
struct IndexText {
  std::string_view name;  ///< without a folder: ".metadata", "__3.metadata"
  std::string_view text;
  std::string where;
};

/// Understands the index of one folder, or those of all ranks that saved there: one of them is as
/// if they had saved together.
/// \param texts  one, or several by rank
/// \error as shardwright::dcp::ReadIndex; kBadInput  ranks disagree, or one is missing
Result<shardwright::dcp::Index> UnderstandIndexes(const std::vector<IndexText>& texts);

/// The items of every file of an index, in the order in which they lie.
std::vector<std::vector<ItemRef>> ItemsByFile(const shardwright::dcp::Index& index);

/// Where an item lies.
const shardwright::dcp::Place& PlaceOf(const shardwright::dcp::Index& index, const ItemRef& ref);

/// What its data file must have there.
shardwright::dcp::Wanted WantedOf(const shardwright::dcp::Index& index, const ItemRef& ref);

/// The folder in the name of a file, with a slash at its end, or nothing.
std::string_view FolderOf(std::string_view name);

/// The name of a model's or optimizer's folder, as Accelerate and transformers have them.
bool IsModelFolder(std::string_view name);
bool IsOptimizerFolder(std::string_view name);

}  // namespace shardwright::checkpoints::dcp
