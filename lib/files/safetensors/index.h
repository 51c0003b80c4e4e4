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
  std::optional<std::uint64_t> total_bytes;  ///< of all tensors, where it says so
};

/// Parses an index. Names of files are checked to be base names; they are data and never opened by
/// themselves.
/// \param where  starts every message
/// \error kBadInput  not JSON, a key twice, no weight_map, a file that is no base name; kLimit
/// above
///        limits::kSafetensorsIndexBytes
/// Pure. Source: docs/formats/safetensors.md, "Sets of files".
Result<Index> ParseIndex(std::string_view text, const std::string& where);

/// The text of an index: sorted, the same for the same content.
/// Pure.
std::string IndexText(const Index& index);

/// "model-00002-of-00003.safetensors", or "model.safetensors" if there is one file.
/// \param file  counts from 0
std::string FileName(std::uint64_t file, std::uint64_t files);

inline constexpr std::string_view kSuffix = ".safetensors";
inline constexpr std::string_view kIndexName = "model.safetensors.index.json";

}  // namespace shardwright::safetensors
