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

/// Segments of a log that are no longer needed.
struct OldSegments {
  /// Paths in the order of deletion: the first segment of every writer, the second, ...
  std::vector<std::vector<std::string>> rounds;
  std::uint64_t segments = 0;
  std::uint64_t bytes = 0;
  std::uint64_t segments_kept = 0;
};

/// Finds the leading segments of each writer with records up to iteration `through`
/// only. The last segment of a writer stays, because it states where the writer
/// continues, and also the one before it if its own head is incomplete. Reads heads
/// and texts of records, but no gradients. Writers may append at the same time.
/// \error kBadInput  a part that was read is damaged; kMismatch,
///        kUnsupported  as GradientLog::Open; kNotFound; kStopped
/// Local. Source: docs/formats/log.md.
Result<OldSegments> FindOldSegments(const std::string& folder, const exec::Digest& fingerprint,
                                    std::uint64_t through, const StopCheck& stop = {});

/// Removes the segments, oldest first. After an interruption the remaining files are
/// a valid log: each round's deletions are durable before the next round starts.
/// \pre no concurrent call
/// \error kIo; kStopped  at the end of a round
/// Local.
Status RemoveSegments(const std::string& folder, const OldSegments& old,
                      const StopCheck& stop = {});

/// Result of a collection of a store's log; with dry_run, what it would remove.
struct CollectedLog {
  std::uint64_t segments_kept = 0;
  std::uint64_t segments_removed = 0;
  std::uint64_t bytes_removed = 0;
  std::string wrong;  ///< reason why nothing was removed; empty: none
};

/// Removes the segments that are not needed if no chain starts before an iteration.
/// Does not change a damaged or unreadable log. A missing log counts as empty.
/// \param oldest  Collected::oldest_version, after CollectGarbage: a
///                checkpoint that still exists may need older records
/// \error kBusy  another process writes into the store;
///        kIo; kStopped  the next call removes the rest
/// Local.
Result<CollectedLog> CollectLog(const Store& store, std::uint64_t oldest, bool dry_run,
                                const StopCheck& stop = {});

}  // namespace shardwright::partial
