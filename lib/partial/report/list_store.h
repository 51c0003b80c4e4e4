// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "partial/store/dynamic_run.h"
#include "partial/store/store.h"
#include "support/base/result.h"

namespace shardwright::partial {

/// A checkpoint of a store with the age of its modules.
struct ListedCheckpoint {
  StoredCheckpoint checkpoint;
  std::string policy;
  std::uint64_t k_snapshot = 0;
  std::uint64_t k_persist = 0;
  std::uint64_t stale_modules = 0;                ///< modules older than the checkpoint
  std::uint64_t missing_modules = 0;              ///< modules without any version
  std::uint64_t oldest = 0;                       ///< iteration of the oldest module
  std::map<std::string, std::uint64_t> versions;  ///< by module: iteration of its oldest part
  std::optional<DynamicK> dynamic_k;
};

/// Contents of a store.
struct StoreListing {
  StoreHead head;
  std::vector<ListedCheckpoint> checkpoints;  ///< ascending by sequence
  std::uint64_t recoveries = 0;
  std::optional<DynamicKReport> dynamic_k;
};

/// Reads the manifests of a store; omits checkpoints that are collected during the call.
/// \error kNotFound, kBadInput, kIo  as Store::Open and Store::ReadManifest
/// Local.
Result<StoreListing> ListStore(const std::string& path);

/// Returns the `result` of the report of pec-save list.
/// Pure.
nlohmann::json ListingJson(const StoreListing& listing);

}  // namespace shardwright::partial
