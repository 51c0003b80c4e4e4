// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <compare>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "checkpoints/tp_rules/patterns.h"
#include "partial/store/manifest.h"
#include "partial/store/modules.h"
#include "support/base/result.h"
#include "support/base/sink.h"
#include "support/comm/comm.h"

namespace shardwright::partial {

/// The part of a checkpoint that a blob stores: a component of
/// a module, or the data that is copied without interpretation.
struct BlobPlace {
  static constexpr std::uint32_t kPassed = ~std::uint32_t{0};
  std::uint32_t module = kPassed;  ///< index in Model::modules
  Component component = Component::kWeights;
  auto operator<=>(const BlobPlace&) const = default;
};

/// A blob that a check found missing or damaged.
struct DamagedBlob {
  BlobRef ref;
  std::string path;             ///< path of the blob's file
  std::string module;           ///< in the first checkpoint that uses it; or "client state"
  std::string component;        ///< empty: client state
  std::uint64_t iteration = 0;  ///< iteration of the blob's version
  std::set<BlobPlace> places;   ///< in all checkpoints that refer to the blob
  bool may_be_intact = false;   ///< its file could not be opened
  std::string line;             ///< its line in StoreCheck::damaged
};

/// Result of checking a store.
struct StoreCheck {
  std::uint64_t checkpoints = 0;
  std::uint64_t collected = 0;  ///< deleted by a collection during the check; not in `checkpoints`
  std::uint64_t blobs = 0;      ///< distinct blobs that checkpoints refer to
  std::uint64_t bytes = 0;      ///< their uncompressed size
  /// One line per damage, in the order of the checkpoints: the file, the fault, its content.
  std::vector<std::string> damaged;
  /// The damaged blobs that this rank has read, by digest.
  std::vector<DamagedBlob> damaged_blobs = {};
};

/// Reads every manifest, catalogue, token record and blob of a store and compares digests.
/// Takes no lock and writes nothing, so the store may be read-only. Files that a collection
/// removes during the check are not damage. Checkpoints saved during the check are not read.
/// \error kNotFound  no store; kBusy  collections removed every listed checkpoint. Not for damage
/// Collective; blobs are spread over ranks and threads.
Result<StoreCheck> CheckStore(comm::Comm& comm, const std::string& path,
                              const checkpoints::Patterns& patterns, unsigned threads, Sink& sink);

}  // namespace shardwright::partial
