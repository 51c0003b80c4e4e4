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

/// True if the folder is a fragment catalogue that ExtractCatalogue wrote.
/// \error kNotFound if it cannot be asked
Result<bool> IsCatalogue(const std::string& folder);

/// The source that a catalogue describes. Packed catalogues describe their own copy of the
/// payloads; of them those of siblings are read here and compared with their digests.
/// \param siblings  whether to look for them
/// \error kBadInput  not complete, or damaged
/// Local.
Result<checkpoints::SourceSet> ReadCatalogue(const std::string& folder, bool siblings);

/// The maps that a catalogue was made with, as MapsOfRecipes takes them; empty without any.
/// \error as ReadCatalogue
/// Local.
Result<std::string> MapsOfCatalogue(const std::string& folder);

/// Returns the set of weights of a catalogue, as in SourceSet::weights_of; empty: the model's.
/// \error as ReadCatalogue
/// Local.
Result<std::string> WeightsOfCatalogue(const std::string& folder);

/// True if the payloads of a set read by ReadCatalogue are compressed, so that ZpackBytes must read
/// them.
bool IsCompressed(const checkpoints::SourceSet& set);

enum class Pack : std::uint8_t {
  kNone,  ///< the payloads stay where they are
  kCopy,  ///< the catalogue holds the payloads too
  kZstd,  ///< compressed (engine/exec/zpack.h)
};

/// Writes the fragment catalogue of a source: the metadata of every file, and with `pack` its
/// payloads.
/// Collective.
Result<ConvertReport> ExtractCatalogue(comm::Comm& comm, Input& input, Pack pack,
                                       const ConvertOptions& options, Sink& sink);

}  // namespace shardwright::convert
