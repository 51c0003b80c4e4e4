// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

#include "files/part.h"
#include "files/torch_pt/reader.h"
#include "support/base/result.h"

namespace shardwright::torch_pt {

/// Returns the first pickle of a legacy stream, which contains its magic number.
std::string_view LegacyMagic();

/// Reads the beginning of a stream written by torch before 1.6 and locates its storages.
/// \error as ReadMetadata; messages without the file's name
Result<ContainerMetadata> ReadLegacy(const files::Part& file, std::uint64_t file_bytes);

}  // namespace shardwright::torch_pt
