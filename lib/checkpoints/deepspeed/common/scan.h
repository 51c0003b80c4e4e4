// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "checkpoints/model/format.h"
#include "support/base/result.h"

namespace shardwright::checkpoints {

/// The folder of the atoms in a universal folder, and the file that describes them.
inline constexpr const char* kAtomsFolder = "zero";
inline constexpr const char* kAtomsFile = "shardwright_atoms.json";

/// Returns true if a folder contains native files, complete or not. Atoms next to optimizer
/// shards are ignored, because users can convert a native checkpoint in its own folder.
bool HoldsNative(const Listing& listing);

/// Returns true if a folder contains atoms and no optimizer shards.
bool HoldsAtoms(const Listing& listing);

/// Reads the files of DeepSpeed's engine in the folders, and with `atoms` also those below `zero`.
/// \error kBadInput  a corrupt file; kUnsupported  NVMe offload, Nebula, DataStates; names it
Result<SourceSet> ScanEngineFiles(const Listing& listing, bool atoms, const ScanOptions& options);

/// Reads the container of one file that ScanEngineFiles found. Implements Format::read_file.
Result<std::vector<Container>> ReadEngineFile(const Found& found, const os::File& file,
                                              const os::Identity& identity);

}  // namespace shardwright::checkpoints
