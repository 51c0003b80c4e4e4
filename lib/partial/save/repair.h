// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "convert/input.h"
#include "partial/store/check_store.h"
#include "support/base/result.h"
#include "support/base/sink.h"
#include "support/comm/comm.h"

namespace shardwright::partial {

/// The flags of pec-save check that a repair needs.
struct RepairRequest {
  std::string store;
  bool take_over = false;  ///< as os::Lock::Take, of the store's lock
  unsigned threads = 1;
};

/// A blob that was missing or damaged.
struct BlobRepair {
  std::string module;     ///< as DamagedBlob, also the fields up to `bytes`
  std::string component;  ///< empty: client state
  std::uint64_t iteration = 0;
  std::string path;
  std::uint64_t bytes = 0;  ///< plain
  std::string damage;       ///< the line of the check
  std::string reason;       ///< empty if it was repaired
  bool repaired() const { return reason.empty(); }
};

/// The outcome of a repair.
struct StoreRepair {
  StoreCheck check;               ///< `damaged` lists the remaining damage, with the reasons
  std::string checkpoint;         ///< path of the checkpoint that the bytes are from
  std::vector<BlobRepair> blobs;  ///< by iteration, module and component
  std::uint64_t repaired = 0;     ///< of `blobs`
  std::uint64_t written_bytes = 0;
};

/// Checks a store as CheckStore does, and writes each missing or damaged blob again for which the
/// checkpoint has exactly the content that names the blob, in the same module and component or in
/// the data that is copied without interpretation. Intact blobs, and files that cannot be opened,
/// are never touched. The store stays locked until the end. A killed repair leaves each blob as it
/// was, or repaired.
/// \error kMismatch  a checkpoint of another model; kBusy  another process writes; kIo; kStopped;
///        as CheckStore. Blobs that cannot be repaired are not an error
/// Collective; the rank that has checked a blob repairs it. Source: docs/formats/store.md,
/// "Repairing".
Result<StoreRepair> RepairStore(comm::Comm& comm, convert::Input& input,
                                const RepairRequest& request, Sink& sink);

}  // namespace shardwright::partial
