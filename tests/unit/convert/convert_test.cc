// SPDX-License-Identifier: Apache-2.0
#include "convert/convert.h"

#include <gtest/gtest.h>

#include <fstream>

#include <nlohmann/json.hpp>

#include "checkpoints/deepspeed/common/topology.h"
#include "convert/check.h"
#include "convert/clone_output.h"
#include "opened.h"

namespace shardwright::convert {
namespace {

class Conversions : public os::Scratch {
 protected:
  Result<ConvertReport> To(const std::string& source, const std::string& target,
                           const std::string& out, std::string_view format = "deepspeed") {
    const auto input = Opened(source);
    if (!input) return Fail(Errc::kInternal, "not opened");
    options_.output = At(out);
    return Converted(*input, target, options_, format);
  }

  ConvertOptions options_;
};

TEST_F(Conversions, OfADryRunWriteNothing) {
  options_.dry_run = true;
  const auto planned = To(Own("zero1_w2"), "zero=3,dp=4", "out");
  ASSERT_TRUE(planned.has_value()) << planned.error().message;
  EXPECT_TRUE(planned->dry_run);
  EXPECT_EQ(Contents().size(), 0U);
  options_.dry_run = false;
  const auto done = To(Own("zero1_w2"), "zero=3,dp=4", "out");
  ASSERT_TRUE(done.has_value()) << done.error().message;
  EXPECT_EQ(planned->totals.output_files, done->totals.output_files);
  EXPECT_EQ(planned->totals.output_bytes, done->totals.output_bytes);
  EXPECT_EQ(planned->totals.read_bytes, done->totals.read_bytes);
  EXPECT_EQ(done->run.files_written, done->totals.output_files);
  EXPECT_EQ(done->source.mesh.dp(), 2U);
  EXPECT_EQ(done->target.mesh.dp(), 4U);
  EXPECT_FALSE(done->verbatim);
}

/// Keeps warnings.
class Warnings final : public NullSink {
 public:
  void Warn(std::string message) override { said.push_back(std::move(message)); }
  std::vector<std::string> said;
};

TEST_F(Conversions, WarnOnceOfEachKindOfLoss) {
  const auto input = Opened(Own("zero1_w2"));
  ASSERT_TRUE(input);
  checkpoints::Format format = *checkpoints::FindFormat("deepspeed");
  format.write = [](const checkpoints::Checkpoint&,
                    const checkpoints::Layout&) -> Result<checkpoints::Written> {
    checkpoints::Written written;
    for (int rank = 0; rank < 300; ++rank) {
      written.not_carried.push_back("\"rng." + std::to_string(rank) + "\" of rank " +
                                    std::to_string(rank));
    }
    written.not_carried.emplace_back("the schedule");
    return written;
  };
  Warnings sink;
  const auto written = WriteLayout(format, input->checkpoint, input->checkpoint.layout, sink);
  ASSERT_TRUE(written);
  EXPECT_EQ(written->not_carried.size(), 301U) << "the report has each";
  EXPECT_EQ(sink.said,
            (std::vector<std::string>{
                "not carried over: \"rng.0\" of rank 0, and 299 more like it; the schedule"}));
}

TEST_F(Conversions, ByWayOfAtomsGiveTheFilesOfADirectOne) {
  ASSERT_TRUE(To(Own("zero1_w2"), "zero=2,dp=3", "direct"));
  ASSERT_TRUE(To(Own("zero1_w2"), "", "atoms", "universal"));
  ASSERT_TRUE(To(At("atoms"), "zero=2,dp=3", "again"));
  auto direct = Files(Contents("direct"));
  auto again = Files(Contents("again"));
  ASSERT_EQ(direct.size(), again.size());
  for (const auto& [path, bytes] : direct) {
    const std::string other = "again" + path.substr(std::string("direct").size());
    EXPECT_TRUE(again[other] == bytes) << path;
  }
}

TEST_F(Conversions, OfEqualLayoutsRepeatTheFiles) {
  const auto done = To(Own("moe4_ep2_zero1_w2"), "", "out");
  ASSERT_TRUE(done.has_value()) << done.error().message;
  EXPECT_TRUE(done->verbatim);
  std::size_t files = 0;
  for (const auto& entry : fs::recursive_directory_iterator(Own("moe4_ep2_zero1_w2"))) {
    if (!entry.is_regular_file()) continue;
    const std::string name = fs::relative(entry.path(), Own("moe4_ep2_zero1_w2")).string();
    std::ifstream in(entry.path(), std::ios::binary);
    std::ostringstream text;
    text << in.rdbuf();
    EXPECT_TRUE(Get("out/" + name) == text.str()) << name;
    ++files;
  }
  EXPECT_GE(files, 12U);
}

TEST_F(Conversions, LinkWhereTheyAreToldTo) {
  fs::copy(Own("zero1_w2"), At("in"), fs::copy_options::recursive);  // on the same file system
  options_.link = true;
  const auto done = To(At("in"), "", "out");
  ASSERT_TRUE(done.has_value()) << done.error().message;
  EXPECT_TRUE(done->verbatim);
  const std::string name = "global_step4/mp_rank_00_model_states.pt";
  EXPECT_EQ(fs::hard_link_count(At("out/" + name)), 2U);
  EXPECT_TRUE(fs::equivalent(At("in/" + name), At("out/" + name)));
  options_.link = false;
  ASSERT_TRUE(To(At("in"), "", "copy"));
  EXPECT_EQ(fs::hard_link_count(At("copy/" + name)), 1U);
}

TEST_F(Conversions, OfATagFolderItselfPointLatestAtIt) {
  options_.flat = true;
  const auto done = To(Own("zero1_w2"), "zero=2,dp=3", "tag7");
  ASSERT_TRUE(done.has_value()) << done.error().message;
  EXPECT_EQ(Get("latest"), "tag7");
  EXPECT_TRUE(fs::exists(At("tag7/mp_rank_00_model_states.pt")));
}

TEST_F(Conversions, LinkOnlyWhatStaysAsItIs) {
  options_.link = true;
  const auto refused = To(Own("zero1_w2"), "zero=2,dp=3", "out");
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, Errc::kUsage);
  EXPECT_EQ(Contents().size(), 0U);
}

TEST_F(Conversions, DoNotReplaceAnOutput) {
  Put("out/mine", "precious");
  const auto refused = To(Own("zero1_w2"), "zero=2,dp=3", "out");
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, Errc::kBusy);
  EXPECT_EQ(Get("out/mine"), "precious");
}

