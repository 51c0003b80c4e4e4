// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "partial/select/types.h"
#include "support/base/result.h"

namespace shardwright::partial {

/// PLT that one fault is expected to cost with a K (ExpectedPlt of lost_tokens.h for one fault).
using FaultCost = std::function<double(std::uint32_t k)>;

/// K that doubles as lost tokens add up, until every checkpoint is full. Plain data: its state is
/// part of the checkpoint.
struct DynamicK {
  std::uint32_t experts = 1;  ///< N
  std::uint32_t k = 1;
  std::uint32_t levels = 0;  ///< H, lossy levels from the starting K: ceil(log2(N / K0))
  double limit = 0.0375;     ///< PLT of the whole run
  double spent = 0;          ///< PLT of the faults since k was raised
  double total = 0;          ///< PLT of all faults
  /// Raise k before a fault could exceed the level's share: the total stays below the limit as long
  /// as faults cost no more than expected. Otherwise after one has, and the total stays below the
  /// limit and one fault for each level.
  bool predict = false;
  std::uint64_t iterations = 0;  ///< length of the run, against which losses count; 0: not known

  friend bool operator==(const DynamicK&, const DynamicK&) = default;

  /// What a level may spend: limit / H. Without lossy levels nothing is spent: 0.
  double share() const { return levels == 0 ? 0 : limit / levels; }
};

/// \param k  K0, the K to start from
/// \error kUsage  K0 is 0 or above N, a limit that is not a positive number
/// Pure. Source: MoC-System section 6.3.3; docs/pec-planning.md section 8.2.
Result<DynamicK> MakeDynamicK(std::uint32_t experts, std::uint32_t k, double limit, bool predict);

/// Proves that a state that was read back is possible.
/// \error kBadInput  names the field and its value
/// Pure.
Status Validate(const DynamicK& state);

/// Proves that a state is of a model: N is the number of experts of its largest layer.
/// \error kBadInput  both numbers
/// Pure.
Status CheckExperts(const DynamicK& state, const LayerExperts& experts);

/// What a fault is expected to cost with even routing and every K alike on both levels: the mean
/// over the layers of SteadyLoss, over the iterations of the run.
/// \pre iterations > 0, and layers have experts
/// Pure. Source: docs/pec-planning.md sections 2.3, 8.2.
FaultCost EvenFaultCost(LayerExperts experts, std::uint64_t interval, std::uint64_t iterations);

/// Mode `predict`: raises k as long as one more fault would exceed its share. To be called at the
/// start and after each recovery; does nothing in the other mode.
/// Pure. Source: docs/pec-planning.md section 8.2.
void RaiseAhead(DynamicK* state, const FaultCost& cost);

/// Enters a recovery that cost `plt`: the level has spent it, and if that is above its share, k
/// doubles (up to N) and the next level starts at 0.
/// \error kUsage  a cost that is negative or not finite
/// Pure. Source: docs/pec-planning.md section 8.2.
Status EnterRecovery(DynamicK* state, double plt);

/// A K on the way to N.
struct KLevel {
  std::uint32_t k = 1;
  double plt = 0;            ///< that one fault is expected to cost
  std::uint64_t faults = 0;  ///< until K is raised
};

/// The levels that are left, the one that K is at included, N excluded. Absent: a level lasts more
/// than 2^53 faults, for they cost nothing.
/// Pure. Source: docs/pec-planning.md section 8.2.
std::optional<std::vector<KLevel>> LevelsAhead(const DynamicK& state, const FaultCost& cost);

/// Faults that still cost something before K reaches N, if each costs what is expected. Absent:
/// more than 2^53, for faults cost nothing at some level.
/// Pure. Source: docs/pec-planning.md section 12.
std::optional<std::uint64_t> FaultsCovered(const DynamicK& state, const FaultCost& cost);

}  // namespace shardwright::partial
