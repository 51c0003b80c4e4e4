// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "support/base/result.h"

namespace shardwright::safetensors {

/// The index of a set of files: `model.safetensors.index.json`.
struct Index {
  std::map<std::string, std::string> files;  ///< by tensor: the base name of its file
  std::optional<std::uint64_t> total_bytes;  ///< of all tensors, if the index has it
};

/// Parses an index. Checks that file names are base names; the caller
/// treats them as untrusted data and opens no file by them alone.
/// \param where  starts every message
/// \error kBadInput  not JSON, a duplicate key, no
///        weight_map, a file name with a path; kLimit
///        larger than limits::kSafetensorsIndexBytes
/// Pure. Source: docs/formats/safetensors.md, "Sets of files".
Result<Index> ParseIndex(std::string_view text, const std::string& where);

/// Returns the text of an index, sorted, so that equal indexes have equal texts.
/// Pure.
std::string IndexText(const Index& index);

/// Returns "model-00002-of-00003.safetensors", or "model.safetensors" if there is one file.
/// \param file  counts from 0
std::string FileName(std::uint64_t file, std::uint64_t files);

inline constexpr std::string_view kSuffix = ".safetensors";
inline constexpr std::string_view kIndexName = "model.safetensors.index.json";

}  // namespace shardwright::safetensors
