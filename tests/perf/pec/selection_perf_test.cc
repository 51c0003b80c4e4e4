#include <algorithm>
#include <chrono>
#include <cstdio>
#include <random>
#include <string>

#include <gtest/gtest.h>

#include "pec/selection.h"
#include "pec/sharding.h"

namespace shardwright::pec {
namespace {

constexpr double kLimitMs = 5;

template <class Work>
double BestMs(Work work) {
  double best_ms = 1e9;
  for (int run = 0; run < 20; ++run) {
    const auto start = std::chrono::steady_clock::now();
    work();
    const std::chrono::duration<double, std::milli> taken =
        std::chrono::steady_clock::now() - start;
    best_ms = std::min(best_ms, taken.count());
  }
  return best_ms;
}

// 60 layers x 256 experts, 256 expert-parallel ranks of 1024: what every rank does at a checkpoint.
TEST(SelectionPerf, SixtyLayersOn1024Ranks) {
#ifndef NDEBUG
  GTEST_SKIP() << "speed is that of a build with optimisation";
#endif
  const LayerExperts experts(60, 256);
  const ExpertMap map = *EvenExpertMap(experts, 256);
  const SaveRanks ranks{1024, {}};
  LevelState memory = MakeLevelState(experts, 1);
  LevelState storage = memory;
  std::mt19937_64 random(1);
  Counts tokens = MakeCounts(experts);
  for (auto& layer : tokens) {
    for (auto& count : layer) count = random() % 100'000;
  }
  ASSERT_TRUE(CountTokens(&memory, tokens));
  ASSERT_TRUE(CountTokens(&storage, tokens));
  for (std::uint32_t k : {1U, 16U, 128U}) {
    for (Policy policy : {Policy::kSequential, Policy::kLoadAware, Policy::kBudget,
                          Policy::kBudgetGlobal, Policy::kFull}) {
      SelectionOptions options{policy, 2 * k, k, std::nullopt, std::uint64_t{60} * k};
      const double ms = BestMs([&] {
        const auto chosen = SelectTwoLevels(map, memory, storage, options);
        ASSERT_TRUE(chosen);
        ASSERT_TRUE(CutExperts(map, chosen->persist, ranks));
      });
      std::printf("%-14s K = %3u: %.3f ms\n", std::string(Name(policy)).c_str(), k, ms);
      EXPECT_LE(ms, kLimitMs) << Name(policy) << ", K = " << k;
    }
  }
}

}  // namespace
}  // namespace shardwright::pec
