// SPDX-License-Identifier: Apache-2.0
#include "partial/optimizer_steps/square_roots.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include <gtest/gtest.h>

#include "partial/optimizer_steps/apply.h"

namespace shardwright::optimizer_steps {
namespace {

constexpr std::uint32_t kOne = 0x3F800000U;
constexpr std::uint32_t kLast = 0x7F000000U;

float FromBits(std::uint32_t bits) { return std::bit_cast<float>(bits); }
std::uint32_t BitsOf(float value) { return std::bit_cast<std::uint32_t>(value); }

std::vector<float> CorrectRoots() {
  std::vector<float> roots(RootTable::kRoots);
  for (std::uint32_t i = 0; i < roots.size(); ++i) roots[i] = std::sqrt(FromBits(kOne + i));
  return roots;
}

/// Every third root a unit too large, every fifth one too small.
std::vector<float> OddRoots() {
  std::vector<float> roots = CorrectRoots();
  for (std::uint32_t i = 0; i < roots.size(); ++i) {
    const std::uint32_t bits = BitsOf(roots[i]);
    roots[i] = FromBits(i % 3 == 0 ? bits + 1 : i % 5 == 0 ? bits - 1 : bits);
  }
  return roots;
}

/// 1 / root as a step of Adagrad has it: lr * gradient is 1, and too little to change the sum.
float ReciprocalRoot(float value, const RootTable* roots) {
  Step step;
  step.optimizer = Optimizer::kAdagrad;
  step.lr = 0x1p100;
  std::vector<float> param = {0};
  std::vector<float> sum = {value};
  const std::vector<float> gradient = {-0x1p-100F};
  Elements range;
  range.param = param;
  range.states[0] = sum;
  range.gradient = std::as_bytes(std::span(gradient));
  EXPECT_TRUE(Apply(step, range, roots));
  EXPECT_EQ(BitsOf(sum[0]), BitsOf(value));
  return param[0];
}

TEST(RootTable, KeepsWhatItWasMadeOf) {
  const auto correct = RootTable::FromRoots(CorrectRoots(), kLast);
  ASSERT_TRUE(correct);
  EXPECT_TRUE(correct->IsCorrect());
  const auto odd = RootTable::FromRoots(OddRoots(), kLast);
  ASSERT_TRUE(odd);
  EXPECT_FALSE(odd->IsCorrect());
  const auto again = RootTable::FromBytes(odd->bytes(), odd->last());
  ASSERT_TRUE(again);
  EXPECT_TRUE(std::ranges::equal(again->bytes(), odd->bytes()));
}

TEST(RootTable, IsWhatStepsTakeRootsFrom) {
  const std::vector<float> odd = OddRoots();
  const auto table = RootTable::FromRoots(odd, kLast);
  ASSERT_TRUE(table);
  for (const std::uint32_t i :
       {0U, 1U, 3U, 5U, 7U, 30U, 8388607U, 8388608U, 12345678U, 16777215U}) {
    for (const int power : {-62, -20, 0, 1, 30, 60}) {
      const float value = std::ldexp(FromBits(kOne + i), 2 * power);
      const float root = std::ldexp(odd[i], power);
      EXPECT_EQ(BitsOf(ReciprocalRoot(value, &*table)), BitsOf(1.0F / root)) << i << " " << power;
      EXPECT_EQ(BitsOf(ReciprocalRoot(value, nullptr)), BitsOf(1.0F / std::sqrt(value)));
    }
  }
  // Numbers outside the range of the table are rounded correctly.
  for (const std::uint32_t bits :
       {1U, 0x007FFFFFU, kLast + 1, kLast + 3, 0x7F7FFFFFU, 0x7F800000U}) {
    const float value = FromBits(bits);
    EXPECT_EQ(BitsOf(ReciprocalRoot(value, &*table)), BitsOf(1.0F / std::sqrt(value))) << bits;
  }
}

TEST(RootTable, HoldsForSubnormalNumbersIfItSaysSo) {
  const std::vector<float> odd = OddRoots();
  const auto table = RootTable::FromRoots(odd, kLast | RootTable::kSubnormals);
  ASSERT_TRUE(table);
  int deviating = 0;
  for (const std::uint32_t bits : {1U, 2U, 3U, 5U, 0x216U, 0x855B2U, 0x7FFFFEU, 0x7FFFFFU}) {
    const float value = FromBits(bits);
    // The number of [1, 4) with the same significand, as a multiple by an even power of 2.
    int exponent = 0;
    const float significand = std::frexp(value, &exponent) * 2;  // in [1, 2)
    const int odd_exponent = (exponent - 1) & 1;
    const std::uint32_t i = BitsOf(std::ldexp(significand, odd_exponent)) - kOne;
    const float root = std::ldexp(odd[i], (exponent - 1 - odd_exponent) / 2);
    deviating += root == std::sqrt(value) ? 0 : 1;
    EXPECT_EQ(BitsOf(ReciprocalRoot(value, &*table)), BitsOf(1.0F / root)) << bits;
  }
  EXPECT_GT(deviating, 0);
  for (const float value : {0.0F, FromBits(kLast + 1), FromBits(0x7F800000U)}) {
    EXPECT_EQ(BitsOf(ReciprocalRoot(value, &*table)), BitsOf(1.0F / std::sqrt(value))) << value;
  }
}

TEST(RootTable, RefusesWhatIsNoTable) {
  std::vector<float> roots = CorrectRoots();
  EXPECT_FALSE(RootTable::FromRoots(std::span(roots).first(5), kLast));
  EXPECT_FALSE(RootTable::FromRoots(roots, kOne));
  EXPECT_FALSE(RootTable::FromRoots(roots, 0x7F800000U));
  EXPECT_FALSE(RootTable::FromRoots(roots, kOne | RootTable::kSubnormals));
  roots[2] = FromBits(BitsOf(roots[2]) + 2);
  const auto far = RootTable::FromRoots(roots, kLast);
  ASSERT_FALSE(far);
  EXPECT_EQ(far.error().code, Errc::kBadInput);
  EXPECT_EQ(
      far.error().message,
      "square root of 0x3f800002: 0x3f800003 differs from 0x3f800001 by more than one unit in "
      "the last place");
  std::vector<std::byte> bytes(RootTable::kBytes, std::byte{0x55});
  EXPECT_TRUE(RootTable::FromBytes(bytes, kLast));
  EXPECT_FALSE(RootTable::FromBytes(std::span(bytes).first(4), kLast));
  bytes[77] = std::byte{0x5D};
  EXPECT_FALSE(RootTable::FromBytes(bytes, kLast));
}

}  // namespace
}  // namespace shardwright::optimizer_steps
