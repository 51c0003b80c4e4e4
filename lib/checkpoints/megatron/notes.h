// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoints/model/checkpoint.h"
#include "files/pickle/node.h"
#include "support/base/result.h"

namespace shardwright::checkpoints::megatron {

/// Key in the common state with the information that names and positions do not
/// contain, for models of other programs than Megatron. Only Shardwright reads it.
inline constexpr std::string_view kNotesKey = "shardwright";

/// Contents of the notes.
struct Notes {
  std::vector<Param> params;  ///< all, in model order: only name, kind,
                              ///< alias, group, expert and scalars
  std::vector<Group> groups;  ///< only hyper and moe
  std::string optimizer;
  std::string order_unknown;  ///< as Checkpoint::order_unknown
};

/// Builds the notes. Pure: equal checkpoints yield equal notes.
const pickle::Node* NotesNode(pickle::Arena& arena, const Checkpoint& checkpoint);

/// Parses the notes. \error kBadInput  they have another form
Result<Notes> ParseNotes(const pickle::Node* node);

}  // namespace shardwright::checkpoints::megatron
