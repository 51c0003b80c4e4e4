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

/// What became of the files beside a tag folder.
struct SiblingReport {
  std::vector<std::string> folders;                           ///< where they lie
  std::vector<std::pair<std::string, std::uint64_t>> copied;  ///< name and bytes
  std::uint64_t bytes = 0;                                    ///< of all copied ones
  std::vector<checkpoints::LeftOut> left_out;
  /// What the target, not the source, is the reason for that it is left out: a sentence each.
  std::vector<std::string> not_carried;
};

/// What a catalogue holds of the siblings that a source was searched for: all of them.
SiblingReport ListSiblings(const checkpoints::SourceSet& set);

/// Adds the siblings that a source was searched for to a target in save-folder form, and their
/// files to the source map, in the set's order. Says what is left out: files of ranks that
/// the target does not have, names that the target needs itself, and files that a reader of the
/// target's format would take for its own. Into a folder of weights alone (Format::only_weights)
/// go only files that programs expect next to a model's weights, and config.json gets the element
/// type of the weights.
/// \param format of the target
/// \param map    files of the set, in its order; siblings are added after them
/// \param ranks  of the target; none for atoms, which are for any number of ranks
/// \param clone   kClone only where the source's files are seen by the root
SiblingReport AddSiblings(const checkpoints::SourceSet& set, const checkpoints::Format& format,
                          const std::optional<std::uint64_t>& ranks, plan::CloneMode clone,
                          layout::ShardMap* map, plan::Target* target, Sink& sink);

}  // namespace shardwright::convert
