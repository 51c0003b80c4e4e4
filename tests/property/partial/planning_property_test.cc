// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <set>

#include <gtest/gtest.h>

#include "partial/agent/buffers.h"
#include "partial/planner/forecast/bubbles.h"
#include "partial/planner/forecast/extra_capacity.h"
#include "partial/select/budget.h"
#include "partial/select/sharding/replica_placement.h"
#include "partial/select/sharding/sharding.h"
#include "property/cases.h"
#include "random_pec.h"

namespace shardwright::partial {
namespace {

using List = std::vector<std::uint64_t>;

TEST(BudgetProperty, SharesAndChoices) {
  Random random(1);
  for (int i = 0; i < kCases; ++i) {
    Counts popularity(random.In(1, 5));
    Counts version;
    std::uint64_t experts = 0;
    for (auto& layer : popularity) {
      layer.resize(random.In(1, 6));
      const std::uint64_t most = random.Chance(30) ? 0 : random.In(1, 40);
      for (auto& tokens : layer) tokens = random.In(0, most);
      version.emplace_back(layer.size());
      for (auto& v : version.back()) v = random.In(0, 2);
      experts += layer.size();
    }
    const std::uint64_t total = random.In(0, experts + 3);
    const auto shares = LayerShares(popularity, total);
    ASSERT_TRUE(shares);
    const auto by_layer = SelectByLayerShares(popularity, version, total);
    const auto global = SelectGlobally(popularity, version, total);
    ASSERT_TRUE(by_layer && global);
    ASSERT_EQ(std::accumulate(shares->begin(), shares->end(), std::uint64_t{0}),
              std::min(total, experts));
    List all;
    bool capped = false;
    std::uint64_t sum = 0;
    for (const auto& layer : popularity) {
      all.insert(all.end(), layer.begin(), layer.end());
      sum += std::accumulate(layer.begin(), layer.end(), std::uint64_t{0});
    }
    for (std::size_t m = 0; m < popularity.size(); ++m) {
      ASSERT_LE((*shares)[m], popularity[m].size());
      ASSERT_EQ(by_layer->selected[m].size(), (*shares)[m]);
      capped |= (*shares)[m] == popularity[m].size();
    }
    // Largest remainders: within one of the exact share where no expert is capped.
    for (std::size_t m = 0; m < popularity.size() && !capped && sum > 0; ++m) {
      const std::uint64_t tokens =
          std::accumulate(popularity[m].begin(), popularity[m].end(), std::uint64_t{0});
      ASSERT_LT(std::max((*shares)[m] * sum, tokens * total) -
                    std::min((*shares)[m] * sum, tokens * total),
                sum);
    }
    // No selection saves more than the largest ones over all layers.
    std::sort(all.rbegin(), all.rend());
    all.resize(std::min(total, experts));
    ASSERT_EQ(global->saved_tokens, std::accumulate(all.begin(), all.end(), std::uint64_t{0}));
    ASSERT_LE(by_layer->saved_tokens, global->saved_tokens);
    ASSERT_EQ(global->saved_tokens + global->at_risk_tokens, sum);
    ASSERT_TRUE(Validate(by_layer->selected, ShapeOf(popularity)));
    ASSERT_TRUE(Validate(global->selected, ShapeOf(popularity)));
  }
}

// Computes the least bottleneck by enumerating all plans.
std::uint64_t Best(const List& modules, std::size_t next, List* load) {
  if (next == modules.size()) return *std::max_element(load->begin(), load->end());
  std::uint64_t best = ~std::uint64_t{0};
  for (std::uint64_t& bytes : *load) {
    bytes += modules[next];
    best = std::min(best, Best(modules, next + 1, load));
    bytes -= modules[next];
  }
  return best;
}

TEST(ShardingProperty, GreedyIsWithinFourThirdsAndTheBoundHolds) {
  Random random(2);
  for (int i = 0; i < kCases; ++i) {
    List modules(random.In(0, 6));
    for (auto& bytes : modules) bytes = random.In(0, 20);
    List start(random.In(1, 3), 0);
    const bool empty = random.Chance(50);
    for (auto& bytes : start) bytes = empty ? 0 : random.In(0, 20);
    const auto plan = ShardModules(modules, start, 0, {});
    ASSERT_TRUE(plan);
    List load = start;
    const std::uint64_t best = Best(modules, 0, &load);
    ASSERT_LE(plan->bound, best);
    ASSERT_GE(plan->bottleneck, best);
    if (empty) {
      ASSERT_LE(3 * plan->bottleneck, 4 * best);
    }
  }
}

TEST(ShardingProperty, PiecesCoverTheModulesAndSpareTheExcluded) {
  Random random(3);
  for (int i = 0; i < kCases; ++i) {
    List modules(random.In(0, 12));
    for (auto& bytes : modules) bytes = random.In(0, 100);
    const std::uint32_t ranks = random.Small(2, 9);
    const std::vector<std::uint32_t> excluded = {random.Small(0, ranks - 1)};
    List start(ranks);
    for (auto& bytes : start) bytes = random.In(0, 60);
    start[excluded[0]] = 0;
    const std::uint64_t split = random.In(0, 30);
    const auto plan = ShardModules(modules, start, split, excluded);
    ASSERT_TRUE(plan);
    List covered(modules.size(), 0);
    List load = start;
    for (const ShardPiece& piece : plan->pieces) {
      ASSERT_EQ(piece.first, covered[piece.module]);  // in order, without gaps
      covered[piece.module] = piece.last;
      load[piece.rank] += piece.last - piece.first;
      ASSERT_NE(piece.rank, excluded[0]);
      if (split > 0) {
        ASSERT_LE(piece.last - piece.first, split);
      }
    }
    ASSERT_EQ(covered, modules);
    ASSERT_EQ(load, plan->rank_bytes);
    ASSERT_GE(plan->bottleneck, plan->bound);
  }
}

TEST(ShardingProperty, ExpertsGoToRanksThatHoldThemEvenly) {
  Random random(4);
  for (int i = 0; i < kCases; ++i) {
    const std::uint32_t ep = random.Small(1, 4);
    const std::uint32_t groups = random.Small(1, 4);
    const LayerExperts experts(random.Small(1, 4), ep * random.Small(1, 3));
    const ExpertMap map = *EvenExpertMap(experts, ep);
    const std::uint32_t k = random.Small(1, experts[0]);
    const Selection selection = SelectSequential(map, MakeLevelState(experts, k), k);
    const std::uint32_t ranks = ep * groups;
    const auto owners = CutExperts(map, selection, {ranks, {}});
    ASSERT_TRUE(owners);
    ASSERT_EQ(owners->size(), SizeOf(selection));
    List count(ranks, 0);
    List of_ep(ep, 0);
    for (const ExpertOwner& owner : *owners) {
      const std::uint32_t r = map.rank[static_cast<std::size_t>(owner.module.layer)]
                                      [static_cast<std::size_t>(owner.module.expert)];
      ASSERT_EQ(owner.rank % ep, r);
      ++count[owner.rank];
      ++of_ep[r];
    }
    for (std::uint32_t d = 0; d < ranks; ++d) {
      ASSERT_LE(count[d], (of_ep[d % ep] + groups - 1) / groups);
      ASSERT_GE(count[d], of_ep[d % ep] / groups);
    }
    const auto [least, most] = std::minmax_element(count.begin(), count.end());
    ASSERT_EQ(*least != *most, IsUneven(k, experts.size(), ranks));
  }
}

// Section 6.2: the invariants, under any order of events.
TEST(BuffersProperty, Invariants) {
  Random random(5);
  const ModuleId rest{0, kNonExpert};
  for (int i = 0; i < kCases; ++i) {
    SnapshotBuffers buffers;
    std::uint64_t iteration = 0;
    std::uint64_t durable = 0;
    std::uint64_t begun = 0;
    std::uint64_t given_up = 0;
    std::map<std::size_t, SnapshotBuffers::Content> frozen;
    for (int step = 0; step < 40; ++step) {
      switch (random.In(0, 6)) {
        case 0:
        case 1:
          if (buffers.Begin(++iteration)) ++begun;
          break;
        case 2:
          (void)buffers.Put(rest, std::make_shared<int>(1));
          (void)buffers.Put({0, static_cast<std::int32_t>(random.In(0, 3))},
                            std::make_shared<int>(2));
          (void)buffers.End();
          break;
        case 3:
          if (const auto buffer = buffers.StartPersist()) {
            ASSERT_GT(buffers.iteration(*buffer), durable);  // storage never goes back
            frozen[*buffer] = buffers.content(*buffer);
          }
          break;
        case 4:
          if (const auto buffer = buffers.Find(BufferState::kPersisting)) {
            ASSERT_TRUE(buffers.EndPersist());
            durable = buffers.iteration(*buffer);
          }
          break;
        case 5:
          (void)buffers.FailPersist();
          break;
        default:
          if (buffers.Find(BufferState::kFilling)) ++given_up;
          buffers.AbandonFilling();
      }
      int filling = 0;
      int persisting = 0;
      int recovery = 0;
      std::uint64_t alive = 0;
      for (std::size_t b = 0; b < SnapshotBuffers::kBuffers; ++b) {
        const BufferState state = buffers.state(b);
        filling += state == BufferState::kFilling ? 1 : 0;
        persisting += state == BufferState::kPersisting ? 1 : 0;
        recovery += state == BufferState::kRecovery ? 1 : 0;
        alive += state == BufferState::kIdle ? 0 : 1;
        ASSERT_EQ(buffers.content(b).empty() && state != BufferState::kFilling,
                  state == BufferState::kIdle);
        if (state == BufferState::kPersisting || state == BufferState::kRecovery) {
          ASSERT_EQ(buffers.content(b).size(), frozen[b].size());
          for (const auto& [module, blob] : buffers.content(b)) {
            ASSERT_EQ(blob.version, frozen[b].at(module).version);
          }
        }
      }
      ASSERT_LE(filling, 1);
      ASSERT_LE(persisting, 1);
      ASSERT_EQ(recovery, durable > 0 ? 1 : 0);
      if (durable > 0) {
        ASSERT_GE(buffers.iteration(*buffers.NewestComplete()), durable);
        ASSERT_EQ(buffers.content(*buffers.NewestComplete()).at(rest).version,
                  buffers.iteration(*buffers.NewestComplete()));
      }
      ASSERT_GE(begun, given_up + buffers.skipped() + alive);  // the rest was replaced as durable
    }
  }
}

TEST(ReplicasProperty, Placement) {
  Random random(6);
  for (int i = 0; i < kCases; ++i) {
    const std::uint32_t dp = random.Small(1, 5);
    const std::uint32_t pp = random.Small(1, 4);
    const std::uint32_t r = random.Small(0, 6);
    const bool apart = random.Chance(40);
    const WorkerGrid grid = *StageMajorGrid(dp, pp, apart ? 1 : random.Small(1, 4));
    const auto plan = PlaceReplicas(grid, r);
    ASSERT_TRUE(plan);
    const std::uint32_t workers = dp * pp;
    std::vector<std::uint32_t> load(workers, 0);
    for (std::uint32_t w = 0; w < workers; ++w) {
      std::uint32_t near = 0;  // candidates of the group, of other groups
      std::uint32_t far = 0;
      for (std::uint32_t o = 0; o < workers; ++o) {
        if (grid.node[o] == grid.node[w]) continue;
        ++(grid.stage[o] == grid.stage[w] ? near : far);
      }
      std::uint32_t cheap = 0;
      for (std::uint32_t holder : plan->holders[w]) {
        ASSERT_NE(grid.node[holder], grid.node[w]);
        cheap += grid.stage[holder] == grid.stage[w] ? 1 : 0;
        ++load[holder];
      }
      const std::set<std::uint32_t> distinct(plan->holders[w].begin(), plan->holders[w].end());
      ASSERT_EQ(distinct.size(), plan->holders[w].size());
      ASSERT_EQ(distinct.size(), std::min(plan->replicas, near + far));
      ASSERT_EQ(cheap, std::min(plan->replicas, near));  // no placement is cheaper
      ASSERT_EQ(std::count(plan->incomplete.begin(), plan->incomplete.end(), w) == 1,
                near + far < plan->replicas);
    }
    ASSERT_EQ(load, plan->load);
    if (apart) {
      ASSERT_EQ(load, std::vector<std::uint32_t>(workers, plan->replicas));
    }
  }
}

TEST(BubblesProperty, EveryElementOnce) {
  Random random(7);
  for (int i = 0; i < kCases; ++i) {
    List modules(random.In(0, 6));
    for (auto& elems : modules) elems = random.In(0, 50);
    const std::uint64_t elems = std::accumulate(modules.begin(), modules.end(), std::uint64_t{0});
    const auto bubble = random.In(0, 200);
    const auto plan = FillBubble(modules, 1, 1, static_cast<double>(bubble));
    ASSERT_TRUE(plan);
    ASSERT_EQ(plan->in_bubble, std::min(elems, bubble));  // one element a second
    std::uint64_t inside = 0;
    int cut = 0;
    for (std::size_t m = 0; m < modules.size(); ++m) {
      ASSERT_EQ(plan->module[m].in_bubble + plan->module[m].outside, modules[m]);
      inside += plan->module[m].in_bubble;
      cut += plan->module[m].in_bubble > 0 && plan->module[m].outside > 0 ? 1 : 0;
    }
    ASSERT_EQ(inside, plan->in_bubble);
    ASSERT_LE(cut, 1);
  }
}

TEST(ExtraCapacityProperty, NoDeviceExceedsItsCapacity) {
  Random random(8);
  for (int i = 0; i < kCases; ++i) {
    std::vector<ExpertCapacity> experts(random.In(1, 6));
    std::uint64_t capacity = 0;
    std::uint64_t used = 0;
    for (ExpertCapacity& expert : experts) {
      expert = {random.In(0, 100), random.In(0, 150), random.Chance(50) ? random.In(0, 30) : 0};
      capacity += expert.capacity;
      used += std::min(expert.capacity, expert.tokens);
    }
    const auto extra = TokensToMakeUp(experts);
    ASSERT_TRUE(extra);
    for (std::size_t e = 0; e < experts.size(); ++e) {
      ASSERT_LE((*extra)[e], std::min(experts[e].debt, experts[e].capacity / 10));
      ASSERT_LE((*extra)[e] + std::min(experts[e].capacity, experts[e].tokens), experts[e].tokens);
      used += (*extra)[e];
    }
    ASSERT_LE(used, capacity);
  }
}

}  // namespace
}  // namespace shardwright::partial
