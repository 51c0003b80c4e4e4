// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "partial/store/store.h"
#include "support/base/result.h"
#include "support/base/stop.h"

namespace shardwright::partial {

/// Rules for the checkpoints that a garbage collection keeps. The newest one always stays,
/// because it refers to the last version of every module. Abandoned ones are removed.
struct Retention {
  std::uint64_t keep_last = 0;  ///< number of newest checkpoints to keep
  /// Also keep checkpoints at multiples of this iteration number; absent: none.
  std::optional<std::uint64_t> keep_every;
};

/// Result of a collection; with dry_run, what it would remove.
struct Collected {
  std::vector<StoredCheckpoint> kept;
  std::vector<StoredCheckpoint> removed;
  std::uint64_t blobs_kept = 0;
  std::uint64_t blobs_removed = 0;
  std::uint64_t bytes_removed = 0;  ///< of blob files
  /// The oldest version of any module in a kept checkpoint. No gradient
  /// chain starts before it (partial/gradient_log/log_collect.h).
  std::uint64_t oldest_version = 0;
};

/// Removes the checkpoints that no rule keeps, and every blob that no
/// remaining checkpoint refers to. Removes nothing if the newest checkpoint
/// is incomplete, because an older version may be the last usable one.
/// \param take_over  as os::Lock::Take
/// \error kMismatch  blobs of the newest checkpoint are missing or have another size
///        (names the first); nothing was removed; kBusy  another process writes;
///        kNotFound, kBadInput, kIo; kStopped  the next collection removes the rest
/// Local.
Result<Collected> CollectGarbage(const std::string& path, const Retention& retention, bool dry_run,
                                 const StopCheck& stop = {}, bool take_over = false);

}  // namespace shardwright::partial
