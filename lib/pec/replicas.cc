#include "pec/replicas.h"

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>

#include "base/checked.h"
#include "base/limits.h"

namespace shardwright::pec {
namespace {

std::uint32_t Workers(const WorkerGrid& grid) { return grid.dp * grid.pp; }

/// worker_at[stage * dp + peer]. \error kUsage
Result<std::vector<std::uint32_t>> WorkersByPlace(const WorkerGrid& grid) {
  if (grid.dp == 0 || grid.pp == 0 || std::uint64_t{grid.dp} * grid.pp > limits::kRanks) {
    return Fail(Errc::kUsage, "a grid of " + std::to_string(grid.dp) + " x " +
                                  std::to_string(grid.pp) + " workers, expected 1 to " +
                                  std::to_string(limits::kRanks));
  }
  const std::uint32_t workers = Workers(grid);
  for (const auto* list : {&grid.stage, &grid.peer, &grid.node}) {
    if (list->size() != workers) {
      return Fail(Errc::kUsage, "a grid of " + std::to_string(workers) +
                                    " workers with places for " + std::to_string(list->size()));
    }
  }
  std::vector<std::uint32_t> worker_at(workers, workers);
  for (std::uint32_t i = 0; i < workers; ++i) {
    const bool inside = grid.stage[i] < grid.pp && grid.peer[i] < grid.dp;
    if (!inside || worker_at[grid.stage[i] * grid.dp + grid.peer[i]] != workers) {
      return Fail(Errc::kUsage, "worker " + std::to_string(i) + ": place " +
                                    std::to_string(grid.peer[i]) + " of stage " +
                                    std::to_string(grid.stage[i]) +
                                    (inside ? " is taken already" : " does not exist"));
    }
    worker_at[grid.stage[i] * grid.dp + grid.peer[i]] = i;
  }
  return worker_at;
}

/// The n-th worker that is asked to keep a copy of `worker`, 0 <= n < workers - 1.
std::uint32_t Rotated(const WorkerGrid& grid, const std::vector<std::uint32_t>& worker_at,
                      std::uint32_t worker, std::uint32_t n) {
  std::uint32_t stage = grid.stage[worker];
  std::uint32_t peer = grid.peer[worker];
  const std::uint32_t other_stages = grid.pp > 1 ? grid.pp - 1 : 1;
  if (n < grid.dp - 1) {
    peer += n + 1;
  } else {
    n -= grid.dp - 1;
    stage += n % other_stages + 1;
    peer += n / other_stages;
  }
  return worker_at[stage % grid.pp * grid.dp + peer % grid.dp];
}

void Place(const WorkerGrid& grid, std::uint32_t worker, std::uint32_t holder, ReplicaPlan* plan) {
  plan->holders[worker].push_back(holder);
  ++plan->load[holder];
  ++(grid.stage[worker] == grid.stage[holder] ? plan->cheap : plan->costly);
}

/// The rotation, if no copy lies on its own node.
bool PlaceByRotation(const WorkerGrid& grid, const std::vector<std::uint32_t>& worker_at,
                     ReplicaPlan* plan) {
  const std::uint32_t workers = Workers(grid);
  for (std::uint32_t i = 0; i < workers; ++i) {
    for (std::uint32_t n = 0; n < plan->replicas; ++n) {
      if (grid.node[Rotated(grid, worker_at, i, n)] == grid.node[i]) return false;
    }
  }
  for (std::uint32_t i = 0; i < workers; ++i) {
    for (std::uint32_t n = 0; n < plan->replicas; ++n) {
      Place(grid, i, Rotated(grid, worker_at, i, n), plan);
    }
  }
  return true;
}

void PlaceByLoad(const WorkerGrid& grid, const std::vector<std::uint32_t>& worker_at,
                 ReplicaPlan* plan) {
  const std::uint32_t workers = Workers(grid);
  std::vector<std::tuple<bool, std::uint32_t, std::uint32_t>> candidates;  // costly, load, n
  for (std::uint32_t i = 0; i < workers; ++i) {
    candidates.clear();
    for (std::uint32_t n = 0; n + 1 < workers; ++n) {
      const std::uint32_t holder = Rotated(grid, worker_at, i, n);
      if (grid.node[holder] == grid.node[i]) continue;
      candidates.emplace_back(grid.stage[holder] != grid.stage[i], plan->load[holder], n);
    }
    const std::size_t count = std::min<std::size_t>(plan->replicas, candidates.size());
    std::partial_sort(candidates.begin(), candidates.begin() + static_cast<std::ptrdiff_t>(count),
                      candidates.end());
    for (std::size_t c = 0; c < count; ++c) {
      Place(grid, i, Rotated(grid, worker_at, i, std::get<2>(candidates[c])), plan);
    }
    if (count < plan->replicas) plan->incomplete.push_back(i);
  }
}

}  // namespace

Result<WorkerGrid> StageMajorGrid(std::uint32_t dp, std::uint32_t pp,
                                  std::uint32_t workers_per_node) {
  if (dp == 0 || pp == 0 || workers_per_node == 0) {
    return Fail(Errc::kUsage, std::to_string(dp) + " x " + std::to_string(pp) + " workers, " +
                                  std::to_string(workers_per_node) +
                                  " on a node: expected at least one of each");
  }
  if (std::uint64_t{dp} * pp > limits::kRanks) {
    return Fail(Errc::kLimit, std::to_string(dp) + " x " + std::to_string(pp) +
                                  " workers, at most " + std::to_string(limits::kRanks) +
                                  " are handled");
  }
  WorkerGrid grid{dp, pp, {}, {}, {}};
  for (std::uint32_t i = 0; i < dp * pp; ++i) {
    grid.stage.push_back(i / dp);
    grid.peer.push_back(i % dp);
    grid.node.push_back(i / workers_per_node);
  }
  return grid;
}

Result<ReplicaPlan> PlaceReplicas(const WorkerGrid& grid, std::uint32_t replicas) {
  SW_TRY_ASSIGN(const std::vector<std::uint32_t> worker_at, WorkersByPlace(grid));
  const std::uint32_t workers = Workers(grid);
  ReplicaPlan plan;
  plan.holders.resize(workers);
  plan.load.assign(workers, 0);
  plan.replicas = std::min(replicas, workers - 1);
  plan.clamped = plan.replicas < replicas;
  if (!PlaceByRotation(grid, worker_at, &plan)) PlaceByLoad(grid, worker_at, &plan);
  return plan;
}

Result<std::uint64_t> ReplicaBytes(std::uint32_t zero_stage, const ComponentBytes& nonexpert,
                                   const ComponentBytes& expert, bool experts_shared) {
  if (zero_stage > 3) {
    return Fail(Errc::kUsage, "ZeRO stage " + std::to_string(zero_stage) + ", expected 0 to 3");
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

}  // namespace shardwright::pec
