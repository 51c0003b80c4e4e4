// SPDX-License-Identifier: Apache-2.0
#include "partial/optimizer_steps/apply.h"

#include <bit>
#include <cstring>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "engine/tensor/convert.h"

namespace shardwright::optimizer_steps {
namespace {

Step AdamW() {
  Step step;
  step.lr = 1e-3;
  step.beta1 = 0.9;
  step.beta2 = 0.999;
  step.eps = 1e-8;
  step.weight_decay = 0.01;
  step.count = 1;
  return step;
}

/// A parameter with moments and gradient that are the same for every call.
struct Model {
  explicit Model(std::size_t count) : param(count), first(count), second(count), gradient(count) {
    for (std::size_t i = 0; i < count; ++i) {
      const auto x = static_cast<float>(i % 97) - 48.0F;
      param[i] = x * 0.01F;
      first[i] = x * 1e-4F;
      second[i] = x * x * 1e-6F;
      gradient[i] = 0.1F - x * 0.03F;
    }
  }
  Elements Range(std::size_t at, std::size_t count) {
    Elements range;
    range.param = std::span(param).subspan(at, count);
    range.states = {std::span(first).subspan(at, count), std::span(second).subspan(at, count), {}};
    range.gradient = std::as_bytes(std::span(gradient).subspan(at, count));
    return range;
  }
  bool operator==(const Model&) const = default;
  std::vector<float> param;
  std::vector<float> first;
  std::vector<float> second;
  std::vector<float> gradient;
};

TEST(Apply, CutsAndAlignmentDoNotShow) {
  constexpr std::size_t kCount = 5000;
  Model whole(kCount);
  Model cut(kCount);
  Model unaligned(kCount);
  ASSERT_TRUE(Apply(AdamW(), whole.Range(0, kCount), nullptr));
  for (std::size_t at = 0, length = 1; at < kCount; at += length, length = length * 3 % 601 + 1) {
    length = std::min(length, kCount - at);
    ASSERT_TRUE(Apply(AdamW(), cut.Range(at, length), nullptr));
  }
  EXPECT_EQ(cut, whole);
  std::vector<std::byte> shifted(kCount * 4 + 1);
  std::memcpy(shifted.data() + 1, unaligned.gradient.data(), kCount * 4);
  Elements range = unaligned.Range(0, kCount);
  range.gradient = std::span(shifted).subspan(1);
  ASSERT_TRUE(Apply(AdamW(), range, nullptr));
  EXPECT_EQ(unaligned, whole);
}

TEST(Apply, NarrowGradientsAreWidenedFirst) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    constexpr std::size_t kCount = 4100;
    Model wide(kCount);
    std::vector<std::byte> narrow(2 * kCount);
    Convert(DType::kF32, std::as_bytes(std::span(wide.gradient)), dtype, narrow);
    Convert(dtype, narrow, DType::kF32, std::as_writable_bytes(std::span(wide.gradient)));
    Model other = wide;
    ASSERT_TRUE(Apply(AdamW(), wide.Range(0, kCount), nullptr));
    Elements range = other.Range(0, kCount);
    range.gradient_dtype = dtype;
    range.gradient = narrow;
    ASSERT_TRUE(Apply(AdamW(), range, nullptr));
    EXPECT_EQ(other, wide);
  }
}

TEST(Apply, SkippedStepsChangeNothing) {
  Model model(100);
  model.gradient[3] = std::numeric_limits<float>::infinity();
  const Model before = model;
  Step step = AdamW();
  step.skipped = true;
  ASSERT_TRUE(Apply(step, model.Range(0, 100), nullptr));
  EXPECT_EQ(model, before);
}

TEST(Apply, SizesThatDisagreeAreToldAndChangeNothing) {
  Model model(10);
  const Model before = model;
  Elements range = model.Range(0, 10);
  range.states[1] = range.states[1].first(9);
  Status status = Apply(AdamW(), range, nullptr);
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code, Errc::kBadInput);
  EXPECT_EQ(status.error().message, "exp_avg_sq: expected 10 elements like the parameter, found 9");
  range = model.Range(0, 10);
  range.gradient_dtype = DType::kBF16;
  status = Apply(AdamW(), range, nullptr);
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().message,
            "gradient: 20 bytes expected for 10 elements of bfloat16, found 40");
  range.gradient_dtype = DType::kF64;
  status = Apply(AdamW(), range, nullptr);
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code, Errc::kUnsupported);
  EXPECT_EQ(model, before);
}

TEST(Apply, StatesOfOneMomentAreEnough) {
  std::vector<float> param = {1, 2};
  const std::vector<float> gradient = {0.5, 0.25};
  Step step;
  step.optimizer = Optimizer::kSgd;
  step.lr = 0.5;
  Elements range;
  range.param = param;
  range.gradient = std::as_bytes(std::span(gradient));
  ASSERT_TRUE(Apply(step, range, nullptr));
  EXPECT_EQ(param, (std::vector<float>{0.75, 1.875}));
}

}  // namespace
}  // namespace shardwright::optimizer_steps
