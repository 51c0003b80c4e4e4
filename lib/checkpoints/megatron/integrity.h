// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoints/model/checkpoint.h"
#include "checkpoints/model/source.h"
#include "support/base/result.h"

namespace shardwright::checkpoints::megatron {

/// File with the SHA-256 checksums of a checkpoint's files.
/// Megatron-Core writes it if the option verify_integrity is set.
inline constexpr std::string_view kIntegrity = "integrity.json";

/// Maps file names to checksums of 64 hexadecimal digits.
using FileSums = std::map<std::string, std::string, std::less<>>;

/// \param where  path for messages
/// \error kBadInput  not a Megatron-Core file; kUnsupported  another algorithm
/// Pure.
Result<FileSums> ParseIntegrity(std::string_view text, const std::string& where);

/// Returns the text of integrity.json, as Megatron-Core writes it.
std::string IntegrityText(const FileSums& sums);

/// Verifies a file from its entire text.
/// \error kBadInput  the file is not listed or has another checksum; names both
Status CheckListed(const FileSums& sums, std::string_view name, std::string_view text,
                   const std::string& where);

/// Returns the digests of a source's files. Empty if the source has no integrity.json.
/// \error as for ParseIntegrity; kBadInput  the list omits a file of the source
/// Pure.
Result<std::vector<FileDigest>> DigestsOf(const SourceSet& source);

}  // namespace shardwright::checkpoints::megatron
