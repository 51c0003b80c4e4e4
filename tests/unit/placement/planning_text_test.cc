// SPDX-License-Identifier: Apache-2.0
#include "placement/planning/planning_text.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "placement/planning/planning_json.h"

namespace shardwright::placement {
namespace {

using Json = nlohmann::json;

/// Layer 3 of three experts on two nodes of one GPU with two slots; node 0 has experts 0 and 2,
/// node 1 has 1 and 2.
PlanInput Input() {
  PlanInput input;
  input.recordings.emplace_back();
  input.loads.layers = 1;
  input.loads.experts = 3;
  input.loads.tokens = {10, 20, 30};
  input.loads.layer_id = {3};
  input.loads.iteration = 7;
  input.cluster = UniformCluster(2, 1, 2);
  return input;
}

PlannedRow Row(const PlanInput& input) {
  PlannedRow row;
  row.strategy = "hand";
  VerifiedPlan& plan = row.plan.emplace();
  plan.result.placement = EmptyPlacement(input.loads, input.cluster);
  plan.result.placement.slot_expert = {0, 2, 1, 2};
  plan.metrics = Measure(plan.result.placement, input.loads, input.cluster);
  plan.layer_recovery = {LayerRecovery(plan.result.placement, input.cluster, 0)};
  plan.model_recovery = ModelRecovery(plan.result.placement, input.cluster);
  return row;
}

bool Has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(PlanningText, SummaryOfAPlan) {
  const PlanInput input = Input();
  EXPECT_EQ(SummaryText({}, input, Row(input)),
            "tokens    1 layer of 3 experts, iteration 7\n"
            "cluster   2 nodes with 2 gpus, 4 slots per layer\n"
            "plan      hand\n"
            "balance   1.167 mean, 1.167 worst layer (busiest gpu / mean); bound 1.000, with any "
            "split 1.000\n"
            "links     50.0 % of the tokens leave their node, 25.0 % if near replicas come first\n"
            "survives  no failure for certain (computed exactly)\n");
}

TEST(PlanningText, LayersWithDifferentNumbersOfExperts) {
  PlanInput input = Input();
  input.loads.layers = 2;
  input.loads.layer_id = {3, 4};
  input.loads.layer_experts = {3, 2};
  input.loads.tokens = {10, 20, 30, 10, 20, 0};
  PlannedRow row;
  row.strategy = "hand";
  row.reason = "no room";
  EXPECT_TRUE(Has(ComparisonText({}, input, {row}), "tokens    2 layers of 2 to 3 experts, "));
  const Json all = ComparisonJson({}, input, {row});
  EXPECT_EQ(all["experts"], 3);
  EXPECT_EQ(all["layer_experts"], (std::vector<std::uint32_t>{3, 2}));
  EXPECT_FALSE(ComparisonJson({}, Input(), {row}).contains("layer_experts"));
}

TEST(PlanningText, WhatIsAskedBesides) {
  PlanInput input = Input();
  PlannedRow row = Row(input);
  PlanRequest request;
  input.loads.records = 4;
  request.node_failure = 0.25;
  request.options.failure_unit = FailureUnit::kRack;
  input.cluster.nodes[1].alive = false;
  row.file = "their\nplan";
  row.seconds = 0.0123;
  const std::string text = SummaryText(request, input, row);
  EXPECT_TRUE(Has(text, "3 experts, sum of 4 iterations up to 7\n")) << text;
  EXPECT_TRUE(Has(text, "1 node with 1 gpu, 2 slots per layer, 1 dead\n")) << text;
  EXPECT_TRUE(Has(text, "plan      their\\x0aplan, format hand in 12.3 ms\n")) << text;
  EXPECT_TRUE(Has(text, " when each rack fails with 25.0 %\n")) << text;
}

TEST(PlanningText, MovesAndWhatIsLost) {
  PlanInput input = Input();
  PlannedRow row = Row(input);
  Migration& migration = row.plan->migration.emplace();
  migration.transfers.resize(2);
  migration.rounds = 1;
  migration.lost.assign(5, {0, 2});
  std::string text = SummaryText({}, input, row);
  EXPECT_TRUE(Has(text, "moves     2 replicas, 0 into another node, 1 round\n")) << text;
  EXPECT_TRUE(Has(text,
                  "lost      5 experts that no live gpu holds: restore from a checkpoint\n"
                  "          layer 3 expert 2, "))
      << text;
  EXPECT_TRUE(Has(text, " and 1 more, all\n          with --json\n")) << text;
  input.cluster.expert_bytes = 1024;
  migration.bytes = 2048;
  migration.seconds = 0.5;
  text = SummaryText({}, input, row);
  EXPECT_TRUE(Has(text, "another node, 2.00 KiB, 1 round, 0.50 s\n")) << text;
}

TEST(PlanningText, WhatIsNearlyCertainIsNotShownAsCertain) {
  const PlanInput input = Input();
  PlannedRow row = Row(input);
  row.plan->model_recovery.survived = {1, 0.99999, 0.5, 0.0001, 0};
  row.plan->model_recovery.certain = 0;
  const std::string text = SummaryText({}, input, row);
  EXPECT_TRUE(Has(text, "no failure for certain; 1: <100 %, 2: 50.0 %, 3: 0 % (")) << text;
}

TEST(PlanningText, ALinePerLayer) {
  const PlanInput input = Input();
  EXPECT_EQ(
      LayersText(input, Row(input)),
      "LAYER  TOKENS  BALANCE  BOUND  ANY SPLIT  NODES  LEAVE NODE  REPLICAS  SURVIVES  THEN\n"
      "    3      60    1.167  1.000      1.000  1.167      25.0 %         4         0   0 %\n"
      "\n"
      "BALANCE: busiest gpu / mean. BOUND: least possible in as many slots. ANY SPLIT: least "
      "possible\n"
      "with these replicas. NODES: busiest node / mean. LEAVE NODE: tokens that leave their node "
      "if near\n"
      "replicas come first. SURVIVES: failures always survived. THEN: chance to survive one "
      "more.\n");
}

TEST(PlanningText, AComparisonNamesWhoHasNoPlan) {
  const PlanInput input = Input();
  PlannedRow none;
  none.strategy = "idle";
  none.reason = "no\troom";
  PlanRequest request;
  request.faults = 1;
  const std::string text = ComparisonText(request, input, {Row(input), none});
  EXPECT_TRUE(Has(text, "  P(1)  ")) << text;
  EXPECT_TRUE(Has(text, "\nhand ")) << text;
  EXPECT_TRUE(Has(text, "0 !")) << text;
  EXPECT_TRUE(Has(text, "; !: FAULTS is below --faults. ")) << text;
  EXPECT_TRUE(Has(text, "idle: no plan: no\\x09room\n")) << text;
  request.node_failure = 0.01;
  EXPECT_TRUE(Has(ComparisonText(request, input, {none}), "  ALIVE  "));
}

TEST(PlanningText, SimulationsSayWhatWasLost) {
  FailureSimulations simulations;
  simulations.cluster = UniformCluster(2, 1, 2);
  SimulationResult& result = simulations.results.emplace_back();
  result.strategy = "hand";
  result.time_ms = 60'000;
  SimulationStep& step = result.steps.emplace_back();
  step.state = SimulationStep::State::kRestored;
  EXPECT_TRUE(Has(FailureSimulationsText("e.csv", simulations), "\nNothing was lost, "));
  step.time_ms = 30'000;
  step.experts_lost = 1;
  step.nodes_removed = 1;
  const std::string text = FailureSimulationsText("e.csv", simulations);
  EXPECT_EQ(text.substr(0, text.find('\n')), "events    e.csv, 1 moment over 60 s");
  EXPECT_TRUE(Has(text, "\n1 moment with something lost or no plan\n")) << text;
  EXPECT_TRUE(Has(text, "1 expert lost, restored from a checkpoint\n")) << text;
  EXPECT_TRUE(Has(text, "\n\nAFTER: time in the events file. NODES: live nodes. ")) << text;
  result.steps.assign(21, step);
  for (std::size_t i = 0; i < 21; ++i) result.steps[i].time_ms = i;
  EXPECT_TRUE(
      Has(FailureSimulationsText("e.csv", simulations), "and 1 more, all of them with --json\n"));
}

TEST(PlanningJson, PlansAndWhyThereIsNone) {
  const PlanInput input = Input();
  const PlannedRow row = Row(input);
  PlanRequest request;
  const Json plan = PlanJson(request, input, row);
  EXPECT_EQ(plan["experts"], 3);
  EXPECT_EQ(plan["plan"]["strategy"], "hand");
  EXPECT_FALSE(plan["plan"].contains("survival"));
  request.node_failure = 0.5;
  PlannedRow none;
  none.strategy = "idle";
  none.reason = "no room";
  const Json all = ComparisonJson(request, input, {row, none});
  EXPECT_EQ(all["iteration"], 7);
  EXPECT_EQ(all["strategies"][0]["survival"]["node_failure"], 0.5);
  EXPECT_EQ(all["strategies"][1]["reason"], "no room");
  EXPECT_EQ(FailureSimulationsJson({})["strategies"], Json::array());
}

}  // namespace
}  // namespace shardwright::placement
