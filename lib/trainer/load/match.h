// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "checkpoints/model/checkpoint.h"
#include "engine/plan/target.h"
#include "support/base/result.h"
#include "trainer/load/trainer_shard.h"

namespace shardwright::trainer {

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

/// Returns true if a held tensor of this kind belongs to the model: a weight, a frozen parameter or
/// a buffer. Masters and states belong to the optimizer.
bool IsOfModel(const std::string& kind);

/// Finds the name in the source that holds the data of a trainer's parameter: its own, that of a
/// wrapped module (checkpoints::PlainName), or of the parameter to which it is tied.
class Names {
 public:
  explicit Names(const checkpoints::Checkpoint& source);
  const std::string& Holder(const std::string& name) const;

 private:
  std::unordered_map<std::string, std::string> alias_of_;
  std::unordered_map<std::string, std::string> wrapped_;  // by plain name, where it is another
};

/// Finds the source of everything that the ranks of a trainer hold. What several ranks hold alike
/// is of the first of them, and a replica on the others.
/// \param by_rank    what each rank holds
/// \param optimizer  the trainer loads an optimizer (LoadOptions); masters or states in `by_rank`
///        imply it
/// \error kMismatch  a tensor of another shape; both sides are named
/// Pure.
Result<Match> MatchHeld(const checkpoints::Checkpoint& source,
                        const std::vector<std::vector<TrainerShard>>& by_rank, bool optimizer);

}  // namespace shardwright::trainer
