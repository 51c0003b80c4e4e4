// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "checkpoints/dcp/dcp.h"
#include "files/dcp/index.h"
#include "support/base/result.h"

namespace shardwright::checkpoints::dcp {

/// Classification of an index entry.
struct Sorted {
  enum class Kind : std::uint8_t {
    kModel,   ///< a tensor of the model
    kSlot,    ///< optimizer state of a parameter
    kOption,  ///< of a parameter group, or of one parameter in the flat form
    kExtra,
  };
  Kind kind = Kind::kExtra;
  std::string_view name;    ///< of the parameter; empty for a nested option
  std::string_view key;     ///< of a slot or option
  std::uint64_t group = 0;  ///< of a nested option
  /// For an extra that is a tensor: index into Sorting::sets, if it belongs to one.
  std::optional<std::uint32_t> set = {};
};

/// Result of Sort: the naming of the entries of all indexes.
struct Sorting {
  Naming naming;
  std::vector<WeightSet> sets;  ///< the set that is read is first
  /// From the optimizer's names to the model's, if they differ.
  std::unordered_map<std::string_view, std::string_view> model_names;
  /// The weights were chosen by name, so the optimizer may train other weights.
  bool chosen_by_name = false;
};

/// Treatment of several optimizers.
enum class Optimizers : std::uint8_t {
  kOne,  ///< several are an error
  kAny,  ///< slots and options of all are accepted; the naming is that of one of them
};

/// Classifies the entries of all indexes and detects their naming.
/// \param indexes     one index, or those of the model's and the optimizer's folders
/// \param weights_of  the name of the set of weights to read, or empty
/// \param sorted      receives the classification by index and entry; views into the index
/// \error kUnsupported  states of several optimizers with Optimizers::kOne, or several sets
///        of weights and no way to find the model's; kUsage  no set has the name `weights_of`
/// Pure.
Result<Sorting> Sort(const std::vector<const shardwright::dcp::Index*>& indexes,
                     Optimizers optimizers, std::string_view weights_of,
                     std::vector<std::vector<Sorted>>* sorted);

}  // namespace shardwright::checkpoints::dcp
