// SPDX-License-Identifier: Apache-2.0
#include "partial/select/sharding/bottleneck.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <optional>
#include <span>
#include <utility>

#include "partial/select/selection.h"
#include "support/base/checked.h"

namespace shardwright::partial {
namespace {

Status CheckArguments(const SavedModel& model, std::uint32_t checkpoints,
                      std::uint32_t ranks_per_node) {
  if (checkpoints == 0 || ranks_per_node == 0) {
    return Fail(Errc::kUsage, checkpoints, " checkpoints and ", ranks_per_node,
                " ranks per node, expected at least one of each");
  }
  SW_TRY(ValidateExperts(model.map.experts()));
  return Validate(model.ranks, model.map.ep);
}

std::uint32_t MostExperts(const SavedModel& model) {
  const LayerExperts experts = model.map.experts();
  return *std::max_element(experts.begin(), experts.end());
}

/// Returns the most bytes that consecutive ranks with a common link save together.
Result<std::uint64_t> LargestLink(const std::vector<std::uint64_t>& rank_bytes,
                                  std::uint32_t ranks_per_node) {
  std::uint64_t largest = 0;
  for (std::size_t first = 0; first < rank_bytes.size(); first += ranks_per_node) {
    const std::size_t last = std::min(rank_bytes.size(), first + ranks_per_node);
    std::uint64_t sum = 0;
    for (std::size_t r = first; r < last; ++r) {
      SW_TRY_ASSIGN(sum, CheckedAdd(sum, rank_bytes[r]));
    }
    largest = std::max(largest, sum);
  }
  return largest;
}

/// Returns true if the values within each layer are equal.
template <class Rows, class Equal>
bool AreEven(const Rows& rows, const Equal& equal) {
  return std::all_of(rows.begin(), rows.end(), [&](const auto& row) {
    return std::all_of(row.begin(), row.end(), [&](const auto& one) { return equal(one, row[0]); });
  });
}

/// Returns true if all checkpoints of a K differ only by a permutation of the expert-parallel
/// ranks, so that their largest shares are equal and one of them suffices. This is the case if the
/// experts of a layer have equal bytes and are assigned to the ranks in turn: each checkpoint
/// then shifts every layer by K ranks.
bool OnlyRanksChange(const SavedModel& model) {
  const ExpertMap& map = model.map;
  for (std::size_t m = 0; m < map.ring.size(); ++m) {
    const std::vector<std::uint32_t>& ring = map.ring[m];
    if (ring.size() % map.ep != 0) return false;
    for (std::size_t i = 0; i < ring.size(); ++i) {
      if (map.rank[m][ring[i]] != i % map.ep) return false;
    }
  }
  const auto same_bytes = [](const ExpertBytes& a, const ExpertBytes& b) {
    return a.cut == b.cut && a.split == b.split;
  };
  const SaveOptions& options = model.options;
  return AreEven(model.expert_bytes, same_bytes) && AreEven(model.kept_bytes, std::equal_to<>()) &&
         model.ranks.excluded.empty() && options.adaptive && options.start.empty() &&
         options.nonexpert_split % model.ranks.dp == 0;
}

/// Returns true if no sum of bytes in a plan of the model exceeds 64 bits.
bool SumsFit(const SavedModel& model) {
  std::uint64_t sum = model.options.nonexpert_split;
  const auto add = [&sum](std::uint64_t more) { return !__builtin_add_overflow(sum, more, &sum); };
  const auto add_expert = [&](const ExpertBytes& bytes) {
    return add(bytes.cut) && add(bytes.split);
  };
  return std::all_of(model.nonexpert_bytes.begin(), model.nonexpert_bytes.end(), add) &&
         std::all_of(
             model.expert_bytes.begin(), model.expert_bytes.end(),
             [&](const auto& row) { return std::all_of(row.begin(), row.end(), add_expert); }) &&
         std::all_of(model.kept_bytes.begin(), model.kept_bytes.end(),
                     [&](const auto& row) { return std::all_of(row.begin(), row.end(), add); });
}

/// A layer with experts of equal bytes.
struct EvenLayer {
  std::uint32_t experts = 0;
  ExpertBytes bytes;
};

/// The numbers that determine the largest share if OnlyRanksChange holds.
struct EvenModel {
  std::uint32_t ep = 1;
  std::uint32_t groups = 1;
  std::vector<EvenLayer> layers;
  std::vector<std::size_t> by_remainder;  ///< layers by split bytes modulo groups
  std::vector<std::uint64_t> fixed;       ///< [group]: bytes that a rank saves for every selection
  std::vector<std::uint64_t> pieces;      ///< of non-expert modules, largest first
};

/// Returns nullopt if a plan of every checkpoint is needed, or if making it fails.
std::optional<EvenModel> EvenModelOf(const SavedModel& model) {
  const LayerExperts experts = model.map.experts();
  if (ShapeOf(model.expert_bytes) != experts) return std::nullopt;
  if (!model.kept_bytes.empty() && ShapeOf(model.kept_bytes) != experts) return std::nullopt;
  if (!OnlyRanksChange(model) || !SumsFit(model)) return std::nullopt;

  EvenModel even;
  even.ep = model.map.ep;
  even.groups = model.ranks.groups(even.ep);
  even.fixed.assign(even.groups, model.options.nonexpert_split / model.ranks.dp);
  for (std::size_t m = 0; m < experts.size(); ++m) {
    even.layers.push_back({experts[m], model.expert_bytes[m][0]});
    even.by_remainder.push_back(m);
    if (model.kept_bytes.empty()) continue;
    const std::uint64_t kept = model.kept_bytes[m][0];
    for (std::uint32_t g = 0; g < even.groups; ++g) {
      const std::uint64_t part = kept / even.groups + (g < kept % even.groups ? 1 : 0);
      even.fixed[g] += experts[m] / even.ep * part;
    }
  }
  std::sort(even.by_remainder.begin(), even.by_remainder.end(), [&](std::size_t a, std::size_t b) {
    return even.layers[a].bytes.split % even.groups < even.layers[b].bytes.split % even.groups;
  });
  const std::uint64_t no_start[] = {0};
  const auto split = ShardModules(model.nonexpert_bytes, no_start, model.options.split_above, {});
  if (!split) return std::nullopt;
  for (const ShardPiece& piece : split->pieces) even.pieces.push_back(piece.last - piece.first);
  std::sort(even.pieces.begin(), even.pieces.end(), std::greater<>());
  return even;
}

/// Ranks that save equally many bytes.
struct EqualRanks {
  std::uint64_t bytes = 0;
  std::uint64_t ranks = 0;
};

/// Adds the expert bytes of all groups of `width` expert-parallel ranks
/// that each have `selected`[layer] experts to save; as CutExperts.
void AddRanks(const EvenModel& model, std::span<const std::uint64_t> selected, std::uint32_t width,
              std::vector<EqualRanks>* loads) {
  const std::uint64_t total = std::accumulate(selected.begin(), selected.end(), std::uint64_t{0});
  std::uint64_t split = 0;  // of every group; groups below a remainder have one byte more
  for (std::size_t m = 0; m < selected.size(); ++m) {
    split += selected[m] * (model.layers[m].bytes.split / model.groups);
  }
  std::uint64_t one_more = total;  // experts of layers with a remainder above the group
  auto next = model.by_remainder.begin();
  std::size_t layer = 0;
  std::uint64_t left = selected[0];  // experts of the layer that no group has yet
  std::uint64_t taken = 0;           // experts that this group and lower ones have
  for (std::uint32_t g = 0; g < model.groups; ++g) {
    for (; next != model.by_remainder.end(); ++next) {
      if (model.layers[*next].bytes.split % model.groups > g) break;
      one_more -= selected[*next];
    }
    std::uint64_t bytes = model.fixed[g] + split + one_more;
    const std::uint64_t end = CeilDiv((g + std::uint64_t{1}) * total, model.groups);
    while (taken < end) {
      while (left == 0) left = selected[++layer];
      const std::uint64_t count = std::min(left, end - taken);
      bytes += count * model.layers[layer].bytes.cut;
      taken += count;
      left -= count;
    }
    loads->push_back({bytes, width});
  }
}

/// Returns the expert bytes of all ranks in the first checkpoint with K experts per layer. Layer m
/// selects K consecutive positions of its ring from K * m on, so neighboring expert-parallel
/// ranks have equally many experts of each layer unless a selection begins or ends between them.
std::vector<EqualRanks> LoadsOfRanks(const EvenModel& model, std::uint32_t k) {
  const std::uint32_t ep = model.ep;
  std::vector<std::uint32_t> first;         // by layer: first selected rank
  std::vector<std::uint32_t> bounds = {0};  // ranks from which on the numbers may differ
  for (std::size_t m = 0; m < model.layers.size(); ++m) {
    first.push_back(static_cast<std::uint32_t>(std::uint64_t{k} * m % ep));
    const std::uint32_t more = std::min(k, model.layers[m].experts) % ep;
    if (more == 0) continue;
    bounds.push_back(first[m]);
    bounds.push_back((first[m] + more) % ep);
  }
  std::sort(bounds.begin(), bounds.end());
  bounds.erase(std::unique(bounds.begin(), bounds.end()), bounds.end());
  std::vector<EqualRanks> loads;
  std::vector<std::uint64_t> selected(model.layers.size());
  for (std::size_t i = 0; i < bounds.size(); ++i) {
    const std::uint32_t end = i + 1 < bounds.size() ? bounds[i + 1] : ep;
    for (std::size_t m = 0; m < model.layers.size(); ++m) {
      const std::uint32_t count = std::min(k, model.layers[m].experts);
      const std::uint32_t distance = (bounds[i] + ep - first[m]) % ep;
      selected[m] = count / ep + (distance < count % ep ? 1 : 0);
    }
    AddRanks(model, selected, end - bounds[i], &loads);
  }
  return loads;
}

/// Adds each piece to the rank with the least bytes, as ShardModules, and returns the largest sum.
std::uint64_t LargestWithPieces(std::vector<EqualRanks> loads,
                                std::span<const std::uint64_t> pieces) {
  std::uint64_t largest = 0;
  for (const EqualRanks& load : loads) largest = std::max(largest, load.bytes);
  const auto more = [](const EqualRanks& a, const EqualRanks& b) { return a.bytes > b.bytes; };
  std::make_heap(loads.begin(), loads.end(), more);
  for (const std::uint64_t piece : pieces) {
    const std::uint64_t sum = loads.front().bytes + piece;
    largest = std::max(largest, sum);
    if (--loads.front().ranks == 0) {
      std::pop_heap(loads.begin(), loads.end(), more);
      loads.pop_back();
    }
    loads.push_back({sum, 1});
    std::push_heap(loads.begin(), loads.end(), more);
  }
  return largest;
}

}  // namespace

Result<BottleneckTable> BottleneckByK(const SavedModel& model, std::uint32_t checkpoints,
                                      std::uint32_t ranks_per_node, const StopCheck& stop) {
  SW_TRY(CheckArguments(model, checkpoints, ranks_per_node));
  const std::optional<EvenModel> even =
      ranks_per_node == 1 ? EvenModelOf(model) : std::optional<EvenModel>();
  if (!even) return PlannedBottleneckByK(model, checkpoints, ranks_per_node, stop);
  const std::uint32_t most = MostExperts(model);
  BottleneckTable table;
  for (std::uint32_t k = 1; k <= most; ++k) {
    SW_TRY(CheckStop(stop));
    table.bytes.push_back(LargestWithPieces(LoadsOfRanks(*even, k), even->pieces));
  }
  return table;
}

Result<BottleneckTable> PlannedBottleneckByK(const SavedModel& model, std::uint32_t checkpoints,
                                             std::uint32_t ranks_per_node, const StopCheck& stop) {
  SW_TRY(CheckArguments(model, checkpoints, ranks_per_node));
  const std::uint32_t most = MostExperts(model);
  BottleneckTable table;
  for (std::uint32_t k = 1; k <= most; ++k) {
    LevelState state = MakeLevelState(model.map.experts(), k);
    std::uint64_t largest = 0;
    for (std::uint32_t t = 0; t < checkpoints; ++t) {
      SW_TRY(CheckStop(stop));
      const Selection selection = SelectSequential(model.map, state, k);
      SW_TRY_ASSIGN(const SavePlan plan, PlanSave(model, selection));
      SW_TRY_ASSIGN(const std::uint64_t bytes, LargestLink(plan.rank_bytes, ranks_per_node));
      largest = std::max(largest, bytes);
      SW_TRY(CompleteSave(&state, BeginSave(state, selection, t)));
    }
    table.bytes.push_back(largest);
  }
  return table;
}

}  // namespace shardwright::partial
