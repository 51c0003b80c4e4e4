// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoints/model/format.h"
#include "checkpoints/model/source.h"
#include "engine/layout/shard_map.h"
#include "engine/plan/target.h"
#include "support/base/sink.h"

namespace shardwright::convert {

/// Sibling files of a tag folder: the copied ones and the omitted ones.
struct SiblingReport {
  std::vector<std::string> folders;                           ///< folders of the files
  std::vector<std::pair<std::string, std::uint64_t>> copied;  ///< name and bytes
  std::uint64_t bytes = 0;                                    ///< of all copied files
  std::vector<checkpoints::LeftOut> left_out;
  /// Files that are omitted because of the target, not of the source. One sentence each.
  std::vector<std::string> not_carried;
};

/// Lists the sibling files of a source as a catalogue stores them: all are copied.
SiblingReport ListSiblings(const checkpoints::SourceSet& set);

/// Adds the sibling files of a source to a target in save-folder form, and their paths
/// to the source map, in the order of the set. Reports the files that it omits: those
/// of ranks that the target lacks, those with a name that the target uses, and those
/// that a reader of the target's format would read as its own. A folder that contains
/// only weights (Format::only_weights) gets only the files that programs expect next
/// to a model's weights, and its config.json gets the element type of the weights.
/// \param format of the target
/// \param map    files of the set, in its order; sibling files are appended
/// \param ranks  of the target; empty for atoms, which suit any number of ranks
/// \param clone   kClone only if the root rank can access the source's files
SiblingReport AddSiblings(const checkpoints::SourceSet& set, const checkpoints::Format& format,
                          const std::optional<std::uint64_t>& ranks, plan::CloneMode clone,
                          layout::ShardMap* map, plan::Target* target, Sink& sink);

}  // namespace shardwright::convert
