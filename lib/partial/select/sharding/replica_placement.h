// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "partial/select/selection.h"
#include "partial/select/sizes.h"
#include "support/base/result.h"
#include "support/base/stop.h"

namespace shardwright::partial {

/// Locations of the dp * pp workers of a job. Every pipeline
/// stage has a group of dp workers with the same parameters.
struct WorkerGrid {
  std::uint32_t dp = 1;
  std::uint32_t pp = 1;
  std::vector<std::uint32_t> stage;  ///< [worker]
  std::vector<std::uint32_t> peer;   ///< [worker]: d, its index in the group of its stage
  std::vector<std::uint32_t> node;   ///< [worker]
};

/// Builds the grid worker = stage * dp + d, with `workers_per_node` consecutive workers per node.
/// \error kUsage  a number is 0; kLimit  too many workers
/// Pure.
Result<WorkerGrid> StageMajorGrid(std::uint32_t dp, std::uint32_t pp,
                                  std::uint32_t workers_per_node);

/// Copies of every worker's checkpoint in the memory of other workers.
struct ReplicaPlan {
  std::vector<std::vector<std::uint32_t>> holders;  ///< [worker]: workers with copies, best first
  std::vector<std::uint32_t> load;                  ///< [worker]: foreign copies that it stores
  std::uint64_t cheap = 0;                          ///< copies within a group
  std::uint64_t costly = 0;                         ///< all others
  std::uint32_t replicas = 0;                       ///< r, clamped to the number of other workers
  bool clamped = false;                             ///< true if `replicas` was reduced
  std::vector<std::uint32_t> incomplete;  ///< workers with fewer than `replicas`: too few nodes
};

/// Places `replicas` copies of every worker's checkpoint on workers of other nodes,
/// preferably in its own group. Uses rotation if that keeps copies off their own nodes:
/// the a-th copy of peer d goes to peer d + a (mod dp) of its stage, later ones to peer
/// d + shift of stage + b for shift = 0, 1, ..., b = 1 .. pp-1, so that every worker
/// stores exactly r copies. Otherwise each worker in turn takes the least loaded
/// candidate of another node, first within its group; ties: the order of the rotation.
/// \error kUsage  the grid is not a full dp x pp grid: names the worker; kStopped
/// Pure but for `stop`. Source: MoEtion Algorithm 2 as corrected in docs/pec-planning.md section
/// 9.3.
Result<ReplicaPlan> PlaceReplicas(const WorkerGrid& grid, std::uint32_t replicas,
                                  const StopCheck& stop = {});

/// Places copies again after workers were lost, which then neither have nor store copies. Other
/// copies stay where they are, so that they are not sent again. Each missing one goes to the least
/// loaded candidate, first within the group, as in PlaceReplicas.
/// \param lost  [worker]; if it is false for all workers, the result is that of PlaceReplicas
/// \param before  [worker]: workers of other nodes that have stored its copies so far
/// \error kUsage  as PlaceReplicas; `lost` or `before` do not have one entry for each worker, or
///        name a worker that does not exist; kStopped
/// Pure but for `stop`. Source: docs/pec-planning.md section 9.3.
Result<ReplicaPlan> PlaceLostReplicas(const WorkerGrid& grid, std::uint32_t replicas,
                                      const std::vector<bool>& lost,
                                      const std::vector<std::vector<std::uint32_t>>& before,
                                      const StopCheck& stop = {});

/// Returns the bytes of a worker that its group does not already replicate, so that copies
/// must be sent. ZeRO stage 0: only the experts; 1, 2: the optimizer's shards; 3: everything.
/// \param experts_shared  peers of the group have the same experts (more than one expert-parallel
///        group), so experts count like the rest; otherwise each expert is sent in full
/// \error kUsage  unknown ZeRO stage; kBadInput  overflow
/// Pure. Source: docs/pec-planning.md section 9.3.
Result<std::uint64_t> ReplicaBytes(std::uint32_t zero_stage, const ComponentBytes& nonexpert,
                                   const ComponentBytes& expert, bool experts_shared);

/// Returns the bytes that each worker sends for one copy of its part of a
/// checkpoint: its share of the state that is lost with its node. As
/// ReplicaBytes with equal shares; adds bytes that exist only on one node.
/// \param map, model, selection, keep  for one pipeline stage; all stages are equal
/// \returns [worker]
/// \error kUsage  unknown ZeRO stage, invalid grid, or dp not a multiple of the map's
///        ep; kMismatch, kBadInput  a selection that does not fit; kBadInput  overflow
/// Pure. Source: docs/pec-planning.md section 9.3.
Result<std::vector<std::uint64_t>> CopyBytes(const WorkerGrid& grid, const ExpertMap& map,
                                             const ModelBytes& model, const Selection& selection,
                                             const Keep& keep, std::uint32_t zero_stage);

}  // namespace shardwright::partial
