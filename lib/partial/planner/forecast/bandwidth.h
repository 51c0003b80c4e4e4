// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "support/base/result.h"
#include "support/base/sink.h"
#include "support/comm/comm.h"

namespace shardwright::partial {

/// Bytes that every rank writes and then copies for a measurement.
inline constexpr std::uint64_t kMeasuredBytes = std::uint64_t{256} << 20;

/// Bytes per second of the slowest rank while all ranks of the run do the same.
struct Bandwidths {
  double persist_bytes_per_s = 0;   ///< to files that are synced
  double snapshot_bytes_per_s = 0;  ///< from memory to memory
};

/// Writes and syncs kMeasuredBytes to a file in `folder`, which is unlinked as soon as
/// it is open, then copies as many bytes in memory. Uses 256 MiB of memory per rank.
/// \error kNotFound  no such folder; kIo  write error; kLimit  memory; kStopped
/// Collective: all ranks write at once, then all copy. Source: docs/pec-planning.md section 12.
Result<Bandwidths> MeasureBandwidths(comm::Comm& comm, const std::string& folder, Sink& sink);

}  // namespace shardwright::partial
