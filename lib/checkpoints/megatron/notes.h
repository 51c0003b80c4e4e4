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

/// The key of the common state under which ours keeps what names and places do not tell of models
/// that are not Megatron's. Nobody else reads it.
inline constexpr std::string_view kNotesKey = "shardwright";

/// What the notes tell.
struct Notes {
  std::vector<Param> params;  ///< all, in the order of the model: name, kind, alias, group, expert
                              ///< and scalars alone
  std::vector<Group> groups;  ///< hyper and moe alone
  std::string optimizer;
  std::string order_unknown;  ///< as Checkpoint has it
};

/// Pure: same checkpoint, same notes.
const pickle::Node* NotesNode(pickle::Arena& arena, const Checkpoint& checkpoint);

/// \error kBadInput  they are of another form
Result<Notes> ParseNotes(const pickle::Node* node);

}  // namespace shardwright::checkpoints::megatron
