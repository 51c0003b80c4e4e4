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
#include "support/base/result.h"
#include "support/base/sink.h"
#include "support/comm/comm.h"
#include "support/os/journal.h"

namespace shardwright::convert {

/// What a command reads.
struct InputOptions {
  /// A checkpoint's save or tag folder, a folder of atoms, a catalogue, or a file by itself; more
  /// source_paths hold further parts of the same checkpoint. With node_local, `{rank}` and `{node}`
  /// are replaced by the rank's number and the node's name.
  std::vector<std::string> source_paths;
  std::vector<std::string> pattern_files;
  bool node_local = false;
  bool siblings = false;                 ///< look for the files beside the tag folder too
  unsigned io_threads = os::kIoThreads;  ///< files whose headers a rank reads at the same time
  /// Accept a checkpoint whose optimizer state cannot be written in another layout: rank-specific
  /// state (Checkpoint::bound), or an optimizer that is missing or of an unsupported form
  /// (Checkpoint::only_weights). For commands that only describe INPUT or export weights, or
  /// that copy files with rank-specific state.
  bool bound = false;
  /// Accept a checkpoint whose files seem to be of two saves; see CheckOneSave.
  bool allow_mixed = false;
  /// False: payloads are written later, so CheckOneSave compares steps only.
  bool has_payloads = true;
  MapsAsked maps = {};
  /// The set of weights to read if the checkpoint has several (checkpoints::WeightSet::name);
  /// empty: the model's, or the set of the catalogue.
  std::string weights_of = {};
  /// Ignore `weights_of` if the source has one set of weights, or none of that name.
  bool weights_if_present = false;
  /// How places that had to be inferred are proved, which reads weights and master weights whole.
  /// Nothing: they are not, and a warning says so, for what reads no payload.
  std::optional<CompareOptions> proof = CompareOptions{};
  /// What the command is to write, if it is a path: where no checkpoint is at `source_paths` but
  /// one is there, the error says that the two may have changed places.
  std::string output = {};
  /// Fail if something is at `output`, before payloads are read.
  bool new_output = false;
};

/// An opened source: its metadata_table, what they mean, and how to read its payloads.
struct Input {
  std::vector<std::string> source_paths;  ///< InputOptions::source_paths
  checkpoints::SourceSet set;
  checkpoints::Patterns patterns;
  checkpoints::Checkpoint checkpoint;
  /// node_local: the rank that reads each of PathsOf(set); else empty.
  std::vector<int> file_owner;
  std::unique_ptr<exec::ByteSource> bytes;
  bool siblings = false;                 ///< InputOptions::siblings
  unsigned io_threads = os::kIoThreads;  ///< InputOptions::io_threads
  OneSave one_save;
  std::vector<MapUsed> mapped;  ///< not empty: `checkpoint` has other names than its files
  /// Of the source: names, identities and object graphs of all its files, the pattern files and
  /// the maps.
  os::Fingerprint fingerprint{};
  /// Of the siblings that were looked for: names, sizes, and content or time.
  os::Fingerprint siblings_fingerprint{};
};

/// The patterns of files, before those that are built in.
/// \error kNotFound, kBadInput  a file
/// Local.
Result<checkpoints::Patterns> ReadPatterns(const std::vector<std::string>& files);

/// Finds, scans and understands a source, proves what had to be inferred, and takes it through the
/// maps that are asked for. Rank 0 looks and tells the others; with node_local every rank looks at
/// its own files and the parts are united (checkpoints::UniteParts); a rank may see none. Only rank
/// 0 needs to see the pattern files.
/// \error kNotFound, kBadInput, kUnsupported as checkpoints::ScanSource,
///        checkpoints::ReadCheckpointOrWeights and, without `bound`, checkpoints::CheckUnbound; as
///        CheckOneSave; with maps as ReadMaps and UseMaps
/// Collective.
Result<std::unique_ptr<Input>> OpenInput(comm::Comm& comm, const InputOptions& options, Sink& sink);

/// Finds the metadata_table of a source only, as OpenInput does first.
/// Collective.
Result<checkpoints::SourceSet> ScanInput(comm::Comm& comm, const InputOptions& options,
                                         std::vector<int>* file_owner);

/// Compares files of a source with the digests that the checkpoint itself tells of them
/// (Checkpoint::digests). Ranks and threads share them out; each file is read whole.
/// \error kBadInput  names the file and both digests; kNotFound  a file is gone
/// Collective.
Status VerifyDigests(comm::Comm& comm, const Input& input, unsigned threads, Sink& sink);

/// How to open the files of a set, in the order of its map: its own, then the siblings whose
/// bytes are not known yet.
std::vector<exec::SourcePath> PathsOf(const checkpoints::SourceSet& set);

/// The source's fingerprint as manifests have it.
std::string FingerprintText(const Input& input);

/// Fingerprint of a run: of its source and everything that shapes its output.
os::Fingerprint RunFingerprint(const Input& input, const std::string& parameters);

}  // namespace shardwright::convert
