// SPDX-License-Identifier: Apache-2.0
#include "partial/select/sizes.h"

#include <gtest/gtest.h>

#include "gpt350m.h"

namespace shardwright::partial {
namespace {

using published::Gpt350M;

constexpr Keep kNothing{};
constexpr Keep kMaster{false, true, false};

TEST(Sizes, Gpt350MHasThePublishedParameters) {
  const auto sum = [](std::uint64_t hidden, std::uint32_t layers, std::uint64_t experts) {
    std::uint64_t params = 0;
    for (std::uint64_t more : published::NonExpertParams(hidden, layers, experts)) params += more;
    return params;
  };
  const std::uint64_t rest = sum(1024, 24, 16);
  const std::uint64_t experts = published::ExpertParams(1024) * 16 * 12;
  EXPECT_EQ(rest, 256'309'248U);
  EXPECT_EQ(experts, 1'611'595'776U);
  EXPECT_NEAR(static_cast<double>(rest + experts) / 0x1p30, 1.74, 0.005);  // published: 1.7 G
  const std::uint64_t small = sum(768, 12, 8) + published::ExpertParams(768) * 8 * 6;
  EXPECT_NEAR(static_cast<double>(small), 324e6, 0.5e6);  // GPT-125M-8E, published: 323 M
  const auto size = SizeForK(Gpt350M(), 16, kNothing);
  ASSERT_TRUE(size) << size.error().message;
  EXPECT_EQ(size->bytes, (rest + experts) * 14);
  EXPECT_NEAR(static_cast<double>(size->bytes), 26.15e9, 5e6);
}

TEST(Sizes, PublishedRatiosComeFromTheKeptMaster) {
  const auto ratio = [](const Keep& keep) {
    const auto size = SizeForK(Gpt350M(), 1, keep);
    EXPECT_TRUE(size) << size.error().message;
    return size ? size->ratio() : 0;
  };
  EXPECT_NEAR(ratio({false, true, true}), 0.884, 0.0005);   // weights selected
  EXPECT_NEAR(ratio({true, true, false}), 0.538, 0.0005);   // moments selected
  EXPECT_NEAR(ratio({false, true, false}), 0.422, 0.0005);  // both
  EXPECT_NEAR(ratio(kNothing), 0.191, 0.0005);              // eq 6
}

TEST(Sizes, CompositionIsThePublishedOne) {
  const auto size = SizeForK(Gpt350M(), 16, kNothing);
  ASSERT_TRUE(size);
  const double full = static_cast<double>(size->full_bytes);
  const auto share = [full](std::uint64_t bytes) {
    return 100 * static_cast<double>(bytes) / full;
  };
  EXPECT_NEAR(share(size->expert.weights), 12.3, 0.05);
  EXPECT_NEAR(share(size->expert.master + size->expert.moments), 74.0, 0.05);
  EXPECT_NEAR(share(size->nonexpert.weights), 2.0, 0.05);
  EXPECT_NEAR(share(size->nonexpert.master + size->nonexpert.moments), 11.8, 0.05);
}

// MoEtion, GPT-1.6B with 64 experts: x + f = 1.6, x + 64 f = 58.7 (G parameters), 10 bytes each.
TEST(Sizes, MoetionGpt16B) {
  const double expert = (58.7 - 1.6) / 63;
  ModelBytes model;
  const ComponentBytes per_param{2, 0, 8};
  const auto rest = BytesOfParams(static_cast<std::uint64_t>((1.6 - expert) * 1e9), per_param);
  const auto one = BytesOfParams(static_cast<std::uint64_t>(expert * 1e9), per_param);
  ASSERT_TRUE(rest && one);
  model.nonexpert = {*rest};
  model.expert = {std::vector<ComponentBytes>(64, *one)};
  const auto size = SizeForK(model, 6, kNothing);
  ASSERT_TRUE(size);
  EXPECT_NEAR(static_cast<double>(size->full_bytes), 587e9, 0.1e9);
  EXPECT_NEAR(static_cast<double>(size->bytes), 61.3e9, 0.05e9);
  EXPECT_NEAR(1 / size->ratio(), 9.6, 0.05);
}

TEST(Sizes, FullIsFullWhateverIsKept) {
  for (const Keep& keep : {kNothing, kMaster, Keep{true, true, true}, Keep{true, false, true}}) {
    const auto size = SizeForK(Gpt350M(), 16, keep);
    ASSERT_TRUE(size);
    EXPECT_EQ(size->bytes, size->full_bytes);
    std::uint64_t before = 0;
    for (std::uint32_t k = 0; k <= 16; ++k) {
      const auto smaller = SizeForK(Gpt350M(), k, keep);
      ASSERT_TRUE(smaller);
      EXPECT_GE(smaller->bytes, before);
      before = smaller->bytes;
    }
  }
}

TEST(Sizes, EdgesOfK) {
  const auto none = SizeForK(Gpt350M(), 0, kNothing);
  ASSERT_TRUE(none);
  EXPECT_EQ(none->bytes, 256'309'248U * 14);
  const auto many = SizeForK(Gpt350M(), 17, kNothing);
  ASSERT_TRUE(many);
  EXPECT_EQ(many->bytes, many->full_bytes);
  ASSERT_EQ(many->warnings.size(), 12U);
  EXPECT_EQ(many->warnings[3], "MoE layer 3: K = 17 is above its 16 experts");
}

TEST(Sizes, RealSizesOfUnequalExperts) {
  ModelBytes model;
  model.nonexpert = {{5, 0, 0}, {0, 7, 1}};
  model.expert = {{{10, 20, 40}, {1, 2, 4}}, {{100, 200, 400}}};
  const auto size = SizeOfCheckpoint(model, {{1}, {}}, kMaster);
  ASSERT_TRUE(size);
  EXPECT_EQ(size->bytes, 13U + (1 + 2 + 4) + 20 + 200);
  EXPECT_EQ(size->full_bytes, 13U + 70 + 7 + 700);
  const auto guess = SizeForK(model, 1, kMaster);
  ASSERT_FALSE(guess);
  EXPECT_EQ(guess.error().code, Errc::kUsage);
  EXPECT_EQ(
      guess.error().message,
      "MoE layer 0: expert 1 and expert 0 differ in size, so K does not determine the size of a "
      "checkpoint");
}

TEST(Sizes, OverflowIsAnError) {
  ModelBytes model;
  model.nonexpert = {{~std::uint64_t{0}, 0, 0}, {1, 0, 0}};
  model.expert = {{{1, 1, 1}}};
  const auto size = SizeForK(model, 1, kNothing);
  ASSERT_FALSE(size);
  EXPECT_EQ(size.error().code, Errc::kBadInput);
  EXPECT_FALSE(BytesOfParams(std::uint64_t{1} << 62, {8, 0, 0}));
}

}  // namespace
}  // namespace shardwright::partial
