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

/// The tensors of a trainer, as the target of a plan.
struct Match {
  /// File r is the memory of rank r. Its payloads are the tensors
  /// of that rank that the source also has, in consecutive order.
  plan::Target target;
  /// For each rank and payload: the index of its tensor in the list of the rank's shards.
  std::vector<std::vector<std::uint32_t>> payloads;
  std::vector<std::string> missing;  ///< sorted
  std::vector<std::string> unused;   ///< sorted
};

/// Returns true if a tensor of this kind belongs to the model: a weight, a
/// frozen parameter or a buffer. Masters and states belong to the optimizer.
bool IsOfModel(const std::string& kind);

/// Finds the name under which the source stores a trainer's parameter: its own name, that
/// of a wrapped module (checkpoints::PlainName), or of the parameter to which it is tied.
class Names {
 public:
  explicit Names(const checkpoints::Checkpoint& source);
  const std::string& Holder(const std::string& name) const;

 private:
  std::unordered_map<std::string, std::string> alias_of_;
  std::unordered_map<std::string, std::string> wrapped_;  // by plain name, if that differs
};

/// Finds the source data for all shards of a trainer's ranks. If several ranks have
/// the same elements, the first one gets the shard, and the others get replicas.
/// \param by_rank    the shards of each rank
/// \param optimizer  the trainer loads an optimizer (LoadOptions); masters or
///        states in `by_rank` imply it
/// \error kMismatch  a tensor has another shape; the message has both shapes
/// Pure.
Result<Match> MatchShards(const checkpoints::Checkpoint& source,
                          const std::vector<std::vector<TrainerShard>>& by_rank, bool optimizer);

}  // namespace shardwright::trainer