TEST_F(Conversions, FindThatTheyAreDone) {
  options_.resume = Resume::kIfSameOrDone;
  ASSERT_TRUE(To(Own("zero1_w2"), "zero=2,dp=3", "out"));
  const auto again = To(Own("zero1_w2"), "zero=2,dp=3", "out");
  ASSERT_TRUE(again.has_value()) << again.error().message;
  EXPECT_TRUE(again->found_done);
  const auto other = To(Own("zero1_w2"), "zero=2,dp=4", "out");
  ASSERT_FALSE(other.has_value()) << "it holds another layout";
  EXPECT_EQ(other.error().code, Errc::kBusy);
}

TEST(Layouts, AreTheSameWhereTheirFilesAre) {
  checkpoints::Topology a;
  a.zero = 1;
  a.dp = 2;
  checkpoints::Topology b = a;
  const auto same = [&] { return checkpoints::SameFiles(LayoutOf(a), LayoutOf(b)); };
  EXPECT_TRUE(same());
  b.sub_group = 5;
  EXPECT_TRUE(same()) << "only stage 3 has sub-groups";
  a.zero = b.zero = 3;
  EXPECT_FALSE(same());
  b = a;
  b.dtype = DType::kBF16;
  EXPECT_FALSE(same());
  b = a;
  b.pipeline = a.pipeline = true;
  b.stages = {{0, 1}, {2}};
  EXPECT_FALSE(same());
}

TEST(Layouts, AreExplainedInOneLine) {
  checkpoints::Topology topology;
  topology.zero = 2;
  topology.dp = 3;
  EXPECT_EQ(Explain(LayoutOf(topology)), "zero=2 dp=3 tp=1 pp=1 ep=1 dtype=float32");
  EXPECT_EQ(ToJson(LayoutOf(topology))["dp"], 3);
}

}  // namespace
}  // namespace shardwright::convert
