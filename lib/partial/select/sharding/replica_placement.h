// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "partial/select/selection.h"
#include "partial/select/sizes.h"
#include "support/base/result.h"
#include "support/base/stop.h"

namespace shardwright::partial {

/// Where the workers of a job are. There are dp * pp of them: every pipeline stage has dp workers
/// that hold the same parameters (a group).
struct WorkerGrid {
  std::uint32_t dp = 1;
  std::uint32_t pp = 1;
  std::vector<std::uint32_t> stage;  ///< [worker]
  std::vector<std::uint32_t> peer;   ///< [worker]: d, its index in the group of its stage
  std::vector<std::uint32_t> node;   ///< [worker]
};

/// worker = stage * dp + d, and every run of `workers_per_node` workers on a node.
/// \error kUsage  a number that is 0; kLimit  too many workers
/// Pure.
Result<WorkerGrid> StageMajorGrid(std::uint32_t dp, std::uint32_t pp,
                                  std::uint32_t workers_per_node);

/// Copies of every worker's checkpoint in the memory of others.
struct ReplicaPlan {
  std::vector<std::vector<std::uint32_t>> holders;  ///< [worker]: who keeps its copies, best first
  std::vector<std::uint32_t> load;                  ///< [worker]: foreign checkpoints it keeps
  std::uint64_t cheap = 0;                          ///< copies within a group
  std::uint64_t costly = 0;                         ///< all others
  std::uint32_t replicas = 0;                       ///< r, clamped to the number of other workers
  bool clamped = false;                             ///< more were asked for
  std::vector<std::uint32_t> incomplete;  ///< workers with fewer than `replicas`: too few nodes
};

/// Places `replicas` copies of every worker's checkpoint on workers of other nodes, those of its
/// own group first. If rotation alone keeps copies off their own nodes it is taken: the a-th copy
/// of peer d goes to peer d + a (mod dp) of its stage, later ones to peer d + shift of stage + b
/// for shift = 0, 1, ..., b = 1 .. pp-1; every worker then keeps exactly r copies. Otherwise,
/// worker after worker takes the least loaded candidate of another node, within its group first;
/// ties: the order of the rotation.
/// \error kUsage  a grid that is no full dp x pp grid: names the worker; kStopped
/// Pure but for `stop`. Source: MoEtion Algorithm 2 as corrected in docs/pec-planning.md section
/// 9.3.
Result<ReplicaPlan> PlaceReplicas(const WorkerGrid& grid, std::uint32_t replicas,
                                  const StopCheck& stop = {});

/// Bytes of a worker that its group does not hold anyway, so that copies of them must be sent.
/// Stage 0: nothing but the experts; 1, 2: the optimizer's shards, not the weights; 3: everything.
/// \param experts_shared  peers of the group hold the same experts (more than one expert-parallel
///        group): experts count as the rest does; otherwise all of an expert is sent
/// \error kUsage  another ZeRO stage; kBadInput  overflow
/// Pure. Source: docs/pec-planning.md section 9.3.
Result<std::uint64_t> ReplicaBytes(std::uint32_t zero_stage, const ComponentBytes& nonexpert,
                                   const ComponentBytes& expert, bool experts_shared);

/// Bytes that each worker sends for one copy of its part of a checkpoint: its share of what does
/// not survive the loss of its node anyway. ReplicaBytes with equal shares; where all workers that
/// hold the same bytes are on one node, those bytes are sent, too.
/// \param map, model, selection, keep  of one pipeline stage; all stages are alike
/// \returns [worker]
/// \error kUsage  another ZeRO stage, a grid that is none, dp that is no multiple of the map's ep;
///        kMismatch, kBadInput  a selection that does not fit; kBadInput  overflow
/// Pure. Source: docs/pec-planning.md section 9.3.
Result<std::vector<std::uint64_t>> CopyBytes(const WorkerGrid& grid, const ExpertMap& map,
                                             const ModelBytes& model, const Selection& selection,
                                             const Keep& keep, std::uint32_t zero_stage);

}  // namespace shardwright::partial
