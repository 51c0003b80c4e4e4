// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoints/model/checkpoint.h"
#include "checkpoints/model/source.h"
#include "checkpoints/tp_rules/patterns.h"
#include "convert/compare.h"
#include "convert/mapping.h"
#include "engine/exec/byte_source.h"
#include "engine/exec/run/identity.h"
#include "support/base/result.h"
#include "support/base/sink.h"
#include "support/comm/comm.h"
#include "support/os/journal.h"

namespace shardwright::convert {

/// Options that describe the source of a command.
struct InputOptions {
  /// A save or tag folder, a folder of atoms, a catalogue, or a single file.
  /// Further source_paths add parts of the same checkpoint. With node_local,
  /// `{rank}` and `{node}` are replaced by the rank's number and the node's name.
  std::vector<std::string> source_paths;
  std::vector<std::string> pattern_files;
  bool node_local = false;
  bool siblings = false;                 ///< also search for the sibling files of the tag folder
  unsigned io_threads = os::kIoThreads;  ///< file headers that a rank reads at the same time
  /// Accept an optimizer state that cannot be written in another layout: rank-specific
  /// state (Checkpoint::bound), or an optimizer that is missing or of an unsupported form
  /// (Checkpoint::only_weights). For commands that only describe INPUT or export weights, or
  /// that copy files with rank-specific state.
  bool bound = false;
  /// Accept a checkpoint with files that seem to be of two saves; see CheckOneSave.
  bool allow_mixed = false;
  /// False: payloads are written later, so CheckOneSave compares steps only.
  bool has_payloads = true;
  MapsAsked maps = {};
  /// The set of weights to read if the checkpoint has several
  /// (checkpoints::WeightSet::name). Empty: the model's, or the set of the catalogue.
  std::string weights_of = {};
  /// Ignore `weights_of` if the source has one set of weights, or none with that name.
  bool weights_if_present = false;
  /// Options for verifying inferred mappings, which reads weights and master weights
  /// completely. Empty: OpenInput skips it and warns, for commands that read no payload.
  std::optional<CompareOptions> proof = CompareOptions{};
  /// The output path of the command, if it has one. If a checkpoint is found here and none
  /// at `source_paths`, the error message suggests that the two arguments are swapped.
  std::string output = {};
  /// Fail before reading payloads if `output` exists.
  bool new_output = false;
};

/// An opened source: its metadata, the checkpoint that it describes, and access to payloads.
struct Input {
  std::vector<std::string> source_paths;  ///< InputOptions::source_paths
  checkpoints::SourceSet set;
  checkpoints::Patterns patterns;
  checkpoints::Checkpoint checkpoint;
  /// With node_local, the rank that reads each of PathsOf(set). Otherwise empty.
  std::vector<int> file_owner;
  std::unique_ptr<exec::ByteSource> bytes;
  bool siblings = false;                 ///< InputOptions::siblings
  unsigned io_threads = os::kIoThreads;  ///< InputOptions::io_threads
  OneSave one_save;
  std::vector<MapUsed> mapped;  ///< if not empty, `checkpoint` has other names than its files
  /// Fingerprint of the source: names, identities and object
  /// graphs of all its files, the pattern files and the maps.
  os::Fingerprint fingerprint{};
  /// Fingerprints of the pattern files and of the maps, which are part of `fingerprint`.
  os::Fingerprint patterns_fingerprint{};
  os::Fingerprint maps_fingerprint{};
  /// Fingerprint of the sibling files found: names, sizes, and content or time.
  os::Fingerprint siblings_fingerprint{};
};

/// Reads pattern files. Their patterns take precedence over the built-in ones.
/// \error kNotFound, kBadInput  a file
/// Local.
Result<checkpoints::Patterns> ReadPatterns(const std::vector<std::string>& files);

/// Finds and reads a source, verifies inferred mappings, and applies the
/// requested maps. Rank 0 searches and shares the result. With node_local, every
/// rank reads its own files, of which there may be none, and the parts are united
/// (checkpoints::UniteParts). Only rank 0 needs access to the pattern files.
/// \error kNotFound, kBadInput, kUnsupported  as checkpoints::ScanSource,
///        checkpoints::ReadCheckpointOrWeights, CheckOneSave, and without `bound`
///        checkpoints::CheckUnbound; with maps as ReadMaps and UseMaps
/// Collective.
Result<std::unique_ptr<Input>> OpenInput(comm::Comm& comm, const InputOptions& options, Sink& sink);

/// Finds the model's config.json in the folders of an opened source.
/// \returns as checkpoints::FindConfig
/// Collective; rank 0 reads.
Result<std::string> ReadModelConfig(comm::Comm& comm, const Input& input);

/// Finds only the metadata of a source, the first step of OpenInput.
/// Collective.
Result<checkpoints::SourceSet> ScanInput(comm::Comm& comm, const InputOptions& options, Sink& sink,
                                         std::vector<int>* file_owner);

/// Compares files of a source with the digests that the checkpoint itself records
/// (Checkpoint::digests). Ranks and threads share the files, and read each one completely.
/// \error kBadInput  names the file and both digests; kNotFound  a file is gone
/// Collective.
Status VerifyDigests(comm::Comm& comm, const Input& input, unsigned threads, Sink& sink);

/// Returns how to open the files of a set, in the order of its map. The set's
/// own files come first, then the sibling files that were not read yet.
std::vector<exec::SourcePath> PathsOf(const checkpoints::SourceSet& set);

/// Formats the source's fingerprint as manifests store it.
std::string FingerprintText(const Input& input);

/// Returns the part of a run's identity that does not depend on the target: version and source.
exec::Identity RunIdentity(const Input& input);

}  // namespace shardwright::convert
