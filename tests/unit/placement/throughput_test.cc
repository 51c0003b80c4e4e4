// SPDX-License-Identifier: Apache-2.0
#include "placement/failure_simulation/throughput.h"

#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

#include "placement/failure_simulation/deepspeed.h"
#include "support.h"

namespace shardwright::placement {
namespace {

using State = SimulationStep::State;

SimulationStep StepOf(std::uint64_t seconds, State state, std::uint32_t gpus,
                      bool failure = false) {
  SimulationStep step;
  step.time_ms = seconds * 1000;
  step.state = state;
  step.gpus_used = gpus;
  step.imbalance_used = 1;
  step.failure = failure;
  return step;
}

// A step takes 2 s and each GPU trains 4 samples in it. A checkpoint every 10 steps: 20 s of
// training, 5 s of writing.
ThroughputOptions Times() {
  ThroughputOptions options;
  options.step_seconds = 2;
  options.samples_per_gpu = 4;
  options.detection_seconds = 10;
  options.rebalance_seconds = 20;
  options.restart_seconds = 30;
  options.restore_seconds = 40;
  options.checkpoint_seconds = 5;
  options.checkpoint_every = 10;
  return options;
}

Throughput Of(std::vector<SimulationStep> steps, const ThroughputOptions& options) {
  SimulationResult result;
  result.strategy = "lazarus";
  result.steps = std::move(steps);
  Throughput run = ComputeThroughput(result, options);
  EXPECT_NEAR(std::accumulate(run.seconds.begin(), run.seconds.end(), 0.0), run.total_seconds,
              1e-6);
  double samples = 0;
  for (std::size_t i = 0; i < run.spans.size(); ++i) {
    samples += run.spans[i].samples;
    EXPECT_LT(run.spans[i].begin_seconds, run.spans[i].end_seconds);
    if (i > 0) EXPECT_DOUBLE_EQ(run.spans[i].begin_seconds, run.spans[i - 1].end_seconds);
  }
  EXPECT_NEAR(samples, run.samples + run.samples_lost, 1e-6);
  return run;
}

TEST(ThroughputTest, MigrationKeepsEveryStep) {
  SimulationStep failed = StepOf(100, State::kMigrated, 3, true);
  failed.migration_seconds = 2;
  failed.transfers = 1;
  const Throughput run =
      Of({StepOf(0, State::kStarted, 4), failed, StepOf(200, State::kRestored, 2, true)}, Times());
  // 0 to 100: four times 20 s and a checkpoint: 40 steps of 16 samples.
  // 100 to 200: 10 + 20 + 2 s of pause, then 68 s: 20, 5, 20, 5, 18: 29 steps of 12 samples.
  EXPECT_DOUBLE_EQ(run.samples, 40 * 16 + 29 * 12);
  EXPECT_EQ(run.checkpoints, 6U);
  EXPECT_DOUBLE_EQ(run.of(Activity::kTrain), 80 + 58);
  EXPECT_DOUBLE_EQ(run.of(Activity::kCheckpoint), 30);
  EXPECT_DOUBLE_EQ(run.of(Activity::kDetection), 10);
  EXPECT_DOUBLE_EQ(run.of(Activity::kRebalance), 20);
  EXPECT_DOUBLE_EQ(run.of(Activity::kMigration), 2);
  EXPECT_EQ(run.restores, 0U);  // costs of the last event do not count
  EXPECT_DOUBLE_EQ(run.rate(), run.samples / 200);
  ASSERT_EQ(run.spans.size(), 5U);
  EXPECT_EQ(run.spans[1].activity, Activity::kDetection);
  EXPECT_DOUBLE_EQ(run.spans[4].begin_seconds, 132);
  EXPECT_EQ(run.spans[4].gpus, 3U);
}

TEST(ThroughputTest, RestartDiscardsStepsSinceTheCheckpoint) {
  const std::vector<SimulationStep> steps = {StepOf(0, State::kStarted, 4),
                                             StepOf(118, State::kRestored, 2, true),
                                             StepOf(318, State::kMigrated, 2)};
  const Throughput run = Of(steps, Times());
  // 0 to 118: 4 cycles, then 18 s: 9 steps of 16 samples are discarded.
  // 118 to 318: 10 + 30 + 40 s of pause, then 120 s: 4 cycles and 10 steps: 50 of 8 samples.
  EXPECT_DOUBLE_EQ(run.samples, 40 * 16 + 50 * 8);
  EXPECT_DOUBLE_EQ(run.samples_lost, 9 * 16);
  EXPECT_DOUBLE_EQ(run.of(Activity::kTrain), 80 + 100);
  EXPECT_DOUBLE_EQ(run.of(Activity::kRecompute), 18);
  EXPECT_DOUBLE_EQ(run.of(Activity::kDetection), 10);
  EXPECT_DOUBLE_EQ(run.of(Activity::kRestart), 30);
  EXPECT_DOUBLE_EQ(run.of(Activity::kRestore), 40);
  EXPECT_EQ(run.checkpoints, 8U);
  EXPECT_EQ(run.restores, 1U);
  ThroughputOptions none = Times();
  none.checkpoint_every = 0;
  // Without checkpoints all 59 steps are discarded; then 120 s are 60 steps.
  EXPECT_DOUBLE_EQ(Of(steps, none).samples_lost, 59 * 16);
  EXPECT_DOUBLE_EQ(Of(steps, none).samples, 60 * 8);
}

TEST(ThroughputTest, AnInterruptedCheckpointDoesNotCount) {
  // The first checkpoint takes from 20 to 25 s. At 23 s it is not complete, at 25 s it is.
  for (const std::uint64_t failure : {23U, 25U}) {
    const Throughput run =
        Of({StepOf(0, State::kStarted, 1), StepOf(failure, State::kRestored, 1, true),
            StepOf(failure + 80, State::kStarted, 1)},
           Times());
    EXPECT_DOUBLE_EQ(run.samples, failure == 23 ? 0 : 40);
    EXPECT_DOUBLE_EQ(run.samples_lost, failure == 23 ? 40 : 0);
  }
  // After a migration the checkpoint begins again: 20 s of training, 3 s lost, 20 s of pause, 5 s
  // of writing, 4 s of training.
  const Throughput again = Of({StepOf(0, State::kStarted, 2), StepOf(23, State::kMigrated, 1),
                               StepOf(52, State::kMigrated, 1)},
                              Times());
  EXPECT_DOUBLE_EQ(again.samples, 10 * 8 + 2 * 4);
  EXPECT_EQ(again.checkpoints, 1U);
  EXPECT_DOUBLE_EQ(again.of(Activity::kCheckpoint), 8);
}

TEST(ThroughputTest, MigrationsWaitAndRestartsBeginAgain) {
  ThroughputOptions options = Times();
  options.checkpoint_every = 0;
  // Pauses of 30 s from 10 s and of 30 s from 15 s end at 70 s; 15 s of training remain.
  const Throughput waiting =
      Of({StepOf(0, State::kStarted, 4), StepOf(10, State::kMigrated, 3, true),
          StepOf(15, State::kMigrated, 2, true), StepOf(85, State::kMigrated, 2)},
         options);
  EXPECT_DOUBLE_EQ(waiting.samples, 5 * 16 + 7.5 * 8);
  EXPECT_DOUBLE_EQ(waiting.of(Activity::kDetection), 20);
  EXPECT_DOUBLE_EQ(waiting.of(Activity::kRebalance), 40);
  // A restart of 80 s from 10 s is 50 s old when the second one begins, which ends at 140 s.
  const Throughput anew =
      Of({StepOf(0, State::kStarted, 4), StepOf(10, State::kRestored, 3, true),
          StepOf(60, State::kRestored, 2, true), StepOf(160, State::kMigrated, 2)},
         options);
  EXPECT_DOUBLE_EQ(anew.samples, 10 * 8);
  EXPECT_DOUBLE_EQ(anew.of(Activity::kDetection), 20);
  EXPECT_DOUBLE_EQ(anew.of(Activity::kRestart), 60);
  EXPECT_DOUBLE_EQ(anew.of(Activity::kRestore), 10 + 40);
}

TEST(ThroughputTest, StalledTimeTrainsNothing) {
  ThroughputOptions options = Times();
  options.checkpoint_every = 0;
  // The run starts at 50 s. After the stall the state is there: no restart.
  const Throughput run = Of({StepOf(0, State::kStalled, 0), StepOf(50, State::kStarted, 1),
                             StepOf(60, State::kStalled, 0, true), StepOf(75, State::kMigrated, 2),
                             StepOf(105, State::kStalled, 0)},
                            options);
  EXPECT_DOUBLE_EQ(run.total_seconds, 55);
  EXPECT_DOUBLE_EQ(run.of(Activity::kStalled), 15);
  EXPECT_DOUBLE_EQ(run.samples, 5 * 4 + 5 * 8);
  EXPECT_DOUBLE_EQ(Of({}, options).rate(), 0);
  EXPECT_DOUBLE_EQ(Of({StepOf(9, State::kStarted, 4)}, options).rate(), 0);
}

TEST(ThroughputTest, MomentsWithoutAChangeCostNothing) {
  SimulationStep moved = StepOf(40, State::kMigrated, 4);
  moved.transfers = 1;
  const Throughput run = Of({StepOf(0, State::kStarted, 4), StepOf(20, State::kMigrated, 4), moved,
                             StepOf(80, State::kMigrated, 4)},
                            Times());
  EXPECT_DOUBLE_EQ(run.of(Activity::kRebalance), 20);
}

TEST(ThroughputTest, ImbalanceSlowsTheShareOfTheExperts) {
  ThroughputOptions options = Times();
  options.checkpoint_every = 0;
  options.expert_share = 0.5;
  std::vector<SimulationStep> steps = {StepOf(0, State::kStarted, 1),
                                       StepOf(26, State::kMigrated, 1)};
  steps[0].imbalance_used = 1.6;
  EXPECT_DOUBLE_EQ(Of(steps, options).samples, 10 * 4);  // a step takes 1 + 1.6 s
}

// Two experts; expert-parallel groups of two GPUs of one slot.
class DeepSpeedTest : public ::testing::Test {
 protected:
  SimulationResult Simulated(Recovery recovery, std::uint32_t nodes,
                             const std::vector<NodeEvent>& events) const {
    token_counts::TokenTrace trace;
    trace.experts = 2;
    trace.layer_id = {0};
    trace.records.push_back({0, {30, 10}});
    SimulationOptions options;
    options.seconds = [] { return 0.0; };
    NullSink sink;
    const auto comm = comm::MakeSerialComm();
    auto result = SimulateDeepSpeed(*comm, 2, recovery, trace, UniformCluster(nodes, 1, 1), events,
                                    options, sink);
    EXPECT_TRUE(result.has_value()) << result.error().message;
    return result ? *std::move(result) : SimulationResult();
  }

