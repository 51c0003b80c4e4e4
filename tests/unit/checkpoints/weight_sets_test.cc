// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/pickled/weight_sets.h"

#include <gtest/gtest.h>

#include <initializer_list>
#include <string>
#include <vector>

namespace shardwright::checkpoints {
namespace {

struct Named {
  const char* name;
  std::uint64_t matches;
};

std::vector<WeightCandidate> Of(std::initializer_list<Named> all) {
  std::vector<WeightCandidate> candidates;
  for (const Named& one : all) {
    candidates.push_back({.name = one.name, .tensors = 10, .matches = one.matches});
  }
  return candidates;
}

/// Returns the chosen name, or the error message.
std::string Chosen(std::initializer_list<Named> all, bool by_optimizer = true) {
  const std::vector<WeightCandidate> candidates = Of(all);
  const Result<std::size_t> chosen = ChooseWeights(candidates, by_optimizer);
  return chosen ? candidates[*chosen].name : chosen.error().message;
}

TEST(WeightSets, AveragesAndCopiesAreKnownByTheirNames) {
  for (const char* name : {"ema", "model_ema", "ema_unet", "ema.model", "state.ema", "target",
                           "target_net", "initial_model", "ref", "ref_policy", "base", "base_model",
                           "teacher", "swa_model", "modelEma", "EMA"}) {
    EXPECT_TRUE(NamesCopy(name)) << name;
  }
  for (const char* name : {"model", "net", "app.model", "schema", "baseline", "refiner", "policy",
                           "student", ".", "", "unet", "thema"}) {
    EXPECT_FALSE(NamesCopy(name)) << name;
  }
}

TEST(WeightSets, TheModelIsTakenAndNeverItsAverage) {
  EXPECT_EQ(Chosen({{"ema", 10}, {"model", 10}}), "model");
  EXPECT_EQ(Chosen({{"ema", 10}, {"net", 10}}, false), "net");
  EXPECT_EQ(Chosen({{"base", 10}, {"policy", 10}}), "policy");
  EXPECT_EQ(Chosen({{"ema_unet", 10}, {"unet", 10}}), "unet");
  EXPECT_EQ(Chosen({{"initial_model", 10}, {"model", 10}}), "model");
  EXPECT_EQ(Chosen({{"app.ema", 10}, {"app.model", 10}}), "app.model");
  EXPECT_EQ(Chosen({{"anything", 10}, {"ema", 10}}), "anything");
  // An average with more of the optimizer's names, such as tied ones, is still an average.
  EXPECT_EQ(Chosen({{"ema", 10}, {"model", 9}}), "model");
}

TEST(WeightSets, TheOnlySetWithTheOptimizersParametersIsTaken) {
  EXPECT_EQ(Chosen({{"critic", 0}, {"ema", 10}}), "ema");
  EXPECT_EQ(Chosen({{"a", 10}, {"b", 6}}), "a");
  EXPECT_EQ(Chosen({{"model", 2}, {"b", 10}}), "b");
}

TEST(WeightSets, WhatNothingTellsApartIsRefused) {
  for (const bool by_optimizer : {true, false}) {
    const std::string message = Chosen({{"a", 10}, {"b", 10}}, by_optimizer);
    EXPECT_NE(message.find("\"a\", \"b\""), std::string::npos) << message;
    EXPECT_NE(message.find("--weights-of"), std::string::npos) << message;
  }
  EXPECT_NE(Chosen({{"model", 10}, {"policy", 10}}).find("several sets"), std::string::npos);
  EXPECT_NE(Chosen({{"ema", 10}, {"ema_slow", 10}}).find("several sets"), std::string::npos);
}

TEST(WeightSets, AreFoundByNameOrByPartsOfIt) {
  const std::vector<WeightCandidate> candidates =
      Of({{"model", 1}, {"ema.fast", 1}, {"ema.slow", 1}, {"old.net", 1}});
  EXPECT_EQ(*FindWeights(candidates, "model"), 0U);
  EXPECT_EQ(*FindWeights(candidates, "ema.slow"), 2U);
  EXPECT_EQ(*FindWeights(candidates, "old"), 3U);
  EXPECT_EQ(*FindWeights(candidates, "slow"), 2U);
  EXPECT_EQ(*FindWeights(candidates, "net"), 3U);
  for (const char* name : {"ema", "mod", "", "other"}) {
    const auto found = FindWeights(candidates, name);
    ASSERT_FALSE(found) << name;
    EXPECT_EQ(found.error().code, Errc::kUsage);
    EXPECT_NE(found.error().message.find("\"old.net\""), std::string::npos);
  }
}

TEST(WeightSets, AMessageNamesWhatIsTakenAndWhatIsNot) {
  const std::vector<WeightCandidate> candidates = Of({{"ema", 10}, {"model", 10}});
  const std::vector<WeightSet> sets = WeightSetsOf(candidates, 1);
  EXPECT_EQ(sets.front().name, "model");
  EXPECT_TRUE(sets.front().taken);
  const std::string message = WeightSetsMessage(sets);
  EXPECT_NE(message.find("\"model\" (10 tensors) is taken"), std::string::npos) << message;
  EXPECT_NE(message.find("not \"ema\""), std::string::npos) << message;
  EXPECT_EQ(WeightSetsMessage(std::vector<WeightSet>(sets.begin(), sets.begin() + 1)), "");
}

}  // namespace
}  // namespace shardwright::checkpoints
