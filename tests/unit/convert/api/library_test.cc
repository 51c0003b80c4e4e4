// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "convert/api/compare.h"
#include "convert/api/convert.h"
#include "convert/api/ranks.h"
#include "convert/api/source.h"
#include "support/base/sink.h"
#include "unit/support/os/scratch.h"

namespace shardwright {
namespace {

/// Requests a stop from the first query on.
class StoppingSink final : public NullSink {
 public:
  bool stop_requested() const override { return true; }
};

class Library : public os::Scratch {
 protected:
  static Source Own(const std::string& name) {
    return {{std::string(SW_SOURCE_DIR "/tests/data/deepspeed/") + name + "/ckpt"}};
  }

  Result<ConvertReport> To(const Source& source, const std::string& target,
                           const std::string& out) {
    options_.output = At(out);
    options_.target = target;
    return Convert(ranks_, source, options_, sink_);
  }

  void ExpectUsage(const Source& source, const std::string& part) {
    const auto done = Convert(ranks_, source, options_, sink_);
    ASSERT_FALSE(done.has_value());
    EXPECT_EQ(done.error().code, Errc::kUsage) << done.error().message;
    EXPECT_NE(done.error().message.find(part), std::string::npos) << done.error().message;
    EXPECT_TRUE(Contents().empty());
  }

  Ranks ranks_;
  NullSink sink_;
  ConvertOptions options_;
};

TEST_F(Library, TellsWhatACheckpointHolds) {
  const auto held = Describe(ranks_, Own("zero1_w2"), sink_);
  ASSERT_TRUE(held.has_value()) << held.error().message;
  EXPECT_EQ(held->format, "deepspeed");
  EXPECT_NE(held->layout.find("zero=1 dp=2"), std::string::npos) << held->layout;
  ASSERT_FALSE(held->parameters.empty());
  for (const Parameter& one : held->parameters) {
    std::uint64_t elems = 1;
    for (const std::uint64_t extent : one.shape) elems *= extent;
    EXPECT_GE(one.bytes, elems) << one.name;
    EXPECT_NE(held->json.find("\"" + one.name + "\""), std::string::npos);
  }
}

TEST_F(Library, ConvertsThereAndBack) {
  const auto there = To(Own("zero1_w2"), "zero=3,dp=4", "there");
  ASSERT_TRUE(there.has_value()) << there.error().message;
  EXPECT_EQ(there->bytes_written, there->output_bytes);
  EXPECT_GT(there->bytes_read, 0U);
  EXPECT_FALSE(there->same_files);
  EXPECT_NE(there->target_layout.find("zero=3 dp=4"), std::string::npos) << there->target_layout;
  options_.threads = 3;
  options_.verify = Verify::kReadback;
  ASSERT_TRUE(To({{At("there")}}, "zero=1,dp=2", "back"));
  const auto same = Compare(ranks_, Own("zero1_w2"), {{At("back")}}, {}, sink_);
  ASSERT_TRUE(same.has_value()) << same.error().message;
  EXPECT_EQ(same->difference_count, 0U);
  EXPECT_GT(same->tensors_equal, 0U);
}

TEST_F(Library, TellsWhatDiffers) {
  const auto found = Compare(ranks_, Own("zero1_w2"), Own("zero2_w2_round_robin"), {}, sink_);
  ASSERT_TRUE(found.has_value()) << found.error().message;
  EXPECT_GT(found->difference_count, 0U);
  EXPECT_FALSE(found->differences.empty());
}

TEST_F(Library, WritesNothingInADryRun) {
  options_.dry_run = true;
  const auto planned = To(Own("zero1_w2"), "zero=3,dp=4", "out");
  ASSERT_TRUE(planned.has_value()) << planned.error().message;
  EXPECT_GT(planned->output_bytes, 0U);
  EXPECT_EQ(planned->bytes_written, 0U);
  EXPECT_TRUE(Contents().empty());
}

TEST_F(Library, GoesOnFromWhereItWasStopped) {
  StoppingSink stopping;
  options_.output = At("out");
  options_.target = "zero=3,dp=4";
  const auto stopped = Convert(ranks_, Own("zero1_w2"), options_, stopping);
  ASSERT_FALSE(stopped.has_value());
  EXPECT_EQ(stopped.error().code, Errc::kStopped) << stopped.error().message;
  EXPECT_EQ(Contents().count("out"), 0U);
  options_.resume = Resume::kIfSameOrDone;
  ASSERT_TRUE(To(Own("zero1_w2"), "zero=3,dp=4", "out"));
  options_.resume = Resume::kIfSame;
  const auto there = To(Own("zero1_w2"), "zero=3,dp=4", "out");
  ASSERT_FALSE(there.has_value());
  EXPECT_EQ(there.error().code, Errc::kBusy) << there.error().message;
}

TEST_F(Library, RefusesWhatMakesNoSense) {
  options_.output = At("out");
  ExpectUsage({}, "a source needs a path");
  ExpectUsage({{""}}, "empty");
  Source sized = Own("zero1_w2");
  sized.map_sizes = "kv_heads=2";
  ExpectUsage(sized, "kv_heads=2");
  options_.target = "zero=9";
  ExpectUsage(Own("zero1_w2"), "zero");
  options_.target = "";
  options_.format = "tensorflow";
  ExpectUsage(Own("zero1_w2"), "tensorflow");
  options_.format = "deepspeed";
  options_.threads = 0;
  ExpectUsage(Own("zero1_w2"), "0 threads");
  options_.threads = 1;
  options_.memory_bytes = 4;
  ExpectUsage(Own("zero1_w2"), "4 bytes of memory");
  options_.memory_bytes = std::uint64_t{1} << 30;
  options_.output = "";
  ExpectUsage(Own("zero1_w2"), "output");
}

TEST_F(Library, NamesWhatIsNotThere) {
  const auto held = Describe(ranks_, {{At("nothing")}}, sink_);
  ASSERT_FALSE(held.has_value());
  EXPECT_EQ(held.error().code, Errc::kNotFound);
  EXPECT_NE(held.error().message.find(At("nothing")), std::string::npos);
}

}  // namespace
}  // namespace shardwright
