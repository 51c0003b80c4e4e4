// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "checkpoints/model/format.h"
#include "support/base/result.h"

namespace shardwright::checkpoints {

/// Folder of the atoms in a universal folder, and the file that describes them.
inline constexpr const char* kAtomsFolder = "zero";
inline constexpr const char* kAtomsFile = "shardwright_atoms.json";

/// True if a folder holds native files, or a part of them. Where it has optimizer shards, atoms
/// beside them do not count: a native checkpoint may have been converted in its own folder.
bool HoldsNative(const Listing& listing);

/// True if a folder holds atoms and no optimizer shards.
bool HoldsAtoms(const Listing& listing);

/// Reads the files of DeepSpeed's engine in the folders, and with `atoms` those below `zero`.
/// \error kBadInput  a broken file; kUnsupported  NVMe offload, Nebula, DataStates; named
Result<SourceSet> ScanEngineFiles(const Listing& listing, bool atoms, const ScanOptions& options);

/// Reads the container of one file that ScanEngineFiles has found, as Format::read_file.
Result<std::vector<Container>> ReadEngineFile(const Found& found, const os::File& file,
                                              const os::Identity& identity);

}  // namespace shardwright::checkpoints
