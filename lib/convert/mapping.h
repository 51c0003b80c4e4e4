// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "checkpoints/model/checkpoint.h"
#include "checkpoints/name_maps/maps.h"
#include "checkpoints/name_maps/model_config.h"
#include "checkpoints/registry.h"
#include "checkpoints/tp_rules/patterns.h"
#include "support/base/result.h"
#include "support/base/sink.h"
#include "support/comm/comm.h"

namespace shardwright::convert {

/// Maps of names and shapes that the user requests, as in --map and --map-sizes.
struct MapsAsked {
  /// Each NAME or FILE, then ":TO" or ":FROM:TO". Alternatively one entry "auto" or
  /// "auto:TO", for the map of the source's model family. Empty: names and shapes stay.
  std::vector<std::string> maps;
  std::string sizes;  ///< "kv_heads=8,head_dim=64", or empty
  /// For "auto" without a scheme: possible naming schemes of the target, in order of preference.
  std::vector<std::string> sides;
  /// The target has weights alone, and they are in the model: parameters that only the optimizer
  /// stores in a fused form are not split.
  bool weights_alone = false;
  /// For "auto" without a scheme: a checkpoint with the wanted names. Null: `sides` decides.
  const checkpoints::Checkpoint* like = nullptr;
};

/// One parsed --map option.
struct MapChoice {
  std::optional<checkpoints::ModelMap> map;  ///< empty: still to be found
  checkpoints::MapUse use;
  std::string text;  ///< the map's name, or the text of its file, for fingerprints
};

/// A map that was applied to an opened source.
struct MapUsed {
  std::string name;
  std::string from;
  std::string to;
  checkpoints::ModelSizes sizes;
  std::string map;                       ///< as MapChoice::text
  std::string why;                       ///< reason why "auto" chose it; empty for a named map
  std::vector<std::string> left_behind;  ///< one sentence for each parameter

  /// Returns the map as manifests and reports show it.
  nlohmann::ordered_json Json() const;
  /// Returns everything needed to apply the map again, for the manifest of a catalogue.
  nlohmann::ordered_json Recipe() const;
};

/// Parses the maps that were applied to a catalogue.
/// \param recipes  text of a JSON list of MapUsed::Recipe, or empty
/// \error kBadInput  not such a list; kNotFound  a built-in map that no longer exists
/// Pure.
Result<std::vector<MapChoice>> MapsOfRecipes(const std::string& recipes, const std::string& where);

/// Reads maps by name or from files.
/// \error kUsage  wrong syntax, or a size that no map uses;
///        kNotFound, kBadInput  as ModelMap, and the files
/// Collective; rank 0 reads.
Result<std::vector<MapChoice>> ReadMaps(comm::Comm& comm, const MapsAsked& asked);

/// Sets the fields of a request for maps that follow from the format to write and its keys.
/// Pure.
void SetTarget(const checkpoints::Format& format, const checkpoints::TargetSpec& spec,
               MapsAsked* asked);

/// Returns the flags of each built-in map that knows all names of a checkpoint and leads to one of
/// the wanted naming schemes, such as "--map llama:hf --map-sizes kv_heads=N". Returns only
/// "--map auto" if the model config determines the map. Empty if the names follow a wanted scheme
/// already, or no map knows them.
/// \param asked  the wanted schemes, and weights_alone
/// \param config  as checkpoints::FindConfig returns it; ignored if it cannot be parsed
/// Pure.
Result<std::vector<std::string>> MapFlagsFor(const checkpoints::Checkpoint& checkpoint,
                                             const MapsAsked& asked,
                                             const checkpoints::Patterns& patterns,
                                             const std::string& config);

/// Names of a checkpoint that the readers of a format do not expect.
struct OtherNames {
  std::string what;                ///< a sentence about them
  std::vector<std::string> flags;  ///< as MapFlagsFor; empty: the names are expected or unknown
};

/// Compares the names of a checkpoint with those that readers of a format expect.
/// \param spec  keys of the format
/// \param config  returns the config for MapFlagsFor; called only if the names matter
/// Pure but for `config`.
Result<OtherNames> FindOtherNames(const checkpoints::Checkpoint& checkpoint,
                                  const checkpoints::Patterns& patterns,
                                  const checkpoints::Format& format,
                                  const checkpoints::TargetSpec& spec,
                                  const std::function<Result<std::string>()>& config);

/// Applies maps to a checkpoint, one after the other, and reports each. Sizes come from
/// `asked`, or from the model config: config.json and values recorded in the checkpoint.
/// The config selects the map for "auto", and the rules of the map verify that it fits.
/// \param config  as checkpoints::FindConfig returns it
/// \error as checkpoints::ApplyMap; kBadInput  two contradicting config values, both
///        named; "auto": kUsage  the config or target does not determine one map;
///        kUnsupported  no map exists for this config
/// Pure but for the messages.
Result<std::vector<MapUsed>> UseMaps(const std::vector<MapChoice>& choices, const MapsAsked& asked,
                                     const std::string& config,
                                     const checkpoints::Patterns& patterns,
                                     checkpoints::Checkpoint* checkpoint, Sink& sink);

}  // namespace shardwright::convert
