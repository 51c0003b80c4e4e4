// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <string>

#include "partial/planner/plan.h"
#include "partial/planner/simulation.h"
#include "partial/planner/tune.h"
#include "support/base/sink.h"

namespace shardwright::partial {
namespace {

/// Two MoE layers of four experts of 100 bytes, and nothing else; every rank holds one expert.
JobRequest FourExperts() {
  JobRequest job;
  job.experts = 4;
  job.moe_layers = 2;
  job.expert_params = 100;
  job.nonexpert_params = {0};
  job.param_bytes = {1, 0, 0};
  return job;
}

std::string TextOf(const PlanRequest& request) {
  NullSink sink;
  const auto answer = PlanCheckpoints(request, sink);
  EXPECT_TRUE(answer) << answer.error().message;
  return answer ? PlanText(*answer) : "";
}

bool Has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(PlanText, ACheckpointOfOneExpertPerLayer) {
  PlanRequest request;
  request.job = FourExperts();
  EXPECT_EQ(TextOf(request),
            "BYTES               WEIGHTS      %  OPTIMIZER    %    ALL      %\n"
            "experts               800 B  100.0        0 B  0.0  800 B  100.0\n"
            "other modules           0 B    0.0        0 B  0.0    0 B    0.0\n"
            "full checkpoint       800 B  100.0        0 B  0.0  800 B  100.0\n"
            "partial checkpoint    200 B   25.0        0 B  0.0  200 B   25.0\n"
            "\n"
            "%: of a full checkpoint. OPTIMIZER: master weights and moments.\n"
            "\n"
            "CHECKPOINT  LAYER  EXPERTS  PERSISTED  AT RISK %\n"
            "         0      0  0        0\n"
            "                1  1        1\n"
            "\n"
            "EXPERTS: copied to memory. PERSISTED: of these, written to storage. AT RISK: unsaved "
            "tokens of all\n"
            "other experts.\n"
            "\n"
            "shares of checkpoint 0, both levels\n"
            "RANK  EXPERTS  ADAPTIVE  EQUAL  UNSHARED\n"
            "   0    100 B     100 B  100 B     100 B\n"
            "   1    100 B     100 B  100 B     100 B\n"
            "   2      0 B       0 B    0 B       0 B\n"
            "   3      0 B       0 B    0 B       0 B\n"
            "\n"
            "largest shares\n"
            "CHECKPOINT  LEVEL    ADAPTIVE  EQUAL  UNSHARED  IDEAL  BOUND  LESS %\n"
            "         0  persist     100 B  100 B     100 B   50 B  100 B     0.0\n"
            "the experts are not spread evenly; shares repeat after 4 checkpoints\n"
            "\n"
            "Bytes of one rank. EXPERTS: its selected experts. ADAPTIVE: other modules go to ranks "
            "with few\n"
            "expert bytes. EQUAL: without regard to expert bytes. UNSHARED: nothing is divided. "
            "IDEAL: all\n"
            "bytes / ranks. BOUND: least possible. LESS: ADAPTIVE below UNSHARED.\n");
}

TEST(PlanText, TwoLevelsAreTold) {
  PlanRequest request;
  request.job = FourExperts();
  request.k = 2;
  request.k_persist = 1;
  const std::string text = TextOf(request);
  EXPECT_TRUE(Has(text, "\nsnapshot ")) << text;
  EXPECT_TRUE(Has(text, "\nshares of checkpoint 0, persist\n")) << text;
  EXPECT_TRUE(Has(text, "\nshares of checkpoint 0, snapshot\n")) << text;
}

TEST(PlanText, OnlyTheLargestOfManyRows) {
  PlanRequest request;
  request.job = FourExperts();
  request.job.dp = 68;
  const std::string text = TextOf(request);
  EXPECT_TRUE(Has(text, "\nthe 64 largest of 68 ranks; --json has all\n")) << text;
}

TEST(PlanText, ASectionForEachQuestion) {
  PlanRequest request;
  request.job = FourExperts();
  request.job.ranks_per_node = 2;
  request.copies = 9;
  request.micro_batches = 4;
  request.forward_s = 0.5;
  request.backward_s = 1;
  request.capacity = 10;
  request.lost_tokens = 25;
  request.retrieval_s = 2;
  request.gradients = true;
  request.checkpoints = 2;
  const std::string text = TextOf(request);
  for (const char* section :
       {"\n\ncopies    3 of each worker (requested: 9; there are no more workers): 8 within a "
        "stage, 0 outside\n"
        "to send   400 B in all\n"
        "not placed: workers 0-3 have fewer copies, because there are too few nodes\n"
        "\n"
        "WORKER  STAGE  NODE  COPIES ON  HOLDS  SENDS  RECEIVES\n"
        "     0      0     0  2, 3           2  200 B       0 B\n",
        "\n\ngradients instead of state\n"
        "ITERATION  GRADIENTS  STATES   SENT  STATE ONLY  FACTOR  WINDOW\n"
        "        1          0       2  200 B       200 B    1.00       1\n",
        "\n\nGRADIENTS, STATES: experts sent as a gradient, and in full. SENT: their bytes. ",
        "\n\npipeline  an iteration takes 6.000 s, each stage idles 0.000 s\n"
        "snapshot  rank 0 needs 0.000 s: 0 B in the bubble, 100 B during computation\n",
        "\nMODULE               IN THE BUBBLE  OUTSIDE\n"
        "expert 0 of layer 0            0 B    100 B\n",
        "\n\nrecovery  25 lost tokens, made up with 1 token above capacity per iteration: 25 "
        "iterations\n",
        "\n\nfailure   wastes 2.750 s: checkpoint 0.000 s, retrieval 2.000 s, half an "
        "interval\n"}) {
    EXPECT_TRUE(Has(text, section)) << section << "in:\n" << text;
  }
}

TEST(PlanText, ALogBesideTheCheckpoints) {
  PlanRequest request;
  request.job = FourExperts();
  request.job.param_bytes = {2, 4, 8};
  request.policy = Policy::kReplay;
  request.interval = 5;
  // 8 experts of 1400 bytes, of which 400 are what gradients are as large as; one of each layer is
  // saved: 2800 + 5 * 3200 bytes, and 2800 + 2 * 3200 are still fewer than 11200.
  const std::string text = TextOf(request);
  EXPECT_TRUE(Has(text,
                  "\n\ngradients 2.34 KiB per iteration, 600 B per rank; with the checkpoint, "
                  "14.5 KiB in 5 iterations\n"
                  "window    20 iterations in which every expert is saved once\n"
                  "full      a full checkpoint writes 10.9 KiB; this is less at intervals above "
                  "3 iterations\n"))
      << text;
  NullSink sink;
  request.job.keep[1] = true;
  const auto kept = PlanCheckpoints(request, sink);
  ASSERT_FALSE(kept);
  EXPECT_EQ(kept.error().message,
            "--policy gradient-log: gradients are replayed on master weights and moments of one "
            "iteration, but with --keep these have different iterations");
  request.job.keep[1] = false;
  request.job.param_bytes = {2, 0, 8};
  EXPECT_EQ(
      PlanCheckpoints(request, sink).error().message,
      "--policy gradient-log: gradients are replayed on float32 states with float32 weights or "
      "master weights");
}

TEST(PlanText, DynamicK) {
  PlanRequest request;
  request.job = FourExperts();
  request.dynamic_limit = 0.04;
  NullSink sink;
  auto answer = PlanCheckpoints(request, sink);
  ASSERT_TRUE(answer) << answer.error().message;
  const std::string text = PlanText(*answer);
  EXPECT_TRUE(Has(text,
                  "\n\ndynamic K, lost tokens (PLT) up to 4.00 %, 2.0000 % for each K\n"
                  "K  A FAULT COSTS %  FAULTS\n"
                  "1          0.00150    1334\n"
                  "2          0.00050    4000\n"
                  "then all experts are saved; the limit covers 5334 faults\n"
                  "\n"
                  "K: experts of each layer that a checkpoint saves. A FAULT COSTS: expected lost "
                  "tokens. FAULTS:\n"))
      << text;
  answer->dynamic_k->levels.reset();
  EXPECT_TRUE(Has(PlanText(*answer), " for each K\nK stays the same: faults cost nothing\n"));
}

Simulation OneRow() {
  Simulation simulation;
  simulation.job.map = *EvenExpertMap({4}, 4);
  simulation.job.ranks.dp = 4;
  simulation.job.ranks_per_node = 4;
  simulation.job.layer_id = {0};
  simulation.input.tokens.resize(20);
  simulation.input.faults.resize(1);
  simulation.full_bytes = 4096;
  simulation.plt_limit = 0.0375;
  SimulationRow& row = simulation.rows.emplace_back();
  row.policy.k_snapshot = 2;
  row.policy.k_persist = 2;
  row.checkpoints = 2;
  row.persist_bytes = 2048;
  row.loss.plt = 0.05;
  return simulation;
}

TEST(SimulationText, TheRunAndItsRows) {
  Simulation simulation = OneRow();
  simulation.no_best = "every row";
  EXPECT_EQ(
      SimulationText(simulation),
      "run       20 iterations, 1 MoE layer of 4 experts, 2 checkpoints, 1 fault\n"
      "job       4.00 KiB of state, 4 data-parallel ranks, 4 of them expert-parallel, 1 node\n"
      "repeated  0 iterations after faults\n"
      "\n"
      "POLICY      K   WRITTEN  LARGEST  BOUND  PLT %  MLT %  RISK %  STALL s  COST s\n"
      "sequential  2  2.00 KiB      0 B    0 B  5.000   0.00    0.00    0.000     0.0\n"
      "\n"
      "WRITTEN  bytes of all checkpoints\n"
      "LARGEST  largest share of a rank in a checkpoint; BOUND  its lower bound\n"
      "PLT  share of lost tokens, mean over layers; MLT  sum over layers, may exceed 100\n"
      "RISK  mean share of unsaved tokens after a checkpoint\n"
      "STALL  stall of the longest snapshot\n"
      "COST  time of all stalls, restarts and repeated work\n"
      "\n"
      "no recommendation: every row\n");
  simulation.best = 0;
  EXPECT_TRUE(
      Has(SimulationText(simulation), "\nleast cost with PLT up to 3.75 %: sequential, K 2\n"));
}

TEST(SimulationText, GradientsHaveATableOfTheirOwn) {
  Simulation simulation = OneRow();
  simulation.rows[0].memory_bytes = 6144;
  simulation.rows[0].recovery_s = 300;
  SimulationRow row = simulation.rows[0];
  row.policy.policy = Policy::kReplay;
  row.log_bytes = 40'960;
  row.log_stall_s = 0.0625;
  row.window = 20;
  row.recovery_s = 420.5;
  simulation.rows.push_back(row);
  row.policy.rule = GradientRule::kLeast;
  row.policy.k_snapshot = row.policy.k_persist = 4;
  row.recovery_s.reset();
  simulation.rows.push_back(row);
  row.policy = {Policy::kLoadAware, 2, 2, {}};
  simulation.rows.push_back(row);
  const std::string text = SimulationText(simulation);
  EXPECT_TRUE(Has(
      text,
      "\nPOLICY                 K  STATE/IT    LOG/IT  STALL/IT s    MEMORY  WINDOW  RECOVERY s\n"
      "sequential             2     102 B         -           -  6.00 KiB       -       300.0\n"
      "gradient-log           2     102 B  2.00 KiB       0.062  6.00 KiB      20       420.5\n"
      "gradient-log, least *  4     102 B  2.00 KiB       0.062  6.00 KiB      20           -\n"
      "\nSTATE, LOG  bytes per iteration"))
      << text;
  EXPECT_TRUE(
      Has(text, "\n* computed only, for gradients as large as weights; no command runs this"));
  // A row that no command can run is never the best.
  simulation.rows[2].loss.plt = simulation.rows[1].loss.plt = 0;
  simulation.rows[1].overhead_s = 7;
  EXPECT_EQ(BestRow(simulation.rows, 0.01), 1U);
  simulation.job.no_replay = "why";
  EXPECT_TRUE(Has(SimulationText(simulation), "\nno row gradient-log: why\n"));
}

TEST(SimulationText, HowKGrew) {
  Simulation simulation = OneRow();
  DynamicRun& dynamic = simulation.rows[0].dynamic.emplace();
  dynamic.k = {{0, 0, 1}, {1, 10, 2}};
  dynamic.state.total = 0.01;
  dynamic.state.limit = 0.04;
  dynamic.faults_covered = 1;
  EXPECT_TRUE(Has(SimulationText(simulation),
                  "\ndynamic K 1, 2 after iteration 10; lost 1.000 of 4.000 %, covers 1 more "
                  "fault\n"));
  dynamic.faults_covered.reset();
  EXPECT_TRUE(Has(SimulationText(simulation), " covers any number of faults\n"));
}

TEST(TuningText, NumbersBesideThoseOfFullCheckpoints) {
  Tuning tuning;
  tuning.chosen.config.k_snapshot = 2;
  tuning.chosen.config.k_persist = 1;
  tuning.chosen.config.interval = 6;
  tuning.chosen.rate_s = 0.0125;
  tuning.full.config.k_snapshot = 16;
  tuning.full.config.k_persist = 16;
  tuning.full.config.interval = 1;
  tuning.full.config.expected_plt = 0.5;
  tuning.chosen.stall_reduction = 0.985;
  tuning.chosen.speed_up = 3.254;
  tuning.checkfreq.config.interval = 24;
  tuning.blocking.config.stall_s = 4.5;
  EXPECT_EQ(
      TuningText(tuning),
      "NUMBER              EQ        CHOSEN       FULL  CHECKFREQ   BLOCKING\n"
      "K of a snapshot                    2         16          1          1\n"
      "K of a persist                     1         16          1          1\n"
      "iterations between                 6          1         24          1\n"
      "checkpoint          5, 6         0 B        0 B        0 B        0 B\n"
      "share of full       6      100.000 %  100.000 %  100.000 %  100.000 %\n"
      "snapshot of a rank  8, 9         0 B        0 B        0 B        0 B\n"
      "persist of a rank   8, 9         0 B        0 B        0 B        0 B\n"
      "snapshot takes      10       0.000 s    0.000 s    0.000 s    0.000 s\n"
      "persist takes                0.000 s    0.000 s    0.000 s    0.000 s\n"
      "stall               10       0.000 s    0.000 s    0.000 s    4.500 s\n"
      "stall reduction             98.500 %    0.000 %    0.000 %    0.000 %\n"
      "speed-up                      3.25 x     1.00 x     1.00 x     1.00 x\n"
      "all stalls          3, 11    0.000 s    0.000 s    0.000 s    0.000 s\n"
      "all restarts        4, 12    0.000 s    0.000 s    0.000 s    0.000 s\n"
      "repeated work       4, 12    0.000 s    0.000 s    0.000 s    0.000 s\n"
      "overhead            4, 13    0.000 s    0.000 s    0.000 s    0.000 s\n"
      "per iteration       14-16  12.500 ms   0.000 ms   0.000 ms   0.000 ms\n"
      "lost tokens (PLT)   7        0.000 %   50.000 %    0.000 %    0.000 %\n"
      "effective time               0.000 %    0.000 %    0.000 %    0.000 %\n"
      "\n"
      "EQ: equations of MoC-System (arXiv 2408.04307). CHOSEN: the best partial checkpoints. "
      "FULL: full\n"
      "checkpoints. CHECKFREQ, BLOCKING: full checkpoints in which copies do not share the work, "
      "written\n"
      "while training runs or waits. The stall reduction, and the speed-up of an iteration with a\n"
      "checkpoint, are against BLOCKING.\n"
      "\n"
      "use --k 2 --k-persist 1 every 6 iterations\n");
  tuning.chosen.config.interval = 1;
  EXPECT_TRUE(Has(TuningText(tuning), "\nuse --k 2 --k-persist 1 every iteration\n"));
  tuning.best = TunedBest::kFull;
  tuning.no_replay = "why";
  EXPECT_TRUE(
      Has(TuningText(tuning), "\n\nno column REPLAY: why\nuse --policy full every iteration\n"));
}

TEST(TuningText, NoneWithinTheLimit) {
  Tuning tuning;
  tuning.best = TunedBest::kFull;
  tuning.full.config.interval = 79;
  tuning.chosen.config.plt_in_limit = false;
  tuning.chosen.config.k_snapshot = 9;
  tuning.chosen.config.k_persist = 7;
  tuning.chosen.config.interval = 80;
  tuning.chosen.config.expected_plt = 0.4095;
  tuning.no_replay = "why";
  const std::string text = TuningText(tuning);
  EXPECT_TRUE(Has(text, "NUMBER              EQ          FULL  CHECKFREQ   BLOCKING\n")) << text;
  EXPECT_TRUE(Has(text, "\nlost tokens (PLT)   7        0.000 %    0.000 %    0.000 %\n")) << text;
  EXPECT_TRUE(
      Has(text,
          "\n\nno column CHOSEN: no K is within the limit of 3.750 % lost tokens; the closest, "
          "--k 9 --k-persist 7 every 80 iterations, loses 40.950 %\n"
          "no column REPLAY: why\n"
          "use --policy full every 79 iterations\n"))
      << text;
  tuning.no_replay = "";
  tuning.replay.emplace();
  EXPECT_TRUE(Has(TuningText(tuning),
                  "\na replay                            -    0.000 s          -          -\n"))
      << TuningText(tuning);
}

TEST(TuningText, ALosslessRun) {
  Tuning tuning;
  tuning.best = TunedBest::kReplay;
  tuning.input.log_bytes = 2048;
  TunedReplay& replay = tuning.replay.emplace();
  replay.numbers.config.k_snapshot = replay.numbers.config.k_persist = 3;
  replay.numbers.config.interval = 2;
  replay.numbers.log_stalls_s = 4;
  replay.numbers.replays_s = 5;
  replay.replay_s = 0.5;
  const std::string text = TuningText(tuning);
  const char* const use =
      "\nuse shardwright.PartialCheckpoints(k=3, every=2, lossless=True, "
      "flags=[\"--policy\", \"gradient-log\"])\n";
  for (const char* line :
       {"NUMBER               EQ        CHOSEN       FULL       REPLAY  CHECKFREQ   BLOCKING\n",
        "\nK of a snapshot                     1          1            3          1          1\n",
        "\ngradients copied                    -          -  2.00 KiB/it          -          -\n",
        "\ncopies of gradients                 -          -      4.000 s          -          -\n",
        "\na replay                            -          -      0.500 s          -          -\n",
        "\nall replays                         -          -      5.000 s          -          -\n",
        use}) {
    EXPECT_TRUE(Has(text, line)) << line << "in:\n" << text;
  }
}

}  // namespace
}  // namespace shardwright::partial
