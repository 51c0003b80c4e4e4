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

/// An entry as it stands in a header: of the right form, its values unchecked.
struct RawEntry {
  std::string name;
  std::string dtype;
  Shape shape;
  std::uint64_t first = 0;  ///< data_offsets
  std::uint64_t last = 0;
};

struct RawHeader {
  std::map<std::string, std::string> metadata;
  std::string unknown_field;  ///< the first one that the format does not have
};

/// Parses a header's JSON event by event, so that memory stays in proportion to its entries.
/// \param each  gets the entries in the order of the text; names may repeat. Its first error ends
///        the parse and is returned
/// \error kBadInput  not JSON, not of the format's form; names the byte or the tensor. kLimit names
///        or shapes beyond limits, metadata that takes too much memory
/// Pure.
Result<RawHeader> ParseRaw(std::string_view text, const std::function<Status(RawEntry)>& each,
                           TextBudget* budget);

}  // namespace shardwright::safetensors
