// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "checkpoints/model/checkpoint.h"
#include "checkpoints/name_maps/maps.h"
#include "checkpoints/tp_rules/patterns.h"
#include "support/base/result.h"
#include "support/base/sink.h"
#include "support/comm/comm.h"

namespace shardwright::convert {

/// What is asked for of names and shapes; the fields are --map and --map-sizes.
struct MapsAsked {
  /// Each NAME or FILE, then ":TO" or ":FROM:TO"; or one alone, "auto" or "auto:TO", for the map
  /// that the source's family has. None: names and shapes stay.
  std::vector<std::string> maps;
  std::string sizes;  ///< "kv_heads=8,head_dim=64", or empty
  /// "auto" without a side: those that the target's names may be of, the wanted one first.
  std::vector<std::string> sides;
  /// "auto" without a side: a checkpoint that has the wanted names. Null: `sides` tell.
  const checkpoints::Checkpoint* like = nullptr;
};

/// What one --map asks for, read and parsed.
struct MapChoice {
  std::optional<checkpoints::ModelMap> map;  ///< nothing: to be found
  checkpoints::MapUse use;
  std::string text;  ///< the map's name, or the text of its file, for fingerprints
};

/// A map that an opened source went through.
struct MapUsed {
  std::string name;
  std::string from;
  std::string to;
  checkpoints::ModelSizes sizes;
  std::string map;                       ///< as MapChoice::text
  std::string why;                       ///< it was found by itself: what told it; else empty
  std::vector<std::string> left_behind;  ///< one sentence for each parameter

  /// As manifests and reports have it.
  nlohmann::ordered_json Json() const;
  /// All that it takes to go through the map again, as the manifest of a catalogue has it.
  nlohmann::ordered_json Recipe() const;
};

/// Maps that a catalogue was made with.
/// \param recipes  text of a JSON list of MapUsed::Recipe, or empty
/// \error kBadInput  it is none; kNotFound  a built-in map that there is no more
/// Pure.
Result<std::vector<MapChoice>> MapsOfRecipes(const std::string& recipes, const std::string& where);

/// Maps by name or file.
/// \error kUsage  not of this form, or a size of none of the maps; kNotFound, kBadInput  as
///        ModelMap, and the files
/// Collective; rank 0 reads.
Result<std::vector<MapChoice>> ReadMaps(comm::Comm& comm, const MapsAsked& asked);

/// "PATH\nTEXT" of the model's config.json in one of the folders or the one around it, or nothing.
/// \error kLimit, kBadInput  as os::ReadWholeText
/// Local.
Result<std::string> FindConfig(const std::vector<std::string>& source_paths);

/// Returns the text of an adapter_config.json in one of the folders, in its parent, or in a
/// subfolder of either where trainers store adapters; empty if there is none.
/// \error as FindConfig
/// Local.
Result<std::string> FindAdapterConfig(const std::vector<std::string>& source_paths);

/// Takes a checkpoint through maps, one after the other, and says so. Sizes are those of `asked`,
/// else of the facts: the config and what the checkpoint tells of itself. Facts choose a map that
/// is to be found; that it fits is proved by its rules.
/// \param config  as FindConfig has it
/// \error as checkpoints::ApplyMap; kBadInput  facts that contradict each other, both are named;
///        "auto": kUsage  facts or a target that tell no map, or several that fit; kUnsupported  no
///        map for what they tell
/// Pure but for the messages.
Result<std::vector<MapUsed>> UseMaps(const std::vector<MapChoice>& choices, const MapsAsked& asked,
                                     const std::string& config,
                                     const checkpoints::Patterns& patterns,
                                     checkpoints::Checkpoint* checkpoint, Sink& sink);

}  // namespace shardwright::convert
