// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "engine/layout/shard_map.h"
#include "support/base/result.h"

namespace shardwright::cache {

/// Converts a shard map to JSON, for another process of the same release. Omits member
/// names and checksums, and writes a cut that several fragments share only once.
/// Pure.
nlohmann::json ToJson(const layout::ShardMap& map);

/// Inverse of ToJson. Checks that every index exists in the map and every member fits in its file.
/// \param file_bytes  of the map's files
/// \error kBadInput  the JSON is not a valid map; the message has a word or two
/// Pure.
Result<layout::ShardMap> ParseMap(const nlohmann::json& json,
                                  const std::vector<std::uint64_t>& file_bytes);

}  // namespace shardwright::cache