  static std::string States(const SimulationResult& result) {
    std::string text;
    for (const SimulationStep& step : result.steps) {
      text += "smr-"[static_cast<std::size_t>(step.state)] + std::to_string(step.gpus_used) + " ";
    }
    return text;
  }
};

// Five nodes, of which node 4 is idle. It leaves, a used node fails, and idle nodes come and go.
TEST_F(DeepSpeedTest, RestartsForFailuresAndForMoreGpus) {
  const std::vector<NodeEvent> events{
      {0, true, "node4"},    {100, false, "node4"}, {200, false, "node3"}, {300, false, "node2"},
      {400, true, "node2"},  {500, true, "node3"},  {600, false, "node0"}, {600, false, "node1"},
      {600, false, "node2"}, {700, true, "node0"}};
  const SimulationResult ds = Simulated(Recovery::kRestart, 5, events);
  EXPECT_EQ(ds.strategy, "ds");
  EXPECT_EQ(States(ds), "s4 m4 r2 m2 m2 r4 -0 r2 ");
  EXPECT_EQ(ds.steps[2].experts_lost, 0U);
  EXPECT_EQ(ds.transfers, 0U);
  const SimulationResult survivors = Simulated(Recovery::kSurvivors, 5, events);
  EXPECT_EQ(survivors.strategy, "ds-ft");
  EXPECT_EQ(States(survivors), "s4 m4 m2 m2 m2 m4 -0 r2 ");
  // The mean is taken over the GPUs with experts: 30 tokens and a mean of 20.
  for (const std::size_t i : {0U, 2U, 3U}) EXPECT_DOUBLE_EQ(ds.steps[i].imbalance_used, 1.5);
}

TEST_F(DeepSpeedTest, SurvivorsLeaveIdleNodesIdle) {
  // Groups 0-1 and 2-3. Node 4 is idle until a node joins.
  const std::vector<NodeEvent> joins{
      {0, true, "node4"}, {100, false, "node0"}, {200, true, "node0"}};
  EXPECT_EQ(States(Simulated(Recovery::kSurvivors, 5, joins)), "s4 m2 m4 ");
  EXPECT_EQ(States(Simulated(Recovery::kRestart, 5, joins)), "s4 r4 m4 ");
  // Both replicas of an expert fail: ds-ft restores it and uses all nodes again.
  const std::vector<NodeEvent> fails{
      {0, true, "node4"}, {100, false, "node0"}, {200, false, "node1"}, {200, false, "node2"}};
  const SimulationResult lost = Simulated(Recovery::kSurvivors, 5, fails);
  EXPECT_EQ(lost.steps[1].gpus_used, 2U);
  EXPECT_GT(lost.steps[2].experts_lost, 0U);
  EXPECT_EQ(lost.steps[2].state, State::kRestored);
  EXPECT_EQ(lost.steps[2].gpus_used, 2U);
}

TEST_F(DeepSpeedTest, GroupsThatDoNotFitAreNamed) {
  const Cluster cluster = UniformCluster(4, 2, 3);
  const auto message = [&](std::uint64_t size, std::uint32_t experts) {
    const Status status = CheckExpertParallel(size, experts, cluster);
    if (status) return std::string();
    EXPECT_EQ(status.error().code, Errc::kUsage);
    return status.error().message;
  };
  EXPECT_EQ(message(4, 12), "");
  EXPECT_EQ(message(8, 16), "");
  EXPECT_EQ(message(16, 16), "--ep 16: the cluster has only 8 gpus");
  EXPECT_EQ(message(5, 12), "--ep 5 does not divide the 12 experts");
  EXPECT_EQ(message(2, 12), "--ep 2: 6 experts of a gpu do not fit in its 3 slots");
}

}  // namespace
}  // namespace shardwright::placement
