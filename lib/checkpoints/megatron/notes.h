// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoints/megatron/megatron.h"
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

/// Returns what CommonState wrote for a new run. Nothing if it wrote none.
/// \param common  the common state of a checkpoint with Shardwright's notes
/// Pure.
std::optional<NewRun> FindNewRun(const pickle::Node* common);

/// Returns the state of the learning rate's schedule. The run that resumes supplies all values
/// except the step, with --override-opt_param-scheduler. Without this flag it fails.
const pickle::Node* ScheduleNode(pickle::Arena& arena, const NewRun& run);

}  // namespace shardwright::checkpoints::megatron
