// SPDX-License-Identifier: Apache-2.0
#include "partial/optimizer_steps/step.h"

#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace shardwright::optimizer_steps {
namespace {

std::vector<Option> AdamOptions() {
  return {{"lr", 1e-3}, {"beta1", 0.9}, {"beta2", 0.99}, {"eps", 1e-8}, {"weight_decay", 0.1}};
}

std::string ErrorOf(std::string_view optimizer, const std::vector<Option>& options, Errc code) {
  const auto step = StepOf(optimizer, options);
  if (step) return "";
  EXPECT_EQ(step.error().code, code);
  return step.error().message;
}

TEST(StepOf, TakesOptionsByName) {
  std::vector<Option> options = AdamOptions();
  options.push_back({"amsgrad", 1});
  options.push_back({"foreach", 0});
  const auto step = StepOf("AdamW", options);
  ASSERT_TRUE(step);
  EXPECT_EQ(step->optimizer, Optimizer::kAdamW);
  EXPECT_EQ(step->beta2, 0.99);
  EXPECT_TRUE(step->amsgrad);
  EXPECT_EQ(StatesOf(*step),
            (std::vector<std::string_view>{"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}));
  const auto again = StepOf(Name(step->optimizer), OptionsOf(*step));
  ASSERT_TRUE(again);
  EXPECT_EQ(*again, *step);
}

TEST(StepOf, DecoupledDecayTellsAdamFromAdamW) {
  std::vector<Option> options = AdamOptions();
  options.push_back({"decoupled_weight_decay", 1});
  EXPECT_EQ(StepOf("Adam", options)->optimizer, Optimizer::kAdamW);
  options.back().value = 0;
  EXPECT_EQ(StepOf("Adam", options)->optimizer, Optimizer::kAdam);
}

TEST(StepOf, RefusesByName) {
  std::vector<Option> options = AdamOptions();
  EXPECT_EQ(
      ErrorOf("RMSprop", options, Errc::kUnsupported),
      "optimizer \"RMSprop\": only steps of AdamW, Adam, SGD, Adagrad and Lion can be replayed");
  EXPECT_EQ(ErrorOf("Lion", options, Errc::kUnsupported), "Lion: option \"eps\" is not known");
  options.push_back({"fused", 1});
  EXPECT_EQ(ErrorOf("AdamW", options, Errc::kUnsupported),
            "AdamW: option \"fused\": these kernels round differently; expected 0, found 1");
  options.back() = {"lr", 1};
  EXPECT_EQ(ErrorOf("AdamW", options, Errc::kBadInput), "AdamW: option \"lr\" is given twice");
  options.back() = {"maximize", 2};
  EXPECT_EQ(ErrorOf("AdamW", options, Errc::kBadInput),
            "AdamW: option \"maximize\": 0 or 1 expected, found 2");
  options.pop_back();
  options.pop_back();
  EXPECT_EQ(ErrorOf("AdamW", options, Errc::kBadInput),
            "AdamW: option \"weight_decay\" is missing");
}

TEST(StepOf, RefusesWhatTorchRefuses) {
  const std::vector<Option> options = {
      {"lr", 1}, {"momentum", 0.9}, {"dampening", 0.1}, {"weight_decay", 0}, {"nesterov", 1}};
  EXPECT_FALSE(ErrorOf("SGD", options, Errc::kBadInput).empty());
}

TEST(StatesOf, AreThoseOfTorch) {
  Step step;
  step.optimizer = Optimizer::kSgd;
  EXPECT_TRUE(StatesOf(step).empty());
  step.momentum = 0.9;
  EXPECT_EQ(StatesOf(step), std::vector<std::string_view>{"momentum_buffer"});
  step.optimizer = Optimizer::kAdagrad;
  EXPECT_EQ(StatesOf(step), std::vector<std::string_view>{"sum"});
  step.optimizer = Optimizer::kLion;
  EXPECT_EQ(StatesOf(step), std::vector<std::string_view>{"exp_avg"});
}

}  // namespace
}  // namespace shardwright::optimizer_steps
