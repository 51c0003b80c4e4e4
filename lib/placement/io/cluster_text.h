// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "placement/core/types.h"
#include "support/base/result.h"

namespace shardwright::placement {

/// A cluster out of its JSON description (docs/formats/cluster.md).
/// \param layers  MoE layers of the model: memory of a GPU is shared by all of them
/// \param where  names the text in messages
/// \error kBadInput  names the node or GPU; kLimit  counts above limits.h, told before anything is
///        made
/// Pure.
Result<Cluster> ParseCluster(std::string_view text, std::uint32_t layers, const std::string& where);

/// Reads and parses a description.
/// \error kNotFound; as ParseCluster
/// Local.
Result<Cluster> ReadCluster(const std::string& path, std::uint32_t layers);

}  // namespace shardwright::placement
