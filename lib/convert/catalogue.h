// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "checkpoints/model/source.h"
#include "convert/convert.h"
#include "convert/input.h"
#include "engine/exec/run/run.h"
#include "support/base/result.h"
#include "support/base/sink.h"
#include "support/comm/comm.h"

namespace shardwright::convert {

/// Returns true if the folder is a fragment catalogue that ExtractCatalogue wrote.
/// \error kNotFound  the folder cannot be read
Result<bool> IsCatalogue(const std::string& folder);

/// Reads the source that a catalogue describes. A packed catalogue describes its own copy
/// of the payloads. Its sibling files are read here and compared with their digests.
/// \param siblings  true to include the sibling files
/// \error kBadInput  not complete, or damaged
/// Local.
Result<checkpoints::SourceSet> ReadCatalogue(const std::string& folder, bool siblings);

/// Reads the maps that were applied to a catalogue, for MapsOfRecipes. Empty if there are none.
/// \error as ReadCatalogue
/// Local.
Result<std::string> MapsOfCatalogue(const std::string& folder);

/// Returns the set of weights of a catalogue, as in SourceSet::weights_of; empty: the model's.
/// \error as ReadCatalogue
/// Local.
Result<std::string> WeightsOfCatalogue(const std::string& folder);

/// Returns true if the payloads of a set from ReadCatalogue
/// are compressed. Then only ZpackBytes can read them.
bool IsCompressed(const checkpoints::SourceSet& set);

enum class Pack : std::uint8_t {
  kNone,  ///< the payloads stay in the source
  kCopy,  ///< the catalogue contains the payloads too
  kZstd,  ///< compressed (engine/exec/zpack.h)
};

/// Writes the fragment catalogue of a source: the metadata of every file, and with `pack` its
/// payloads.
/// Collective.
Result<ConvertReport> ExtractCatalogue(comm::Comm& comm, Input& input, Pack pack,
                                       const ConvertOptions& options, Sink& sink);

}  // namespace shardwright::convert
