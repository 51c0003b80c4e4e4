// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "partial/store/store.h"
#include "support/base/result.h"

namespace shardwright::partial {

/// Result of UndoRestart or ConfirmRestart.
struct Undone {
  bool was_pending = false;               ///< the restore was not confirmed yet
  std::uint64_t resume = 0;               ///< iteration of that restore
  std::uint64_t newest = 0;               ///< iteration that the next save continues
  std::vector<std::uint64_t> reinstated;  ///< iterations that are no longer abandoned, ascending
  std::vector<std::uint64_t> abandoned;   ///< iterations that are abandoned now, ascending
};

/// Returns the warning that a recorded restart abandons newer checkpoints.
/// \pre `abandoned` is not empty
std::string AbandonedText(const std::string& store, std::uint64_t resume,
                          const std::vector<std::uint64_t>& abandoned);

/// Lists the first few iterations in words.
std::string FewIterations(const std::vector<std::uint64_t>& iterations);

/// Returns the iterations of checkpoints that are abandoned in `list` but usable in `other`,
/// ascending.
std::vector<std::uint64_t> AbandonedOnlyIn(const std::vector<StoredCheckpoint>& list,
                                           const std::vector<StoredCheckpoint>& other);

/// Reverts the last restore of the store at a path. Discards an
/// unconfirmed restore. After a recorded restart, the newer
/// checkpoints that were not collected are no longer abandoned.
/// \param take_over  as os::Lock::Take
/// \error kNotFound  no store, or no restore in it; kBusy  a checkpoint was saved after the
///        restart, or another process writes; kIo
/// Local.
Result<Undone> UndoRestart(const std::string& path, bool take_over = false);

/// Records the unconfirmed restore of a store as a restart.
/// \param take_over  as os::Lock::Take
/// \error kNotFound  no store, or no such restore; kBusy; kIo
/// Local.
Result<Undone> ConfirmRestart(const std::string& path, bool take_over = false);

}  // namespace shardwright::partial
