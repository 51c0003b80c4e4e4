#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "dialect/dcp/dcp.h"
#include "format/dcp/index.h"

namespace shardwright::dialect::dcp {

/// What an entry of an index is.
struct Sorted {
  enum class Kind : std::uint8_t {
    kModel,   ///< a tensor of the model
    kSlot,    ///< what the optimizer keeps of a parameter
    kOption,  ///< of a parameter group, or of one parameter (flat)
    kExtra,
  };
  Kind kind = Kind::kExtra;
  std::string_view name;    ///< of the parameter; of a nested option empty
  std::string_view key;     ///< of a slot or option
  std::uint64_t group = 0;  ///< of a nested option
};

/// Says what all entries are, and how they are named.
/// \param indexes  one, or those of a pair
/// \param sorted   by index, by entry; views into the index
/// \error kUnsupported  the states of several optimizers
/// Pure.
Result<Naming> Sort(const std::vector<const shardwright::dcp::Index*>& indexes,
                    std::vector<std::vector<Sorted>>* sorted);

}  // namespace shardwright::dialect::dcp
