// SPDX-License-Identifier: Apache-2.0
// lib/checkpoints/name_maps: names and shapes of one model as several programs have them.
// A map (patterns/maps/*.json) says of the tensors of a model family which names and forms they
// have on each of its sides: Hugging Face, torchtitan, Megatron-Core, ... ApplyMap makes of a
// checkpoint with the names of one side the same checkpoint with those of another. It moves no
// byte: every new tensor has fragments in the arrays of the old ones, with cuts that lead through
// the map. All of it is pure. Source: docs/maps.md.

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

/// Sizes of a model by the names that a map gives them: {"kv_heads", 8}.
using ModelSizes = std::map<std::string, std::uint64_t>;

/// Facts of a `config.json` of Hugging Face: its texts, whole numbers and truth values.
/// \error kBadInput, kLimit  as json::Parse, or not an object
Result<ModelConfig> FactsIn(std::string_view config, const std::string& where);

/// A map of a model family, parsed and checked.
class ModelMap {
 public:
  /// \param origin  the file, for messages
  /// \error kBadInput  not valid against docs/maps.schema.json, or a rule whose sides do not hold
  ///        the same elements; names file, rule and side
  static Result<ModelMap> Parse(std::string_view text, const std::string& origin);
  /// A map that ships with the program. \error kNotFound  lists those that there are
  static Result<ModelMap> BuiltIn(std::string_view name);
  /// Names of the maps that ship with the program, sorted.
  static std::vector<std::string> BuiltInNames();

  /// "patterns/maps/llama.json"
  const std::string& origin() const;
  /// Name of the map ("llama"), and names of its naming schemes in the order of the file.
  const std::string& name() const;
  std::vector<std::string> sides() const;
  /// Names of the sizes that may be given, sorted.
  std::vector<std::string> sizes() const;
  /// What facts say about the sizes of the map; those of another kind say nothing.
  ModelSizes SizesIn(const ModelConfig& facts) const;
  /// The facts that tell a model of this map, "model_type=llama"; nothing if they do not.
  std::optional<std::string> ToldBy(const ModelConfig& facts) const;

  struct Impl;
  const Impl& impl() const { return *impl_; }

 private:
  std::shared_ptr<const Impl> impl_;
};

/// How a map is to be used.
struct MapUse {
  std::string from;  ///< side of the checkpoint; empty: found by its names
  std::string to;    ///< side that is asked for; empty: the other one of two
  ModelSizes sizes;  ///< as far as they are known; others than the map's are not looked at
};

struct Mapped {
  Checkpoint checkpoint;
  std::string from;
  std::string to;
  ModelSizes sizes;  ///< all that the rules have used, worked out from shapes too
  /// What the target side computes itself, by its old name.
  std::vector<std::string> left_behind;
};

/// Sides of a map whose rules cover every name of a checkpoint; those first that have most rules
/// for it.
/// Pure.
std::vector<std::string> SidesOf(const ModelMap& map, const Checkpoint& checkpoint);

/// The checkpoint with the names and shapes of another side. Every element of every tensor is used
/// once; parameters that become one need the same group, step, kind, type and states.
/// \param patterns  how tensor parallelism cuts the new parameters
/// \error kUnsupported  a parameter that no rule covers (the text has the rule to add), a rule that
///        lacks the side, parameters that cannot become one; kBadInput  parts that are missing,
///        shapes that are not the rule's; kUsage  sizes that nobody tells, sides that do not exist
///        or fit
/// Pure.
Result<Mapped> ApplyMap(const ModelMap& map, const MapUse& use, Checkpoint source,
                        const Patterns& patterns);

}  // namespace shardwright::checkpoints
