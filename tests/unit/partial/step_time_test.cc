// SPDX-License-Identifier: Apache-2.0
#include "partial/planner/step_time.h"

#include <gtest/gtest.h>

#include <limits>

#include "partial/planner/job.h"

namespace shardwright::partial {
namespace {

/// 3 sequences of 100 tokens, 5000 parameters of a token, 2 layers of 16 elements.
StepInput Small() {
  StepInput input;
  input.token_params = 5000;
  input.gpu_flops = 1000;
  input.sequence_length = 100;
  input.sequences = 3;
  input.attention_layers = 2;
  input.hidden_size = 16;
  return input;
}

TEST(StepTime, CountsOperationsOfBothPasses) {
  const auto time = ForwardBackwardTime(Small());
  ASSERT_TRUE(time);
  EXPECT_DOUBLE_EQ(time->flops, 3 * 300 * (2 * 5000.0 + 4 * 100 * 16 * 2));
  EXPECT_DOUBLE_EQ(time->compute_s, time->flops / 1000);
  EXPECT_EQ(time->reduce_s, 0);
  EXPECT_EQ(time->exchange_s, 0);
  EXPECT_EQ(time->seconds(), time->compute_s);
}

// Megatron-LM (arXiv 2104.04473, appendix): 96 B s l h^2 (1 + s / 6h) operations of the layers with
// recomputed activations, which is 4/3 of those without, and 6 B s h V of the logits.
TEST(StepTime, AgreesWithMegatron) {
  const double batch = 4, s = 2048, l = 24, h = 1024, v = 51200;
  StepInput input;
  input.token_params = 12 * l * h * h + v * h;
  input.gpu_flops = 1e14;
  input.sequence_length = 2048;
  input.sequences = 4;
  input.attention_layers = 24;
  input.hidden_size = 1024;
  const auto time = ForwardBackwardTime(input);
  ASSERT_TRUE(time);
  const double layers = 96 * batch * s * l * h * h * (1 + s / (6 * h)) * 3 / 4;
  EXPECT_NEAR(time->flops / (layers + 6 * batch * s * h * v), 1, 1e-12);
}

TEST(StepTime, TensorParallelRanksShareOperationsAndReduce) {
  StepInput input = Small();
  input.tp = 4;
  input.token_bytes = 32;
  const double alone = ForwardBackwardTime(Small())->compute_s;
  EXPECT_DOUBLE_EQ(ForwardBackwardTime(input)->seconds(), alone / 4);
  input.gpu_bytes_per_s = 960;
  // Each of 2 layers has 4 reductions; a ring of 4 moves 3/4 of 300 tokens of 32 bytes twice.
  EXPECT_DOUBLE_EQ(ForwardBackwardTime(input)->reduce_s, 2 * 4 * 2 * 0.75 * 9600 / 960);
  input.tp = 1;
  EXPECT_EQ(ForwardBackwardTime(input)->reduce_s, 0);
}

TEST(StepTime, TokensGoToExpertsOnOtherNodesAndBack) {
  StepInput input = Small();
  input.moe_layers = 2;
  input.top_k = 2;
  input.token_bytes = 32;
  input.sent_share = 0.75;
  input.network_bytes_per_s = 100;
  // 300 tokens of 32 bytes to 2 experts, 3/4 of these elsewhere; to and fro in both passes.
  EXPECT_DOUBLE_EQ(ForwardBackwardTime(input)->exchange_s, 2 * 4 * 2 * 0.75 * 9600 / 100);
  input.tp = 2;
  EXPECT_DOUBLE_EQ(ForwardBackwardTime(input)->exchange_s, 2 * 4 * 2 * 0.75 * 9600 / 200);
}

TEST(StepTime, WrongInputs) {
  for (const auto& change :
       {+[](StepInput* in) { in->token_params = 0; }, +[](StepInput* in) { in->gpu_flops = 0; },
        +[](StepInput* in) { in->gpu_flops = -1; }, +[](StepInput* in) { in->sequence_length = 0; },
        +[](StepInput* in) { in->sequences = 0; }, +[](StepInput* in) { in->tp = 0; },
        +[](StepInput* in) { in->hidden_size = 0; }, +[](StepInput* in) { in->gpu_flops = 1e-3; },
        +[](StepInput* in) { in->token_params = std::numeric_limits<double>::quiet_NaN(); }}) {
    StepInput input = Small();
    change(&input);
    const auto time = ForwardBackwardTime(input);
    ASSERT_FALSE(time);
    EXPECT_EQ(time.error().code, Errc::kUsage);
  }
}

TEST(TokenParams, CountsTheExpertsOfAToken) {
  Job job;
  job.params = 100 + 2 * 40;  // one module, and a layer of two experts with 40 parameters each
  job.model.nonexpert = {{200, 400, 0}};
  job.model.expert = {{{80, 160, 0}, {80, 160, 0}}};
  EXPECT_DOUBLE_EQ(*TokenParams(job, 1), 140);
  EXPECT_DOUBLE_EQ(*TokenParams(job, 2), 180);
  const auto many = TokenParams(job, 3);
  ASSERT_FALSE(many);
  EXPECT_EQ(many.error().message, "--top-k 3: a layer has 2 experts");
  EXPECT_EQ(TokenParams(Job(), 1).error().code, Errc::kUsage);
}

}  // namespace
}  // namespace shardwright::partial
