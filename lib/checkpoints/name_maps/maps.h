// SPDX-License-Identifier: Apache-2.0
// lib/checkpoints/name_maps: translates parameter names and shapes between programs.
// A map (patterns/maps/*.json) lists the names and shapes of a model family's
// tensors in several naming schemes: Hugging Face, torchtitan, Megatron-Core, ...
// ApplyMap converts a checkpoint from one naming scheme to another without moving
// any bytes: every new tensor consists of fragments of the old tensors' arrays,
// with cuts that apply the map. All functions are pure. Source: docs/maps.md.

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoints/model/checkpoint.h"
#include "checkpoints/tp_rules/patterns.h"
#include "support/base/result.h"

namespace shardwright::checkpoints {

/// Sizes of a model by their names in a map: {"kv_heads", 8}.
using ModelSizes = std::map<std::string, std::uint64_t>;

/// Reads a Hugging Face `config.json`: its strings, non-negative integers and booleans.
/// \error kBadInput, kLimit  as json::Parse, or the text is not a JSON object
Result<ModelConfig> FactsIn(std::string_view config, const std::string& where);

/// A parsed and checked map of a model family.
class ModelMap {
 public:
  /// \param origin  names the file in messages
  /// \error kBadInput  not valid against docs/maps.schema.json, or a rule with different
  ///        elements in its naming schemes; the message names file, rule and naming scheme
  static Result<ModelMap> Parse(std::string_view text, const std::string& origin);
  /// Returns a map that ships with the program. \error kNotFound  lists the available maps
  static Result<ModelMap> BuiltIn(std::string_view name);
  /// Returns the names of the maps that ship with the program, sorted.
  static std::vector<std::string> BuiltInNames();

  /// "patterns/maps/llama.json"
  const std::string& origin() const;
  /// Name of the map ("llama"), and names of its naming schemes in the order of the file.
  const std::string& name() const;
  std::vector<std::string> sides() const;
  /// Returns the names of the sizes that callers may specify, sorted.
  std::vector<std::string> sizes() const;
  /// Returns the map's sizes that the model config contains; ignores values of the wrong type.
  ModelSizes SizesIn(const ModelConfig& facts) const;
  /// Returns the model config's values that follow from sizes of this map. Inverts SizesIn.
  ModelConfig ConfigOf(const ModelSizes& sizes) const;
  /// Returns the values that identify a model of this map ("model_type=llama"), if any do.
  std::optional<std::string> ToldBy(const ModelConfig& facts) const;

  struct Impl;
  const Impl& impl() const { return *impl_; }

 private:
  std::shared_ptr<const Impl> impl_;
};

/// Options of ApplyMap.
struct MapUse {
  std::string from;        ///< naming scheme of the source; empty: detected from its names
  std::string to;          ///< naming scheme of the result; empty: the other one of two
  ModelSizes sizes;        ///< sizes given by the user; those that the map does not use are ignored
  ModelSizes config = {};  ///< sizes from the model's config, for names that `sizes` lacks
};

struct Mapped {
  Checkpoint checkpoint;
  std::string from;
  std::string to;
  ModelSizes sizes;  ///< all sizes that the rules used, including those derived from shapes
  /// Old names of tensors that programs with the target naming scheme compute themselves.
  std::vector<std::string> left_behind;
};

/// Returns the naming schemes with rules for every name of a checkpoint,
/// ordered by the number of names that specific rules cover, highest first.
/// Pure.
std::vector<std::string> SidesOf(const ModelMap& map, const Checkpoint& checkpoint);

/// The message of ApplyMap about a size that it cannot derive ends with this and "NAME=N".
inline constexpr std::string_view kSizesFlag = " --map-sizes ";

/// Converts a checkpoint to the names and shapes of another naming scheme. Uses every element of
/// every tensor once. Parameters that are merged need the same group, step, kind, type and states.
/// \param patterns  rules for how tensor parallelism shards the new parameters
/// \error kUnsupported  a parameter that no rule covers (the message contains the rule to
///        add), a rule without the target scheme, or parameters that cannot be merged;
///        kBadInput  missing parts, or shapes that do not match the rule; kUsage  unknown
///        sizes, or naming schemes that do not exist or do not match the checkpoint
/// Pure.
Result<Mapped> ApplyMap(const ModelMap& map, const MapUse& use, Checkpoint source,
                        const Patterns& patterns);

}  // namespace shardwright::checkpoints
