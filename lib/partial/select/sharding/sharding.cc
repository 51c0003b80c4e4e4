// SPDX-License-Identifier: Apache-2.0
#include "partial/select/sharding/sharding.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <queue>
#include <string>
#include <tuple>
#include <utility>

#include "support/base/checked.h"
#include "support/base/limits.h"

namespace shardwright::partial {
namespace {

/// Returns the active ranks. \error kUsage, kLimit
Result<std::vector<bool>> LiveRanks(std::uint64_t ranks, std::span<const std::uint32_t> excluded) {
  if (ranks == 0)
    return Fail(Errc::kUsage, "expected at least one rank that saves a checkpoint, found none");
  if (ranks > limits::kRanks) {
    return Fail(Errc::kLimit, "expected at most ", limits::kRanks, " ranks, found ", ranks);
  }
  std::vector<bool> live(ranks, true);
  for (std::uint32_t rank : excluded) {
    if (rank >= ranks) {
      return Fail(Errc::kUsage, "excluded rank ", rank, " does not exist, there are ", ranks);
    }
    live[rank] = false;
  }
  if (std::find(live.begin(), live.end(), true) == live.end()) {
    return Fail(Errc::kUsage, "all ", ranks, " ranks are excluded");
  }
  return live;
}

Result<std::uint64_t> SumOf(std::span<const std::uint64_t> values) {
  std::uint64_t sum = 0;
  for (std::uint64_t value : values) {
    SW_TRY_ASSIGN(sum, CheckedAdd(sum, value));
  }
  return sum;
}

/// Returns the active data-parallel ranks of each expert-parallel rank, ascending.
/// \pre the ranks were validated
std::vector<std::vector<std::uint32_t>> HoldersOf(const SaveRanks& ranks, std::uint32_t ep) {
  std::vector<bool> live(ranks.dp, true);
  for (std::uint32_t rank : ranks.excluded) live[rank] = false;
  std::vector<std::vector<std::uint32_t>> holders(ep);
  for (std::uint32_t d = 0; d < ranks.dp; ++d) {
    if (live[d]) holders[d % ep].push_back(d);
  }
  return holders;
}

/// Splits modules into pieces, by module and first byte. Does not set their ranks.
Result<std::vector<ShardPiece>> Split(std::span<const std::uint64_t> module_bytes,
                                      std::uint64_t split_above) {
  std::vector<ShardPiece> pieces;
  for (std::size_t i = 0; i < module_bytes.size(); ++i) {
    const std::uint64_t bytes = module_bytes[i];
    const bool whole = split_above == 0 || bytes <= split_above;
    const std::uint64_t count = whole ? 1 : CeilDiv(bytes, split_above);
    if (count > limits::kRanks * 16 - pieces.size()) {
      return Fail(Errc::kLimit, "non-expert module ", i, ": ", bytes,
                  " bytes need too many pieces of at most ", split_above, " bytes");
    }
    std::uint64_t first = 0;
    for (std::uint64_t j = 0; j < count; ++j) {
      const std::uint64_t last = first + bytes / count + (j < bytes % count ? 1 : 0);
      pieces.push_back({static_cast<std::uint32_t>(i), first, last, 0});
      first = last;
    }
  }
  return pieces;
}

/// Returns a lower bound for the bottleneck of any plan. \pre start of inactive ranks is 0
std::uint64_t BoundOf(std::span<const ShardPiece> pieces, std::span<const std::uint64_t> start,
                      const std::vector<bool>& live, std::uint64_t total) {
  std::uint64_t largest = 0;
  for (const ShardPiece& piece : pieces) largest = std::max(largest, piece.last - piece.first);
  std::uint64_t least = total;
  std::uint64_t most = 0;
  std::uint64_t ranks = 0;
  for (std::size_t r = 0; r < start.size(); ++r) {
    if (!live[r]) continue;
    ++ranks;
    least = std::min(least, start[r]);
    most = std::max(most, start[r]);
  }
  return std::max({CeilDiv(total, ranks), most, least + largest});
}

/// Bytes of every rank for the experts of a checkpoint.
struct ExpertLoads {
  const ExpertMap& map;
  std::vector<std::vector<std::uint32_t>> holders;  // by expert-parallel rank
  std::vector<std::uint64_t> bytes;                 // by rank

  Status Add(std::uint32_t rank, std::uint64_t more) {
    SW_TRY_ASSIGN(bytes[rank], CheckedAdd(bytes[rank], more));
    return {};
  }

