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

/// SHA-256 of the files of a checkpoint, as Megatron-Core writes them where it is asked to
/// (verify_integrity).
inline constexpr std::string_view kIntegrity = "integrity.json";

/// By name of the file: 64 hexadecimal digits.
using FileSums = std::map<std::string, std::string, std::less<>>;

/// \param where  for messages
/// \error kBadInput  no such file of Megatron-Core; kUnsupported  another algorithm
/// Pure.
Result<FileSums> ParseIntegrity(std::string_view text, const std::string& where);

/// The text of integrity.json, as Megatron-Core writes it.
std::string IntegrityText(const FileSums& sums);

/// Compares a file of which the whole text is at hand.
/// \error kBadInput  it is not listed, or has another sum; names both
Status CheckListed(const FileSums& sums, std::string_view name, std::string_view text,
                   const std::string& where);

/// The digests of the files of a source, where it has such a list.
/// \error as ParseIntegrity; kBadInput  a file that it does not list
/// Pure.
Result<std::vector<FileDigest>> DigestsOf(const SourceSet& source);

}  // namespace shardwright::checkpoints::megatron
