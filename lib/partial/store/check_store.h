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

/// The part of a checkpoint that a blob has the content of: a component of a module, or the data
/// that is copied without interpretation.
struct BlobPlace {
  static constexpr std::uint32_t kPassed = ~std::uint32_t{0};
  std::uint32_t module = kPassed;  ///< index in Model::modules
  Component component = Component::kWeights;
  auto operator<=>(const BlobPlace&) const = default;
};

/// A blob that a check found missing or damaged.
struct DamagedBlob {
  BlobRef ref;
  std::string path;             ///< of its file
  std::string module;           ///< of the first checkpoint that has it; "client state"
  std::string component;        ///< empty: client state
  std::uint64_t iteration = 0;  ///< version that the blob is of
  std::set<BlobPlace> places;   ///< in all checkpoints that refer to it
  bool may_be_intact = false;   ///< its file could not be opened
  std::string line;             ///< of StoreCheck::damaged
};

/// What is wrong with a store.
struct StoreCheck {
  std::uint64_t checkpoints = 0;
  std::uint64_t collected = 0;  ///< checkpoints that were collected meanwhile; not in `checkpoints`
  std::uint64_t blobs = 0;      ///< different ones that checkpoints refer to
  std::uint64_t bytes = 0;      ///< of them, plain
  /// One line each, in the order of the checkpoints: the file, what is wrong, what it holds.
  std::vector<std::string> damaged;
  /// The blobs among them that this rank has read, by digest.
  std::vector<DamagedBlob> damaged_blobs = {};
};

/// Reads every manifest, catalogue, token record and blob of a store and compares digests. Takes no
/// lock and writes nothing: the store may be read-only. What a collection removes meanwhile is no
/// damage, and checkpoints saved meanwhile are not looked at.
/// \error kNotFound  no store; kBusy  no checkpoint that was listed stayed; damage is no error
/// Collective; blobs are spread over ranks and threads.
Result<StoreCheck> CheckStore(comm::Comm& comm, const std::string& path,
                              const checkpoints::Patterns& patterns, unsigned threads, Sink& sink);

}  // namespace shardwright::partial