  /// Divides bytes among the ranks with a copy of an expert; lower ranks get the larger parts.
  Status AddShared(std::size_t layer, std::size_t expert, std::uint64_t shared) {
    const std::vector<std::uint32_t>& ranks = holders[map.rank[layer][expert]];
    if (shared > 0 && ranks.empty()) {
      return Fail(Errc::kInfeasible, ExpertName(layer, expert),
                  ": all ranks that hold a copy are excluded");
    }
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      SW_TRY(Add(ranks[i], shared / ranks.size() + (i < shared % ranks.size() ? 1 : 0)));
    }
    return {};
  }
};

/// Adds equal parts of `bytes` to the active ranks; lower ranks get the larger parts.
Status AddEvenly(std::uint64_t bytes, const std::vector<bool>& live,
                 std::vector<std::uint64_t>* loads) {
  const auto ranks = static_cast<std::uint64_t>(std::count(live.begin(), live.end(), true));
  std::uint64_t seen = 0;
  for (std::size_t r = 0; r < live.size(); ++r) {
    if (!live[r]) continue;
    const std::uint64_t part = bytes / ranks + (seen++ < bytes % ranks ? 1 : 0);
    SW_TRY_ASSIGN((*loads)[r], CheckedAdd((*loads)[r], part));
  }
  return {};
}

Status ValidateBytes(const ExpertMap& map, const PerExpert<ExpertBytes>& expert_bytes,
                     const Counts& kept_bytes) {
  if (ShapeOf(expert_bytes) != map.experts()) {
    return Fail(Errc::kMismatch,
                "the expert sizes and the expert map have different MoE layers or experts");
  }
  if (kept_bytes.empty()) return {};
  return ValidateShape(kept_bytes, map.experts(), "kept bytes");
}

/// \pre the owners belong to a selection that fits the map
Result<std::vector<std::uint64_t>> ExpertLoad(const ExpertMap& map,
                                              const std::vector<ExpertOwner>& owners,
                                              const PerExpert<ExpertBytes>& expert_bytes,
                                              const Counts& kept_bytes, const SaveRanks& ranks) {
  ExpertLoads loads{map, HoldersOf(ranks, map.ep), std::vector<std::uint64_t>(ranks.dp, 0)};
  for (const ExpertOwner& owner : owners) {
    const auto m = static_cast<std::size_t>(owner.module.layer);
    const auto e = static_cast<std::size_t>(owner.module.expert);
    SW_TRY(loads.Add(owner.rank, expert_bytes[m][e].cut));
    SW_TRY(loads.AddShared(m, e, expert_bytes[m][e].split));
  }
  for (std::size_t m = 0; m < kept_bytes.size(); ++m) {
    for (std::size_t e = 0; e < kept_bytes[m].size(); ++e) {
      SW_TRY(loads.AddShared(m, e, kept_bytes[m][e]));
    }
  }
  return std::move(loads.bytes);
}

}  // namespace

Status Validate(const SaveRanks& ranks, std::uint32_t ep) {
  if (ep == 0 || ranks.dp % ep != 0) {
    return Fail(Errc::kUsage, ranks.dp, " data-parallel ranks: expected a multiple of ", ep,
                " expert-parallel ranks");
  }
  SW_TRY(LiveRanks(ranks.dp, ranks.excluded));
  return {};
}

Result<std::vector<ExpertOwner>> CutExperts(const ExpertMap& map, const Selection& selection,
                                            const SaveRanks& ranks) {
  SW_TRY(Validate(ranks, map.ep));
  SW_TRY(Validate(selection, map.experts()));
  std::vector<ModuleId> modules;
  std::vector<std::uint64_t> count(map.ep, 0);  // M_r
  for (std::size_t m = 0; m < selection.size(); ++m) {
    for (std::uint32_t e : selection[m]) {
      modules.push_back({static_cast<std::int32_t>(m), static_cast<std::int32_t>(e)});
      ++count[map.rank[m][e]];
    }
  }
  std::sort(modules.begin(), modules.end());
  const std::vector<std::vector<std::uint32_t>> holders = HoldersOf(ranks, map.ep);
  std::vector<std::uint64_t> seen(map.ep, 0);  // j
  std::vector<ExpertOwner> owners;
  owners.reserve(modules.size());
  for (const ModuleId& module : modules) {
    const auto m = static_cast<std::size_t>(module.layer);
    const auto e = static_cast<std::size_t>(module.expert);
    const std::uint32_t r = map.rank[m][e];
    if (holders[r].empty()) {
      return Fail(Errc::kInfeasible, ExpertName(m, e), ": all ranks that hold a copy are excluded");
    }
    owners.push_back({module, holders[r][seen[r]++ * holders[r].size() / count[r]]});
  }
  return owners;
}

Result<ShardPlan> ShardModules(std::span<const std::uint64_t> module_bytes,
                               std::span<const std::uint64_t> start, std::uint64_t split_above,
                               std::span<const std::uint32_t> excluded) {
  SW_TRY_ASSIGN(const std::vector<bool> live, LiveRanks(start.size(), excluded));
  SW_TRY_ASSIGN(const std::uint64_t begun, SumOf(start));
  SW_TRY_ASSIGN(const std::uint64_t modules, SumOf(module_bytes));
  SW_TRY_ASSIGN(const std::uint64_t total, CheckedAdd(begun, modules));
  ShardPlan plan;
  SW_TRY_ASSIGN(plan.pieces, Split(module_bytes, split_above));
  plan.rank_bytes.assign(start.begin(), start.end());
  plan.bound = BoundOf(plan.pieces, start, live, total);

  using Load = std::pair<std::uint64_t, std::uint32_t>;  // bytes, rank
  std::priority_queue<Load, std::vector<Load>, std::greater<>> least;
  for (std::uint32_t r = 0; r < start.size(); ++r) {
    if (live[r]) {
      least.emplace(start[r], r);
    } else if (start[r] > 0) {
      return Fail(Errc::kUsage, "excluded rank ", r, " has ", start[r], " bytes to save");
    }
  }
  std::vector<std::size_t> order(plan.pieces.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return plan.pieces[a].last - plan.pieces[a].first > plan.pieces[b].last - plan.pieces[b].first;
  });
  for (std::size_t i : order) {
    const auto [bytes, rank] = least.top();
    least.pop();
    ShardPiece& piece = plan.pieces[i];
    piece.rank = rank;
    plan.rank_bytes[rank] = bytes + (piece.last - piece.first);
    least.emplace(plan.rank_bytes[rank], rank);
  }
  plan.bottleneck = *std::max_element(plan.rank_bytes.begin(), plan.rank_bytes.end());
  return plan;
}

