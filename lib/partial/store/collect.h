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

/// Which checkpoints stay when garbage is collected. The newest one always does, since it holds the
/// last version of everything; abandoned ones go.
struct Retention {
  std::uint64_t keep_last = 1;  ///< newest checkpoints
  /// Also those whose iteration is a multiple of this; absent: none.
  std::optional<std::uint64_t> keep_every;
};

/// What a collection removed, or would remove.
struct Collected {
  std::vector<StoredCheckpoint> kept;
  std::vector<StoredCheckpoint> removed;
  std::uint64_t blobs_kept = 0;
  std::uint64_t blobs_removed = 0;
  std::uint64_t bytes_removed = 0;  ///< of blob files
  /// The oldest iteration that a kept checkpoint has anything of: no chain of gradients begins
  /// before it (partial/gradient_log/log_collect.h).
  std::uint64_t oldest_version = 0;
};

/// Removes the checkpoints that no rule keeps, and every blob that none of the others refers to. A
/// store whose newest checkpoint is not whole loses nothing: an older version may be the last
/// usable one.
/// \param take_over  as os::Lock::Take
/// \error kMismatch  blobs of the newest checkpoint are missing or have another size: the first is
///        named, nothing was removed; kBusy  another process writes; kNotFound, kBadInput, kIo;
///        kStopped  the next collection removes the rest
/// Local.
Result<Collected> CollectGarbage(const std::string& path, const Retention& retention, bool dry_run,
                                 const StopCheck& stop = {}, bool take_over = false);

}  // namespace shardwright::partial
