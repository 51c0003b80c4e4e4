// SPDX-License-Identifier: Apache-2.0
#include "partial/select/sharding/replica_placement.h"

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>

#include "support/base/checked.h"
#include "support/base/limits.h"

namespace shardwright::partial {
namespace {

std::uint32_t Workers(const WorkerGrid& grid) { return grid.dp * grid.pp; }

/// Returns worker_at[stage * dp + peer]. \error kUsage
Result<std::vector<std::uint32_t>> WorkersByPlace(const WorkerGrid& grid) {
  if (grid.dp == 0 || grid.pp == 0 || std::uint64_t{grid.dp} * grid.pp > limits::kRanks) {
    return Fail(Errc::kUsage, "a grid of ", grid.dp, " x ", grid.pp, " workers, expected 1 to ",
                limits::kRanks);
  }
  const std::uint32_t workers = Workers(grid);
  for (const auto* list : {&grid.stage, &grid.peer, &grid.node}) {
    if (list->size() != workers) {
      return Fail(Errc::kUsage, "the grid has places for ", list->size(), " workers, expected ",
                  workers);
    }
  }
  std::vector<std::uint32_t> worker_at(workers, workers);
  for (std::uint32_t i = 0; i < workers; ++i) {
    const bool inside = grid.stage[i] < grid.pp && grid.peer[i] < grid.dp;
    if (!inside || worker_at[grid.stage[i] * grid.dp + grid.peer[i]] != workers) {
      return Fail(Errc::kUsage, "worker ", i, ": place ", grid.peer[i], " of stage ", grid.stage[i],
                  (inside ? " is already taken" : " does not exist"));
    }
    worker_at[grid.stage[i] * grid.dp + grid.peer[i]] = i;
  }
  return worker_at;
}

/// Returns the n-th candidate for a copy of `worker`, 0 <= n < workers - 1.
std::uint32_t Rotated(const WorkerGrid& grid, const std::vector<std::uint32_t>& worker_at,
                      std::uint32_t worker, std::uint32_t n) {
  const std::uint32_t stages = grid.pp;
  const std::uint32_t peers = grid.dp;
  SW_CHECK(stages > 0 && peers > 0);
  std::uint32_t stage = grid.stage[worker];
  std::uint32_t peer = grid.peer[worker];
  const std::uint32_t other_stages = std::max(stages, 2U) - 1;
  if (n < peers - 1) {
    peer += n + 1;
  } else {
    n -= peers - 1;
    stage += n % other_stages + 1;
    peer += n / other_stages;
  }
  return worker_at[stage % stages * peers + peer % peers];
}

void Place(const WorkerGrid& grid, std::uint32_t worker, std::uint32_t holder, ReplicaPlan* plan) {
  plan->holders[worker].push_back(holder);
  ++plan->load[holder];
  ++(grid.stage[worker] == grid.stage[holder] ? plan->cheap : plan->costly);
}

/// Returns the plan before any copy is placed, with `alive` of all workers to choose from.
ReplicaPlan NoCopies(std::uint32_t workers, std::uint32_t alive, std::uint32_t replicas) {
  ReplicaPlan plan;
  plan.holders.resize(workers);
  plan.load.assign(workers, 0);
  plan.replicas = std::min(replicas, std::max(alive, 1U) - 1);
  plan.clamped = plan.replicas < replicas;
  return plan;
}

/// Places copies by rotation if that keeps all of them off their own nodes.
bool PlaceByRotation(const WorkerGrid& grid, const std::vector<std::uint32_t>& worker_at,
                     const StopCheck& stop, ReplicaPlan* plan) {
  const std::uint32_t workers = Workers(grid);
  for (std::uint32_t i = 0; i < workers && !Stopped(stop); ++i) {
    for (std::uint32_t n = 0; n < plan->replicas; ++n) {
      if (grid.node[Rotated(grid, worker_at, i, n)] == grid.node[i]) return false;
    }
  }
  for (std::uint32_t i = 0; i < workers && !Stopped(stop); ++i) {
    for (std::uint32_t n = 0; n < plan->replicas; ++n) {
      Place(grid, i, Rotated(grid, worker_at, i, n), plan);
    }
  }
  return true;
}

/// Places the missing copies of every worker that is not lost.
void PlaceByLoad(const WorkerGrid& grid, const std::vector<std::uint32_t>& worker_at,
                 const std::vector<bool>& lost, const StopCheck& stop, ReplicaPlan* plan) {
  const std::uint32_t workers = Workers(grid);
  std::vector<std::tuple<bool, std::uint32_t, std::uint32_t>> candidates;  // costly, load, n
  for (std::uint32_t i = 0; i < workers && !Stopped(stop); ++i) {
    if (lost[i]) continue;
    candidates.clear();
    for (std::uint32_t n = 0; n + 1 < workers; ++n) {
      const std::uint32_t holder = Rotated(grid, worker_at, i, n);
      if (grid.node[holder] == grid.node[i] || lost[holder]) continue;
      if (std::ranges::find(plan->holders[i], holder) != plan->holders[i].end()) continue;
      candidates.emplace_back(grid.stage[holder] != grid.stage[i], plan->load[holder], n);
    }
    const std::size_t missing = plan->replicas - plan->holders[i].size();
    const std::size_t count = std::min(missing, candidates.size());
    std::partial_sort(candidates.begin(), candidates.begin() + static_cast<std::ptrdiff_t>(count),
                      candidates.end());
    for (std::size_t c = 0; c < count; ++c) {
      Place(grid, i, Rotated(grid, worker_at, i, std::get<2>(candidates[c])), plan);
    }
    if (count < missing) plan->incomplete.push_back(i);
  }
}

/// Returns part `index` of `parts` equal parts; lower ones are larger.
ComponentBytes PartOf(const ComponentBytes& bytes, std::uint64_t index, std::uint64_t parts) {
  const auto part = [&](std::uint64_t all) { return all / parts + (index < all % parts ? 1 : 0); };
  return {part(bytes.weights), part(bytes.master), part(bytes.moments)};
}

/// Returns the bytes that a checkpoint has of the experts of each expert-parallel rank.
Result<std::vector<ComponentBytes>> ExpertsOfRanks(const ExpertMap& map, const ModelBytes& model,
                                                   const Selection& selection, const Keep& keep) {
  const LayerExperts experts = map.experts();
  if (ShapeOf(model.expert) != experts) {
    return Fail(Errc::kMismatch,
                "the expert sizes and the expert map have different MoE layers or experts");
  }
  SW_TRY(Validate(selection, experts));
  std::vector<ComponentBytes> of_rank(map.ep);
  for (std::size_t m = 0; m < experts.size(); ++m) {
    std::vector<bool> selected(experts[m], false);
    for (const std::uint32_t e : selection[m]) selected[e] = true;
    for (std::size_t e = 0; e < experts[m]; ++e) {
      SW_TRY(AddTo(&of_rank[map.rank[m][e]], SavedBytes(model.expert[m][e], selected[e], keep)));
    }
  }
  return of_rank;
}

/// Returns true if the peers first, first + step, ... of a stage are on several nodes.
bool Spreads(const WorkerGrid& grid, const std::vector<std::uint32_t>& worker_at,
             std::uint32_t stage, std::uint32_t first, std::uint32_t step) {
  const auto node = [&](std::uint32_t peer) {
    return grid.node[worker_at[stage * grid.dp + peer]];
  };
  for (std::uint32_t peer = first; peer < grid.dp; peer += step) {
    if (node(peer) != node(first)) return true;
  }
  return false;
}

}  // namespace

Result<WorkerGrid> StageMajorGrid(std::uint32_t dp, std::uint32_t pp,
                                  std::uint32_t workers_per_node) {
  if (dp == 0 || pp == 0 || workers_per_node == 0) {
    return Fail(Errc::kUsage, dp, " x ", pp, " workers, ", workers_per_node,
                " workers per node: expected at least one of each");
  }
  if (std::uint64_t{dp} * pp > limits::kRanks) {
    return Fail(Errc::kLimit, dp, " x ", pp, " workers: expected at most ", limits::kRanks);
  }
  WorkerGrid grid{dp, pp, {}, {}, {}};
  for (std::uint32_t i = 0; i < dp * pp; ++i) {
    grid.stage.push_back(i / dp);
    grid.peer.push_back(i % dp);
    grid.node.push_back(i / workers_per_node);
  }
  return grid;
}

Result<ReplicaPlan> PlaceReplicas(const WorkerGrid& grid, std::uint32_t replicas,
                                  const StopCheck& stop) {
  SW_TRY_ASSIGN(const std::vector<std::uint32_t> worker_at, WorkersByPlace(grid));
  const std::uint32_t workers = Workers(grid);
  ReplicaPlan plan = NoCopies(workers, workers, replicas);
  if (!PlaceByRotation(grid, worker_at, stop, &plan)) {
    PlaceByLoad(grid, worker_at, std::vector<bool>(workers), stop, &plan);
  }
  SW_TRY(CheckStop(stop));
  return plan;
}

Result<ReplicaPlan> PlaceLostReplicas(const WorkerGrid& grid, std::uint32_t replicas,
                                      const std::vector<bool>& lost,
                                      const std::vector<std::vector<std::uint32_t>>& before,
                                      const StopCheck& stop) {
  SW_TRY_ASSIGN(const std::vector<std::uint32_t> worker_at, WorkersByPlace(grid));
  const std::uint32_t workers = Workers(grid);
  if (lost.size() != workers || before.size() != workers) {
    return Fail(Errc::kUsage, "states of ", lost.size(), " workers and copies of ", before.size(),
                ", expected ", workers);
  }
  const auto alive = static_cast<std::uint32_t>(std::ranges::count(lost, false));
  if (alive == workers) return PlaceReplicas(grid, replicas, stop);
  ReplicaPlan plan = NoCopies(workers, alive, replicas);
  for (std::uint32_t i = 0; i < workers; ++i) {
    for (const std::uint32_t holder : before[i]) {
      if (holder >= workers || grid.node[holder] == grid.node[i]) {
        return Fail(Errc::kUsage, "worker ", i, ": worker ", holder, " cannot hold its copy");
      }
      const bool kept = !lost[i] && !lost[holder] && plan.holders[i].size() < plan.replicas;
      if (kept) Place(grid, i, holder, &plan);
    }
  }
  PlaceByLoad(grid, worker_at, lost, stop, &plan);
  SW_TRY(CheckStop(stop));
  return plan;
}

Result<std::uint64_t> ReplicaBytes(std::uint32_t zero_stage, const ComponentBytes& nonexpert,
                                   const ComponentBytes& expert, bool experts_shared) {
  if (zero_stage > 3) {
    return Fail(Errc::kUsage, "ZeRO stage ", zero_stage, ", expected 0 to 3");
  }
  const auto unshared = [&](const ComponentBytes& bytes) -> Result<std::uint64_t> {
    if (zero_stage == 3) return TotalBytes(bytes);
    if (zero_stage == 0) return std::uint64_t{0};
    return CheckedAdd(bytes.master, bytes.moments);
  };
  SW_TRY_ASSIGN(const std::uint64_t rest, unshared(nonexpert));
  SW_TRY_ASSIGN(const std::uint64_t experts,
                experts_shared ? unshared(expert) : TotalBytes(expert));
  return CheckedAdd(rest, experts);
}

Result<std::vector<std::uint64_t>> CopyBytes(const WorkerGrid& grid, const ExpertMap& map,
                                             const ModelBytes& model, const Selection& selection,
                                             const Keep& keep, std::uint32_t zero_stage) {
  SW_TRY_ASSIGN(const std::vector<std::uint32_t> worker_at, WorkersByPlace(grid));
  if (map.ep == 0 || grid.dp % map.ep != 0) {
    return Fail(Errc::kUsage, grid.dp, " workers per stage: expected a multiple of ", map.ep,
                " expert-parallel ranks");
  }
  ComponentBytes rest;
  for (const ComponentBytes& module : model.nonexpert) SW_TRY(AddTo(&rest, module));
  SW_TRY_ASSIGN(const std::vector<ComponentBytes> experts,
                ExpertsOfRanks(map, model, selection, keep));
  std::vector<std::uint64_t> bytes(Workers(grid));
  for (std::uint32_t stage = 0; stage < grid.pp; ++stage) {
    const bool rest_survives = Spreads(grid, worker_at, stage, 0, 1);
    for (std::uint32_t d = 0; d < grid.dp; ++d) {
      const std::uint32_t r = d % map.ep;
      const bool experts_survive = Spreads(grid, worker_at, stage, r, map.ep);
      SW_TRY_ASSIGN(const std::uint64_t of_rest, ReplicaBytes(rest_survives ? zero_stage : 3,
                                                              PartOf(rest, d, grid.dp), {}, true));
      SW_TRY_ASSIGN(const std::uint64_t of_experts,
                    ReplicaBytes(zero_stage, {}, PartOf(experts[r], d / map.ep, grid.dp / map.ep),
                                 experts_survive));
      SW_TRY_ASSIGN(bytes[worker_at[stage * grid.dp + d]], CheckedAdd(of_rest, of_experts));
    }
  }
  return bytes;
}

}  // namespace shardwright::partial
