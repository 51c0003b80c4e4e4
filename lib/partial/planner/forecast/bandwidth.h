// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "support/base/result.h"
#include "support/base/sink.h"
#include "support/comm/comm.h"

namespace shardwright::partial {

/// Bytes that every rank writes, and then copies, to be measured.
inline constexpr std::uint64_t kMeasuredBytes = std::uint64_t{256} << 20;

/// What a rank has while all ranks of the run do the same: bytes per second of the slowest.
struct Bandwidths {
  double persist_bytes_per_s = 0;   ///< into files that are synced
  double snapshot_bytes_per_s = 0;  ///< from memory to memory
};

/// Writes and syncs kMeasuredBytes in a file of `folder`, which loses its name as soon as it is
/// open, and copies as many in memory. Takes 256 MiB of memory for each rank.
/// \error kNotFound  no such folder; kIo  the write; kLimit  memory; kStopped
/// Collective: all ranks write at once, then all copy. Source: docs/pec-planning.md section 12.
Result<Bandwidths> MeasureBandwidths(comm::Comm& comm, const std::string& folder, Sink& sink);

}  // namespace shardwright::partial
