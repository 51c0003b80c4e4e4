#include "ucp/check.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "opened.h"

namespace shardwright::ucp {
namespace {

class Checked : public os::Scratch {
 protected:
  static CheckReport Compare(const std::string& a, const std::string& b) {
    const auto comm = comm::MakeSerialComm();
    NullSink sink;
    const auto left = Opened(a);
    const auto right = Opened(b);
    if (!left || !right) return {};
    auto report = Check(*comm, *left, *right, {}, sink);
    EXPECT_TRUE(report.has_value()) << report.error().message;
    return report ? *report : CheckReport{};
  }

  static bool Says(const CheckReport& report, const std::string& words) {
    return std::any_of(report.differences.begin(), report.differences.end(),
                       [&](const auto& line) { return line.find(words) != std::string::npos; });
  }
};

TEST_F(Checked, ACheckpointIsItself) {
  const CheckReport report = Compare(Own("zero2_w3_frozen_tied"), Own("zero2_w3_frozen_tied"));
  EXPECT_EQ(report.difference_count, 0U) << testing::PrintToString(report.differences);
  EXPECT_EQ(report.tensors_different, 0U);
  EXPECT_GT(report.tensors_equal, 40U);
  EXPECT_GT(report.bytes_compared, 10000U);
}

TEST_F(Checked, ACheckpointOfAnotherLayoutIsTheSame) {
  ConvertOptions options;
  options.output = At("out");
  const auto input = Opened(Own("bf16_zero2_w2"));
  ASSERT_NE(input, nullptr);
  const auto converted = Converted(*input, "zero=3,dp=3", options);
  ASSERT_TRUE(converted.has_value()) << converted.error().message;
  const CheckReport report = Compare(Own("bf16_zero2_w2"), At("out"));
  EXPECT_EQ(report.difference_count, 0U) << testing::PrintToString(report.differences);
  EXPECT_GT(report.tensors_equal, 40U);
}

TEST_F(Checked, AnotherStepDiffersInEveryTrainedTensor) {
  const std::string series = Own("moe4_ep2_series");
  const CheckReport report = Compare(series + "/global_step4", series + "/global_step5");
  EXPECT_GT(report.tensors_different, 30U);
  EXPECT_GT(report.tensors_equal, 0U) << "the buffers";
  EXPECT_GE(report.difference_count, report.tensors_different);
  EXPECT_EQ(report.differences.size(), kShownDifferences);
  EXPECT_TRUE(Says(report, "embed.emb.weight")) << testing::PrintToString(report.differences);
}

TEST_F(Checked, ModelsThatAreNotTheSameDifferInWhatTheyHave) {
  const CheckReport report = Compare(Own("zero1_w2"), Own("zero1_w2_sgd"));
  EXPECT_TRUE(Says(report, "step: 4 (0x40800000) and nothing"))
      << testing::PrintToString(report.differences);
  EXPECT_EQ(report.difference_count, 130U) << "more than are shown";
}

}  // namespace
}  // namespace shardwright::ucp
