// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "placement/core/types.h"
#include "support/base/result.h"

namespace shardwright::placement {

/// Returns a cluster from its JSON description (docs/formats/cluster.md).
/// \param layers  MoE layers of the model, which share the memory of a GPU
/// \param where  name of the text in messages
/// \error kBadInput  names the node or GPU; kLimit  counts above limits.h, found before any
///        memory is allocated
/// Pure.
Result<Cluster> ParseCluster(std::string_view text, std::uint32_t layers, const std::string& where);

/// Reads and parses a cluster file.
/// \error kNotFound; other errors as ParseCluster
/// Local.
Result<Cluster> ReadCluster(const std::string& path, std::uint32_t layers);

}  // namespace shardwright::placement
