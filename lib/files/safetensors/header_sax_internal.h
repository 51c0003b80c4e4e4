// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>

#include "engine/tensor/shape.h"
#include "support/base/memory.h"
#include "support/base/result.h"

namespace shardwright::safetensors {

/// An entry of a header with the right JSON types, its values not checked yet.
struct RawEntry {
  std::string name;
  std::string dtype;
  Shape shape;
  std::uint64_t first = 0;  ///< data_offsets
  std::uint64_t last = 0;
};

struct RawHeader {
  std::map<std::string, std::string> metadata;
  std::string unknown_field;  ///< the first field that is not in the format
};

/// Parses a header's JSON event by event, so that memory use is proportional to its entries.
/// \param each  receives the entries in the order of the text; names
///        may repeat. Its first error ends the parse and is returned
/// \error kBadInput  not JSON of the format; names the byte or the tensor. kLimit
///        names or shapes beyond limits, or metadata that takes too much memory
/// Pure.
Result<RawHeader> ParseRaw(std::string_view text, const std::function<Status(RawEntry)>& each,
                           TextBudget* budget);

}  // namespace shardwright::safetensors
