// SPDX-License-Identifier: Apache-2.0
// Times and memory in the HTML report of plans.

#include "placement/io/report_page.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "placement/core/parallel.h"
#include "support.h"

namespace shardwright::placement {
namespace {

using nlohmann::json;

constexpr std::uint64_t kWeights = 2'000'000;

/// A report of two layers of two experts on two GPUs.
class ReportPageTest : public ::testing::Test {
 protected:
  ReportPageTest() : loads_(LoadsOf(2, {3, 1, 2, 2})), cluster_(UniformCluster(2, 1, 1)) {
    plan_.strategy = "hand";
    plan_.result.placement = EmptyPlacement(loads_, cluster_);
    plan_.result.placement.slot_expert = {0, 1, 1, 0};
    plan_.metrics = Measure(plan_.result.placement, loads_, cluster_);
    page_.loads = &loads_;
    page_.cluster = &cluster_;
    page_.plan = &plan_;
    page_.rows = {{"hand", &plan_, 1, "", &cost_},
                  {"lazarus", nullptr, 0, "too few nodes", &cost_}};
    page_.cost = &cost_;
  }

  /// Returns the data of the page's script.
  json Data() const {
    const std::string text = PageText(page_);
    const std::string before = "id=\"data\">";
    const std::size_t begin = text.find(before) + before.size();
    return json::parse(text.substr(begin, text.find("</script>", begin) - begin));
  }

  static ModelTimes TimesOfLayers(double experts) {
    ModelTimes times;
    times.layers.resize(2);
    for (LayerTimes& layer : times.layers) {
      layer.experts = experts;
      layer.all_to_all = 0.25;
      layer.exposed = 0.5;
      layer.exposed_rematerialized = 0.75;
    }
    times.other = 1;
    return times;
  }

  TokenCounts loads_;
  Cluster cluster_;
  VerifiedPlan plan_;
  PlannedCost cost_;
  ReportPage page_;
};

TEST_F(ReportPageTest, TimesAndMemoryAreThoseOfThePlan) {
  cost_.times = TimesOfLayers(0.25);
  cost_.vanilla.times = TimesOfLayers(2.75);
  cost_.memory = PlanMemory{{6 * kWeights, kWeights, 2 * kWeights},
                            GpuMemory{6 * kWeights, kWeights, kWeights}};
  cost_.vanilla.memory = PlanMemory{{6 * kWeights, kWeights, kWeights}, {}};
  const json data = Data();
  EXPECT_EQ(data["times"]["seconds"], 3);
  EXPECT_EQ(data["times"]["vanilla"], 8);
  EXPECT_EQ(data["times"]["rematerialized"], 3.5);
  EXPECT_EQ(data["times"]["speedup"], 8.0 / 3);
  ASSERT_EQ(data["times"]["layers"].size(), 2U);
  const json layer = {{"experts", 0.25}, {"all_to_all", 0.25}, {"exposed", 0.5}, {"vanilla", 3.5}};
  EXPECT_EQ(data["times"]["layers"][1], layer);
  EXPECT_EQ(data["memory"]["gpu"]["bytes"], 9 * kWeights);
  EXPECT_EQ(data["memory"]["gpu"]["weight_bytes"], 2 * kWeights);
  EXPECT_EQ(data["memory"]["rematerialized"]["bytes"], 8 * kWeights);
  EXPECT_EQ(data["memory"]["vanilla"]["optimizer_bytes"], 6 * kWeights);
  EXPECT_EQ(data["rows"][0]["seconds"], 3);
  EXPECT_EQ(data["rows"][0]["speedup"], 8.0 / 3);
  EXPECT_EQ(data["rows"][0]["memory_bytes"], 9 * kWeights);
  EXPECT_FALSE(data["rows"][1].contains("seconds"));
}

TEST_F(ReportPageTest, PartsThatWereNotComputedAreNull) {
  EXPECT_TRUE(Data()["times"].is_null());
  EXPECT_TRUE(Data()["memory"].is_null());
  EXPECT_TRUE(Data()["rows"][0]["memory_bytes"].is_null());
  // Without copies, and without a plan of vanilla.
  cost_.times = TimesOfLayers(0.25);
  cost_.memory = PlanMemory{{6 * kWeights, kWeights, kWeights}, {}};
  json data = Data();
  for (const char* name : {"vanilla", "rematerialized", "speedup"}) {
    EXPECT_TRUE(data["times"].at(name).is_null()) << name;
  }
  EXPECT_TRUE(data["times"]["layers"][0]["vanilla"].is_null());
  EXPECT_TRUE(data["memory"]["rematerialized"].is_null());
  EXPECT_TRUE(data["memory"]["vanilla"].is_null());
  page_.cost = nullptr;
  page_.rows[0].cost = nullptr;
  data = Data();
  EXPECT_TRUE(data["times"].is_null());
  EXPECT_TRUE(data["rows"][0]["seconds"].is_null());
}

}  // namespace
}  // namespace shardwright::placement
