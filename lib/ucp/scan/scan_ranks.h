// lib/ucp/scan: how ranks share the scan of a source.
// Rank 0 lists the folders, and each file's header is read by one rank only. The ranks exchange
// what they have read as catalogues have it, so that all of them hold the same set of files.

#pragma once

#include <functional>

#include "base/result.h"
#include "comm/comm.h"
#include "dialect/core/source.h"

namespace shardwright::ucp {

/// Scans a source that every rank sees. Rank 0 calls `find`, and all ranks read their share of the
/// files that it finds.
/// \param options  of every rank; ScanOptions::ranks is set here
/// \error as `find`: the same for every number of ranks
/// Collective.
Result<dialect::SourceSet> ScanByRanks(
    comm::Comm& comm, dialect::ScanOptions options,
    const std::function<Result<dialect::SourceSet>(const dialect::ScanOptions& options)>& find);

}  // namespace shardwright::ucp
