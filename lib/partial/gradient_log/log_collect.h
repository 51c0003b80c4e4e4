// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/exec/integrity.h"
#include "partial/store/store.h"
#include "support/base/result.h"
#include "support/base/stop.h"

namespace shardwright::partial {

/// Segments of a log that nothing needs any more.
struct OldSegments {
  /// The first ones of every writer, the second ones, ...: paths, in the order in which they go.
  std::vector<std::vector<std::string>> rounds;
  std::uint64_t segments = 0;
  std::uint64_t bytes = 0;
  std::uint64_t segments_kept = 0;
};

/// Finds the segments whose records are all of iterations up to `through`, as far as only such ones
/// lie before them. The last segment of a writer stays, for it says where the writer goes on, and
/// with it the one before if its own head is not whole. Reads heads and texts of records, no
/// gradients. Writers may append meanwhile.
/// \error kBadInput  what it has read is damaged; kMismatch, kUnsupported  as GradientLog::Open;
///        kNotFound; kStopped
/// Local. Source: docs/formats/log.md.
Result<OldSegments> FindOldSegments(const std::string& folder, const exec::Digest& fingerprint,
                                    std::uint64_t through, const StopCheck& stop = {});

/// Removes them, oldest first. Whenever it is interrupted, what is left is a log: the names of a
/// round are off the device before those of the next one go.
/// \pre one at a time
/// \error kIo; kStopped  after a round
/// Local.
Status RemoveSegments(const std::string& folder, const OldSegments& old,
                      const StopCheck& stop = {});

/// What of a store's log was removed, or would be.
struct CollectedLog {
  std::uint64_t segments_kept = 0;
  std::uint64_t segments_removed = 0;
  std::uint64_t bytes_removed = 0;
  std::string wrong;  ///< why all of it was left as it is; empty: it was not
};

/// Removes the segments that nothing needs where no chain begins before an iteration. A log that is
/// damaged, or that cannot be read, stays as it is. No log is an empty one.
/// \param oldest  Collected::oldest_version, after CollectGarbage: a checkpoint that is still there
///                may need more
/// \error kBusy  another process writes into the store; kIo; kStopped  the next call removes the
///        rest
/// Local.
Result<CollectedLog> CollectLog(const Store& store, std::uint64_t oldest, bool dry_run,
                                const StopCheck& stop = {});

}  // namespace shardwright::partial
