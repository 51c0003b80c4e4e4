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

/// The key in `__metadata__` for information that the format itself cannot
/// store. Only Shardwright reads it; the files are complete without it.
inline constexpr std::string_view kNotesKey = "shardwright";

/// A tensor's position in the model.
struct TensorNote {
  std::uint64_t place = 0;  ///< in the module's order, over all files; tied names count
  std::int64_t group = 0;   ///< parameter group, or one of these:
  static constexpr std::int64_t kFrozen = -1;
  static constexpr std::int64_t kBuffer = -2;
};

struct TieNote {
  std::string holder;  ///< the name that stores the data
  std::uint64_t place = 0;
};

struct GroupNote {
  HyperParams hyper;
  bool moe = false;
};

/// Content of the notes in one of our files.
struct Notes {
  std::vector<TensorNote> tensors;      ///< in the order of the tensors' bytes in the file
  std::map<std::string, TieNote> tied;  ///< by the tied name, which stores no data
  std::map<std::string, ExpertId> experts;
  std::vector<GroupNote> groups;
  std::string state;           ///< state of trained tensors: "weight" or "fp32"
  std::optional<DType> dtype;  ///< if `state` is "fp32": type of the compute weights
  std::string optimizer;       ///< as in Checkpoint
  std::optional<std::uint64_t> iteration;
  std::optional<std::uint64_t> consumed_samples;
};

/// Serializes notes to the text of a metadata value.
/// \param names  of the file's tensors, in the order of their bytes
/// Pure: equal input yields equal bytes.
std::string NotesText(const Notes& notes, std::span<const std::string* const> names);

/// \error kBadInput  not notes, or notes for tensors other than `names`, because another
///        program edited the file and kept its metadata. Checks only the notes themselves.
/// Pure.
Result<Notes> ParseNotes(std::string_view text, std::span<const std::string* const> names);

}  // namespace shardwright::checkpoints::safetensors
