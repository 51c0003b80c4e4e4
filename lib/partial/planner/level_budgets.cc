// SPDX-License-Identifier: Apache-2.0
#include "partial/planner/level_budgets.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

#include "partial/select/sharding/replica_placement.h"
#include "support/base/bytes.h"
#include "support/base/checked.h"

namespace shardwright::partial {
namespace {

/// Makes a level without experts. \error kUsage  a budget that does not fit in 64 bits
Result<LevelBudget> MakeLevel(std::uint64_t bandwidth, double iteration_s, std::uint64_t ranks) {
  LevelBudget level;
  level.bandwidth = bandwidth;
  level.iteration_s = iteration_s;
  level.ranks = ranks;
  SW_TRY_ASSIGN(level.rank_bytes, BytesPerIteration(bandwidth, iteration_s));
  if (__builtin_mul_overflow(level.rank_bytes, ranks, &level.bytes)) {
    return Fail(Errc::kUsage, FormatBytes(level.rank_bytes), " per iteration of each of ", ranks,
                " ranks: the budget does not fit in 64 bits");
  }
  return level;
}

/// Bytes that all workers of a stage send.
struct CopyCost {
  std::uint64_t nonexpert = 0;
  std::uint64_t expert = 0;  ///< of the expert that takes most
};

/// Selects the expert of every expert-parallel rank that has the most bytes without kept ones.
Selection LargestOfRanks(const Job& job) {
  std::vector<std::uint64_t> most(job.map.ep, 0);
  std::vector<std::pair<std::size_t, std::uint32_t>> expert(job.map.ep);
  for (std::size_t m = 0; m < job.map.rank.size(); ++m) {
    for (std::uint32_t e = 0; e < job.map.rank[m].size(); ++e) {
      const ComponentBytes& all = job.model.expert[m][e];
      const std::uint64_t bytes = all.weights + all.master + all.moments - KeptBytes(all, job.keep);
      const std::uint32_t rank = job.map.rank[m][e];
      if (bytes <= most[rank]) continue;
      most[rank] = bytes;
      expert[rank] = {m, e};
    }
  }
  Selection selection(job.map.rank.size());
  for (std::uint32_t rank = 0; rank < job.map.ep; ++rank) {
    if (most[rank] > 0) selection[expert[rank].first].push_back(expert[rank].second);
  }
  return selection;
}

/// Computes the costs of `copies` copies.
Result<CopyCost> CostOf(const Job& job, const WorkerGrid& grid, const RemoteInput& input) {
  const auto bytes_of = [&](const Selection& selection) {
    return CopyBytes(grid, job.map, job.model, selection, job.keep, input.zero_stage);
  };
  SW_TRY_ASSIGN(const auto without, bytes_of(Selection(job.map.rank.size())));
  SW_TRY_ASSIGN(const auto with, bytes_of(LargestOfRanks(job)));
  CopyCost cost;
  std::vector<std::uint64_t> of_rank(job.map.ep, 0);
  for (std::size_t i = 0; i < without.size(); ++i) {
    SW_TRY_ASSIGN(cost.nonexpert, CheckedAdd(cost.nonexpert, without[i]));
    of_rank[grid.peer[i] % job.map.ep] += with[i] - without[i];
  }
  SW_TRY_ASSIGN(cost.nonexpert, CheckedMul(cost.nonexpert, input.copies));
  SW_TRY_ASSIGN(cost.expert,
                CheckedMul(*std::max_element(of_rank.begin(), of_rank.end()), input.copies));
  return cost;
}

Result<ExpertBudget> BudgetOfCopies(std::uint64_t bytes, const CopyCost& cost, const Job& job) {
  if (cost.expert > 0) return BudgetOf(bytes, cost.expert, cost.nonexpert);
  ExpertBudget budget;
  for (const std::uint32_t n : job.experts()) budget.experts += n;
  budget.nonexpert_bytes = cost.nonexpert;
  if (cost.nonexpert > bytes) budget.stall_bytes = cost.nonexpert - bytes;
  return budget;
}

}  // namespace

double LevelBudget::seconds() const {
  return static_cast<double>(bottleneck_bytes) / static_cast<double>(bandwidth);
}

double LevelBudget::stall_s() const { return std::max(0.0, seconds() - iteration_s); }

Result<LevelBudget> LocalBudget(const Job& job, std::uint64_t bandwidth, double iteration_s) {
  const std::set<std::uint32_t> excluded(job.ranks.excluded.begin(), job.ranks.excluded.end());
  const auto unknown = std::distance(excluded.lower_bound(job.ranks.dp), excluded.end());
  const std::uint64_t ranks = job.ranks.dp - (excluded.size() - static_cast<std::size_t>(unknown));
  SW_TRY_ASSIGN(LevelBudget level, MakeLevel(bandwidth, iteration_s, ranks));
  SW_TRY_ASSIGN(level.budget, BudgetOf(level.bytes, job.model, job.keep));
  return level;
}

Result<RemoteLevel> PlanRemote(const Job& job, RemoteInput input,
                               const std::vector<PlannedCheckpoint>& local, const StopCheck& stop) {
  SW_TRY_ASSIGN(const WorkerGrid grid, StageMajorGrid(job.ranks.dp, 1, job.ranks_per_node));
  RemoteLevel remote;
  remote.copies = input.copies;
  SW_TRY_ASSIGN(remote.level, MakeLevel(input.bandwidth, input.iteration_s, job.ranks.dp));
  SW_TRY_ASSIGN(const CopyCost cost, CostOf(job, grid, input));
  SW_TRY_ASSIGN(remote.level.budget, BudgetOfCopies(remote.level.bytes, cost, job));
  for (std::size_t t = 0; t < local.size(); ++t) {
    SW_TRY(CheckStop(stop));
    if (t > 0 && !input.between.empty()) SW_TRY(CountTokens(&input.state, input.between));
    SW_TRY_ASSIGN(BudgetSelection sent,
                  SelectFrom(local[t].snapshot.selection, input.spread, Unsaved(input.state),
                             input.state.version, remote.level.budget.experts));
    SW_TRY_ASSIGN(const std::uint64_t iteration, CheckedAdd(input.iteration, t + 1));
    SW_TRY(CompleteSave(&input.state, BeginSave(input.state, sent.selected, iteration)));
    remote.sent.push_back(std::move(sent));
  }
  SW_TRY_ASSIGN(const std::vector<std::uint64_t> bytes,
                CopyBytes(grid, job.map, job.model, remote.sent.front().selected, job.keep,
                          input.zero_stage));
  SW_TRY_ASSIGN(remote.level.bottleneck_bytes,
                CheckedMul(*std::max_element(bytes.begin(), bytes.end()), input.copies));
  return remote;
}

}  // namespace shardwright::partial
