// SPDX-License-Identifier: Apache-2.0
// lib/convert/scan: scanning of a source, distributed over ranks.
// Rank 0 lists the folders, and one rank reads the header of each file. The ranks exchange
// the headers in the form of a catalogue, so that all of them have the same set of files
// (scan_ranks.h). Atom files are compared with the manifest of their run (manifest_check.h). For
// a node-local source, every rank finds its own part, and the parts are compared (node_local.h).

#pragma once

#include <functional>

#include "checkpoints/model/source.h"
#include "support/base/result.h"
#include "support/comm/comm.h"

namespace shardwright::convert {

/// Scans a source that every rank can access. Rank 0 calls `find`, and
/// all ranks read their share of the files that it finds.
/// \param options  of every rank; this function sets ScanOptions::ranks
/// \error as `find`: the same for every number of ranks
/// Collective.
Result<checkpoints::SourceSet> ScanByRanks(
    comm::Comm& comm, checkpoints::ScanOptions options,
    const std::function<Result<checkpoints::SourceSet>(const checkpoints::ScanOptions& options)>&
        find);

}  // namespace shardwright::convert
