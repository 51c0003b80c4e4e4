// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "support/base/result.h"

namespace shardwright::partial {

/// What UndoRestart or ConfirmRestart did.
struct Undone {
  bool was_pending = false;               ///< the restore was not confirmed yet
  std::uint64_t resume = 0;               ///< iteration of that restore
  std::uint64_t newest = 0;               ///< iteration that the next save continues
  std::vector<std::uint64_t> reinstated;  ///< iterations that are no longer abandoned, ascending
};

/// Takes back the last restore of the store at a path: one that no save has confirmed is forgotten;
/// of a recorded restart the newer checkpoints are no longer abandoned, as far as they were not
/// collected.
/// \param take_over  as os::Lock::Take
/// \error kNotFound  no store, or no restore in it; kBusy  a checkpoint was saved after the
///        restart, or another process writes; kIo
/// Local.
Result<Undone> UndoRestart(const std::string& path, bool take_over = false);

/// Records the restore that no save has confirmed yet as a restart.
/// \param take_over  as os::Lock::Take
/// \error kNotFound  no store, or no such restore; kBusy; kIo
/// Local.
Result<Undone> ConfirmRestart(const std::string& path, bool take_over = false);

}  // namespace shardwright::partial
