#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/result.h"
#include "dialect/core/checkpoint.h"
#include "live/held.h"
#include "plan/target.h"

namespace shardwright::live {

/// What a trainer holds, as the target of a plan.
struct Match {
  /// File r is the memory of rank r. Its payloads are the tensors of that rank that the source has,
  /// one after the other.
  plan::Target target;
  /// By rank: the tensor of each payload, an index into what that rank holds.
  std::vector<std::vector<std::uint32_t>> payloads;
  std::vector<std::string> missing;  ///< sorted
  std::vector<std::string> unused;   ///< sorted
};

/// The name that holds the data of a parameter: its own, or of what it is tied to.
class Names {
 public:
  explicit Names(const dialect::Checkpoint& source);
  const std::string& Holder(const std::string& name) const;

 private:
  std::unordered_map<std::string, std::string> alias_of_;
};

/// Finds the source of everything that the ranks of a trainer hold. What several ranks hold alike
/// is of the first of them, and a replica on the others.
/// \param by_rank  what each rank holds
/// \error kBadInput  a tensor of another shape; both sides are named
/// Pure.
Result<Match> MatchHeld(const dialect::Checkpoint& source,
                        const std::vector<std::vector<Held>>& by_rank);

}  // namespace shardwright::live
