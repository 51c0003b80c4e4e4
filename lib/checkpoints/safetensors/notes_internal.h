// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoints/model/checkpoint.h"
#include "support/base/result.h"

namespace shardwright::checkpoints::safetensors {

/// The key of `__metadata__` under which our files keep what the format has no place for. Nobody
/// else reads it, and the files are complete without.
inline constexpr std::string_view kNotesKey = "shardwright";

/// A tensor's place in the model.
struct TensorNote {
  std::uint64_t place = 0;  ///< in the module's order, over all files, tied names counted
  std::int64_t group = 0;   ///< parameter group, or one of these:
  static constexpr std::int64_t kFrozen = -1;
  static constexpr std::int64_t kBuffer = -2;
};

struct TieNote {
  std::string holder;  ///< the name that holds the data
  std::uint64_t place = 0;
};

struct GroupNote {
  HyperParams hyper;
  bool moe = false;
};

/// What a file of ours says in its notes.
struct Notes {
  std::vector<TensorNote> tensors;      ///< in the order of the file's bytes
  std::map<std::string, TieNote> tied;  ///< by the name that has no data
  std::map<std::string, ExpertId> experts;
  std::vector<GroupNote> groups;
  std::string state;           ///< of trained tensors: "weight" or "fp32"
  std::optional<DType> dtype;  ///< "fp32": of the compute weights
  std::string optimizer;       ///< as Checkpoint has it
  std::optional<std::uint64_t> iteration;
  std::optional<std::uint64_t> consumed_samples;
};

/// The notes as the text of a metadata value.
/// \param names  of the file's tensors, in the order of their bytes
/// Pure: same input, same bytes.
std::string NotesText(const Notes& notes, std::span<const std::string* const> names);

/// \error kBadInput  they are none, or of other tensors than `names`: somebody has changed the file
///        and kept its metadata. What they say is checked by itself only.
/// Pure.
Result<Notes> ParseNotes(std::string_view text, std::span<const std::string* const> names);

}  // namespace shardwright::checkpoints::safetensors