Result<SavePlan> PlanSave(const ExpertMap& map, const Selection& selection,
                          const PerExpert<ExpertBytes>& expert_bytes, const Counts& kept_bytes,
                          std::span<const std::uint64_t> nonexpert_bytes, const SaveRanks& ranks,
                          const SaveOptions& options) {
  SW_TRY(ValidateBytes(map, expert_bytes, kept_bytes));
  SavePlan plan;
  SW_TRY_ASSIGN(plan.experts, CutExperts(map, selection, ranks));
  SW_TRY_ASSIGN(plan.expert_bytes, ExpertLoad(map, plan.experts, expert_bytes, kept_bytes, ranks));

  SW_TRY_ASSIGN(const std::vector<bool> live, LiveRanks(ranks.dp, ranks.excluded));
  plan.rank_bytes = plan.expert_bytes;
  SW_TRY(AddEvenly(options.nonexpert_split, live, &plan.rank_bytes));

  plan.start = options.start;
  if (!options.adaptive) {
    plan.start.assign(ranks.dp, 0);
  } else if (plan.start.empty()) {
    plan.start = plan.rank_bytes;
  }
  if (plan.start.size() != ranks.dp) {
    return Fail(Errc::kMismatch, "initial loads of ", plan.start.size(), " ranks, expected ",
                ranks.dp);
  }
  SW_TRY_ASSIGN(plan.nonexpert,
                ShardModules(nonexpert_bytes, plan.start, options.split_above, ranks.excluded));
  const std::vector<std::uint64_t> fixed = plan.rank_bytes;
  for (const ShardPiece& piece : plan.nonexpert.pieces) {
    SW_TRY_ASSIGN(plan.rank_bytes[piece.rank],
                  CheckedAdd(plan.rank_bytes[piece.rank], piece.last - piece.first));
  }
  plan.bottleneck = *std::max_element(plan.rank_bytes.begin(), plan.rank_bytes.end());
  SW_TRY_ASSIGN(const std::uint64_t total, SumOf(plan.rank_bytes));
  plan.bound = BoundOf(plan.nonexpert.pieces, fixed, live, total);
  plan.ideal =
      CeilDiv(total, static_cast<std::uint64_t>(std::count(live.begin(), live.end(), true)));
  return plan;
}

Result<SavePlan> PlanSave(const SavedModel& model, const Selection& selection) {
  return PlanSave(model.map, selection, model.expert_bytes, model.kept_bytes, model.nonexpert_bytes,
                  model.ranks, model.options);
}

Result<std::vector<std::uint64_t>> UnsharedBytes(const SavedModel& model,
                                                 const Selection& selection) {
  SW_TRY(ValidateBytes(model.map, model.expert_bytes, model.kept_bytes));
  SW_TRY_ASSIGN(std::vector<ExpertOwner> owners, CutExperts(model.map, selection, model.ranks));
  const std::vector<std::vector<std::uint32_t>> holders = HoldersOf(model.ranks, model.map.ep);
  for (ExpertOwner& owner : owners) owner.rank = holders[owner.rank % model.map.ep].front();
  SW_TRY_ASSIGN(std::vector<std::uint64_t> bytes,
                ExpertLoad(model.map, owners, model.expert_bytes, model.kept_bytes, model.ranks));
  SW_TRY_ASSIGN(const std::vector<bool> live, LiveRanks(model.ranks.dp, model.ranks.excluded));
  SW_TRY(AddEvenly(model.options.nonexpert_split, live, &bytes));
  const auto first = std::find(live.begin(), live.end(), true) - live.begin();
  std::uint64_t& of_first = bytes[static_cast<std::size_t>(first)];
  SW_TRY_ASSIGN(const std::uint64_t rest, SumOf(model.nonexpert_bytes));
  SW_TRY_ASSIGN(of_first, CheckedAdd(of_first, rest));
  return bytes;
}

bool IsUneven(std::uint64_t k, std::uint64_t moe_layers, std::uint64_t dp) {
  return (k % dp) * (moe_layers % dp) % dp != 0;
}

std::uint32_t PhaseCount(std::uint32_t k, std::uint32_t ep) { return ep / std::gcd(k, ep); }

}  // namespace shardwright::partial
