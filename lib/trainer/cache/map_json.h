// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "engine/layout/shard_map.h"
#include "support/base/result.h"

namespace shardwright::cache {

/// A shard map as JSON, for another process of the same release. Member names and checksums stay
/// behind; what several fragments cut alike is told once.
/// Pure.
nlohmann::json ToJson(const layout::ShardMap& map);

/// The inverse. Every index is one of the map, every member lies within its file.
/// \param file_bytes  of the map's files
/// \error kBadInput  it is none, in a word or two
/// Pure.
Result<layout::ShardMap> ParseMap(const nlohmann::json& json,
                                  const std::vector<std::uint64_t>& file_bytes);

}  // namespace shardwright::cache
