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

/// Options of a repair; the fields correspond to flags of pec-save check.
struct RepairRequest {
  std::string store;
  bool take_over = false;  ///< as os::Lock::Take, of the store's lock
  unsigned threads = 1;
};

/// A missing or damaged blob, and the outcome of its repair.
struct BlobRepair {
  std::string module;     ///< as DamagedBlob, also the fields up to `bytes`
  std::string component;  ///< empty: client state
  std::uint64_t iteration = 0;
  std::string path;
  std::uint64_t bytes = 0;  ///< uncompressed
  std::string damage;       ///< line of the check that describes the damage
  std::string reason;       ///< why it was not repaired; empty if it was
  bool repaired() const { return reason.empty(); }
};

/// Result of repairing a store.
struct StoreRepair {
  StoreCheck check;               ///< `damaged` lists the remaining damage with reasons
  std::string checkpoint;         ///< path of the checkpoint that supplied the bytes
  std::vector<BlobRepair> blobs;  ///< by iteration, module and component
  std::uint64_t repaired = 0;     ///< number of repaired ones in `blobs`
  std::uint64_t written_bytes = 0;
};

/// Checks a store like CheckStore, and rewrites each missing or damaged blob
/// if the checkpoint has its exact content in the same module and component,
/// or in the data that is copied without interpretation. Never changes
/// intact blobs or files that cannot be opened. The store stays locked until
/// the end. A killed repair leaves each blob either unchanged or repaired.
/// \error kMismatch  a checkpoint of another model; kBusy  another process writes;
///        kIo; kStopped; as CheckStore. Blobs that cannot be repaired are not an error
/// Collective; the rank that has checked a blob repairs
/// it. Source: docs/formats/store.md, "Repairing".
Result<StoreRepair> RepairStore(comm::Comm& comm, convert::Input& input,
                                const RepairRequest& request, Sink& sink);

}  // namespace shardwright::partial
