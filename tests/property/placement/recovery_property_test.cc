// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "placement/recovery/recovery.h"
#include "placement/strategy/lazarus.h"
#include "property/cases.h"
#include "random_moe.h"

namespace shardwright::placement {
namespace {

using Counts = std::vector<std::uint32_t>;

std::vector<UnitSet> SetsOf(const UnitPlan& plan, std::size_t experts) {
  const auto units = static_cast<std::uint32_t>(plan.experts.size());
  std::vector<UnitSet> sets(experts, UnitSet(units));
  for (std::uint32_t u = 0; u < units; ++u) {
    for (const std::uint32_t e : plan.experts[u]) sets[e].Add(u);
  }
  return sets;
}

// Counts survived failure sets by size, by enumerating all of them.
std::vector<std::uint64_t> Survived(const std::vector<UnitSet>& sets, std::uint32_t units) {
  std::vector<std::uint32_t> masks;
  for (const UnitSet& set : sets) {
    std::uint32_t mask = 0;
    for (std::uint32_t u = 0; u < units; ++u) mask |= set.Has(u) ? 1U << u : 0;
    masks.push_back(mask);
  }
  std::vector<std::uint64_t> survived(units + std::size_t{1}, 0);
  for (std::uint32_t failed = 0; failed < (1U << units); ++failed) {
    const bool lives =
        std::all_of(masks.begin(), masks.end(), [&](auto m) { return (m & ~failed) != 0; });
    survived[static_cast<std::size_t>(__builtin_popcount(failed))] += lives ? 1 : 0;
  }
  return survived;
}

TEST(ReplicaCountsProperty, FillTheSlotsAndFollowTheLoad) {
  Random random(301);
  for (int i = 0; i < kCases; ++i) {
    const auto tokens = RandomTokens(&random, Between(&random, 1, 12));
    const auto experts = static_cast<std::uint32_t>(tokens.size());
    const std::uint32_t copies = Between(&random, 1, 4);
    const std::uint64_t slots = std::uint64_t{experts} * copies + random.Below(60);
    Counts counts = ReplicaCounts(tokens, slots, copies);
    Counts order(experts);
    std::iota(order.begin(), order.end(), 0U);
    std::stable_sort(order.begin(), order.end(),
                     [&](std::uint32_t a, std::uint32_t b) { return tokens[a] < tokens[b]; });
    ASSERT_EQ(std::accumulate(counts.begin(), counts.end(), std::uint64_t{0}), slots);
    for (std::uint32_t e = 0; e < experts; ++e) {
      ASSERT_GE(counts[e], copies);
      if (e > 0) {
        ASSERT_GE(counts[order[e]], counts[order[e - 1]]);
      }
    }
    const std::uint32_t most = copies + Between(&random, 0, 6);
    CapCounts(tokens, most, &counts);
    const auto kept = std::accumulate(counts.begin(), counts.end(), std::uint64_t{0});
    ASSERT_EQ(kept, std::min<std::uint64_t>(slots, std::uint64_t{most} * experts));
    ASSERT_LE(*std::max_element(counts.begin(), counts.end()), most);
  }
}

struct Instance {
  std::uint32_t units = 0, slots = 0, experts = 0, copies = 1;
  std::vector<std::uint64_t> tokens;
  Counts counts;
  std::vector<std::uint64_t> all_slots;
};

Instance RandomInstance(Random* random) {
  Instance in;
  in.units = Between(random, 1, 6);
  in.slots = Between(random, 1, 4);
  in.experts = Between(random, 1, in.units * in.slots);
  in.tokens = RandomTokens(random, in.experts);
  in.copies = Between(random, 1, std::min(in.units, in.units * in.slots / in.experts));
  in.counts = ReplicaCounts(in.tokens, std::uint64_t{in.units} * in.slots, in.copies);
  in.all_slots.assign(in.units, in.slots);
  return in;
}

// The same, sometimes with nodes of unequal slots: any threshold that some plan can keep.
Instance RandomUneven(Random* random) {
  Instance in = RandomInstance(random);
  if (random->Below(2) == 0) return in;
  std::uint64_t total = 0;
  for (auto& slots : in.all_slots) total += slots = Between(random, 1, 6);
  in.experts = Between(random, 1, static_cast<std::uint32_t>(std::min<std::uint64_t>(total, 10)));
  in.tokens = RandomTokens(random, in.experts);
  std::uint64_t distinct = 0;
  for (const std::uint64_t slots : in.all_slots) {
    distinct += std::min<std::uint64_t>(slots, in.experts);
  }
  in.copies = Between(random, 1, static_cast<std::uint32_t>(distinct / in.experts));
  in.counts = ReplicaCounts(in.tokens, total, in.copies);
  return in;
}

// Every replica is placed once, and no node holds more than it can.
void ExpectAllPlaced(const UnitPlan& plan, const Instance& in) {
  Counts placed(in.experts, 0);
  for (std::uint32_t u = 0; u < in.units; ++u) {
    ASSERT_LE(plan.experts[u].size(), in.all_slots[u]);
    for (const std::uint32_t e : plan.experts[u]) ++placed[e];
  }
  ASSERT_EQ(placed, in.counts);
}

// Segments of whole groups fit, the product over them is the recovery, and filling loses nothing.
TEST(OverlapPlanProperty, SegmentsFitAndFillingLosesNothing) {
  Random random(302);
  int cut = 0;
  for (int i = 0; i < kCases; ++i) {
    const Instance in = RandomInstance(&random);
    const UnitPlan plan = OverlapPlan(in.tokens, in.counts, in.all_slots);
    ASSERT_NO_FATAL_FAILURE(ExpectAllPlaced(plan, in));
    Counts sorted = in.counts;
    std::sort(sorted.begin(), sorted.end());
    std::vector<UnitSet> segments;
    std::uint32_t used = 0;
    bool fits = true;
    for (std::uint32_t first = 0; first < in.experts; first += in.slots) {
      const bool last = first + in.slots >= in.experts;
      const std::uint32_t length =
          in.experts <= in.slots ? std::min(sorted[0], in.units) : sorted[first];
      if (!last) {
        ASSERT_LT(used + length, in.units) << "only the last segment may be cut";
      }
      fits = used + length <= in.units;
      UnitSet segment(in.units);
      for (std::uint32_t u = used; u < std::min(used + length, in.units); ++u) segment.Add(u);
      segments.push_back(segment);
      used += length;
    }
    ASSERT_EQ(plan.cut, !fits);
    cut += plan.cut ? 1 : 0;
    if (in.experts % in.slots == 0) {
      ASSERT_FALSE(plan.cut);
    }
    const auto found = Survived(SetsOf(plan, in.experts), in.units);
    if (!plan.cut) {
      ASSERT_EQ(found, Survived(segments, in.units)) << i;
    }
  }
  EXPECT_GT(cut, kCases / 100);
}

// The ring keeps every expert on as many nodes as it has replicas, so that the threshold holds.
TEST(RingPlanProperty, ExpertsAreOnDistinctNodes) {
  Random random(303);
  for (int i = 0; i < kCases; ++i) {
    const Instance in = RandomUneven(&random);
    const UnitPlan plan = RingPlan(in.counts, in.all_slots, in.copies);
    ASSERT_NO_FATAL_FAILURE(ExpectAllPlaced(plan, in));
    const auto sets = SetsOf(plan, in.experts);
    const bool even = std::all_of(in.all_slots.begin(), in.all_slots.end(),
                                  [&](std::uint64_t s) { return s == in.slots; });
    const bool sane = even && std::all_of(in.counts.begin(), in.counts.end(),
                                          [&](std::uint32_t c) { return c <= in.units; });
    for (std::uint32_t e = 0; e < in.experts; ++e) {
      ASSERT_GE(sets[e].size(), in.copies) << i;
      if (sane) {
        ASSERT_EQ(sets[e].size(), in.counts[e]) << i;
      }
    }
  }
}

TEST(RecoveryPlanProperty, KeepsTheThresholdAndIsNoWorseThanPublished) {
  Random random(304);
  for (int i = 0; i < kCases; ++i) {
    const Instance in = RandomUneven(&random);
    const UnitPlan plan = RecoveryPlan(in.tokens, in.counts, in.all_slots, in.copies);
    ASSERT_NO_FATAL_FAILURE(ExpectAllPlaced(plan, in));
    const auto sets = SetsOf(plan, in.experts);
    for (const UnitSet& set : sets) ASSERT_GE(set.size(), in.copies) << i;
    const UnitPlan published = OverlapPlan(in.tokens, in.counts, in.all_slots);
    const auto theirs_sets = SetsOf(published, in.experts);
    const bool keeps = std::all_of(theirs_sets.begin(), theirs_sets.end(),
                                   [&](const UnitSet& set) { return set.size() >= in.copies; });
    if (keeps) {
      ASSERT_GE(Survived(sets, in.units), Survived(theirs_sets, in.units)) << i;
    }
  }
}

TEST(BalanceUnitsProperty, PeakFallsCopiesStay) {
  Random random(305);
  for (int i = 0; i < kCases; ++i) {
    const Instance in = RandomUneven(&random);
    UnitPlan plan = RecoveryPlan(in.tokens, in.counts, in.all_slots, in.copies);
    const auto peak = [&] {  // tokens per slot of the busiest node
      double most = 0;
      for (const auto& experts : plan.experts) {
        double load = 0;
        for (const std::uint32_t e : experts) {
          load += static_cast<double>(in.tokens[e]) / in.counts[e];
        }
        most = std::max(most, load / static_cast<double>(experts.size()));
      }
      return most;
    };
    const double before = peak();
    BalanceUnits(in.tokens, in.copies, 1, &plan);
    ASSERT_NO_FATAL_FAILURE(ExpectAllPlaced(plan, in));
    ASSERT_LE(peak(), before * (1 + 1e-9)) << i;
    for (const UnitSet& set : SetsOf(plan, in.experts)) ASSERT_GE(set.size(), in.copies) << i;
  }
}

// Exact counts by any suitable method; recovery falls with every further failure, and a model
// survives no more than its layers do.
TEST(RecoveryProperty, CountsAreExactAndModelsNoBetterThanLayers) {
  Random random(306);
  for (int i = 0; i < kCases; ++i) {
    const std::uint32_t units = Between(&random, 1, 8);
    const std::uint32_t layers = Between(&random, 1, 2);
    std::vector<std::vector<UnitSet>> sets(layers);
    std::vector<UnitSet> model;
    for (auto& layer : sets) {
      for (std::uint32_t e = Between(&random, 1, 5); e > 0; --e) {
        UnitSet& set = layer.emplace_back(units);
        const std::uint32_t first = Between(&random, 0, units - 1);
        const bool run = random.Below(2) == 0;
        for (std::uint32_t c = Between(&random, 1, 3); c > 0; --c) {
          set.Add(run ? (first + c) % units : Between(&random, 0, units - 1));
        }
        model.push_back(set);
      }
    }
    const RecoveryProbability whole = SolveRecovery(model, units);
    ASSERT_EQ(whole.survived_sets, Survived(model, units)) << i;
    ASSERT_TRUE(whole.exact());
    for (std::size_t k = 0; k <= units; ++k) {
      ASSERT_NEAR(whole.survived[k] + whole.lost[k], 1, 1e-12);
      if (k > 0) {
        ASSERT_LE(whole.survived[k], whole.survived[k - 1]);
      }
    }
    for (const auto& layer : sets) {
      const RecoveryProbability one = SolveRecovery(layer, units);
      for (std::size_t k = 0; k <= units; ++k) {
        ASSERT_LE(whole.survived_sets[k], one.survived_sets[k]);
      }
    }
  }
}

}  // namespace
}  // namespace shardwright::placement
