// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <numeric>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <string>
#include <tuple>
#include <utility>

#include "support/base/limits.h"
#include "token_counts/trace.h"
#include "unit/support/os/scratch.h"
#include "unit/token_counts/traces.h"

namespace shardwright::token_counts {
namespace {

using Tokens = std::vector<std::uint64_t>;

TEST(IoLoadsTest, JsonLinesAreRecords) {
  const TokenTrace trace = Parsed(
      "{\"iteration\":10,\"tokens\":[[1,2],[3,4]]}\n\n{\"iteration\":11,\"tokens\":[[5,6],[7,8]]}"
      "\n");
  EXPECT_EQ(trace.format, "jsonl");
  EXPECT_EQ(trace.experts, 2U);
  EXPECT_EQ(trace.layer_id, (std::vector<std::uint32_t>{0, 1}));
  ASSERT_EQ(trace.records.size(), 2U);
  EXPECT_EQ(trace.records[1].iteration, 11U);
  EXPECT_EQ(trace.records[1].tokens, (Tokens{5, 6, 7, 8}));
}

TEST(IoLoadsTest, ListsAreLayersOrRecords) {
  EXPECT_EQ(Parsed("[1,2,3]").records[0].tokens, (Tokens{1, 2, 3}));
  const TokenTrace layers = Parsed("[[1,2,3],\n [4,5,6]]");
  EXPECT_EQ(layers.layer_id.size(), 2U);
  EXPECT_EQ(Parsed("[[[1,2]],[[3,4]],[[5,6]]]").records.size(), 3U);
  EXPECT_EQ(Parsed("{\n \"loads\": [[7, 8]]\n}").records[0].tokens, (Tokens{7, 8}));
}

TEST(IoLoadsTest, AByteOrderMarkIsSkipped) {
  for (const char* text : {"{\"iteration\":7,\"tokens\":[[1,2]]}\n", "[[1,2]]", "1,2\n",
                           "layer,expert,tokens\n0,0,1\n0,1,2\n"}) {
    EXPECT_EQ(Parsed(std::string("\xEF\xBB\xBF") + text).records[0].tokens, (Tokens{1, 2})) << text;
  }
  ExpectRefused("\xEF\xBB\xBF", Errc::kBadInput, "x: is empty");
}

TEST(IoLoadsTest, WholeRealsAreCounts) {
  EXPECT_EQ(Parsed("[[1.5e1, 2.0, 0.0]]").records[0].tokens, (Tokens{15, 2, 0}));
}

TEST(IoLoadsTest, StepsThatSglangDidNotFillAreLeftOut) {
  const TokenTrace trace = Parsed("{\"rank\":0,\"logical_count\":[[[1,2]],[[0,0]],[[3,4]]]}");
  EXPECT_EQ(trace.format, "sglang");
  ASSERT_EQ(trace.records.size(), 2U);
  EXPECT_EQ(trace.records[1].tokens, (Tokens{3, 4}));
  const TokenTrace late = Parsed("{\"logical_count\":[[[0,0]],[[0,0]],[[3,4]]]}");
  ASSERT_EQ(late.records.size(), 1U);
  EXPECT_EQ(late.layer_id, (std::vector<std::uint32_t>{0}));
  EXPECT_EQ(late.records[0].tokens, (Tokens{3, 4}));
}

TEST(IoLoadsTest, PhysicalExpertsOfVllmAddUp) {
  const TokenTrace trace = Parsed(
      "{\"record_type\":\"eplb_load_meta\",\"version\":1,\"num_ranks\":2}\n"
      "{\"record_type\":\"eplb_load_stats\",\"version\":1,\"step\":7,\"num_ranks\":2,"
      "\"expert_load\":[[10,1,5,2],[2,8,1,3]],\"p2l_map\":[[0,1,2,0],[1,2,0,1]]}\n");
  EXPECT_EQ(trace.format, "vllm");
  EXPECT_EQ(trace.experts, 3U);
  ASSERT_EQ(trace.records.size(), 1U);
  EXPECT_EQ(trace.records[0].iteration, 7U);
  EXPECT_EQ(trace.records[0].tokens, (Tokens{12, 1, 5, 1, 5, 8}));
}

TEST(IoLoadsTest, AMapOfPhysicalExpertsIsUsedWithEveryKey) {
  for (const char* key : {"tokens", "loads", "expert_load", "expert_load_view", "tokens_per_expert",
                          "token_counts", "expert_counts"}) {
    for (const char* map : {"physical_to_logical_map", "p2l_map"}) {
      const auto text = [&](const std::string& counts) {
        return std::string("{\"") + key + "\":" + counts + ",\"" + map + "\":[[0,1,-1,0]]}";
      };
      EXPECT_EQ(Parsed(text("[[1,2,3,4]]")).records[0].tokens, (Tokens{5, 2})) << key;
      const TokenTrace steps = Parsed(text("[[[1,2,3,4]],[[5,6,7,8]]]"));
      ASSERT_EQ(steps.records.size(), 2U) << key;
      EXPECT_EQ(steps.records[1].tokens, (Tokens{13, 6})) << key;
    }
  }
}

TEST(IoLoadsTest, LoadsOfAPlanKeepTheirLayers) {
  const TokenTrace trace =
      Parsed("{\"layers\":[\n{\"layer\":3,\"loads\":[1,2]},\n{\"layer\":60,\"loads\":[3,4]}]}");
  EXPECT_EQ(trace.layer_id, (std::vector<std::uint32_t>{3, 60}));
}

TEST(IoLoadsTest, CsvHasARowPerLayerOrPerCount) {
  const TokenTrace wide = Parsed("# counts\n1, 2,3\n4,5 ,6\r\n");
  EXPECT_EQ(wide.format, "csv");
  EXPECT_EQ(wide.records[0].tokens, (Tokens{1, 2, 3, 4, 5, 6}));
  const TokenTrace rows = Parsed(
      "iteration,rank,expert,layer,tokens\n7,0,0,5,1\n7,1,0,5,10\n7,0,1,5,2\n7,1,1,5,20\n"
      "8,0,0,5,3\n8,0,1,5,4\n");
  EXPECT_EQ(rows.layer_id, (std::vector<std::uint32_t>{5}));
  ASSERT_EQ(rows.records.size(), 2U);
  EXPECT_EQ(rows.records[0].tokens, (Tokens{11, 22}));
}

class BadLoads : public testing::TestWithParam<std::tuple<const char*, Errc, const char*>> {};

TEST_P(BadLoads, IsRefusedWithItsPlace) {
  const auto& [text, code, part] = GetParam();
  ExpectRefused(text, code, part);
}

INSTANTIATE_TEST_SUITE_P(
    IoLoadsTest, BadLoads,
    testing::Values(
        std::tuple("", Errc::kBadInput, "x: is empty"),
        std::tuple("{\"tokens\":[[1,2],[3]]}", Errc::kBadInput, "layer 1 has 1 experts, layer 0"),
        std::tuple("{\"tokens\":[[1,2]]}\n{\"tokens\":[[1,2],[3,4]]}", Errc::kBadInput,
                   "x:2: tokens: 2 layers of 2 experts, the first record has 1"),
        std::tuple("{\"tokens\":[[1,-2]]}", Errc::kBadInput, "layer 0 expert 1: negative: -2"),
        std::tuple("[[1],[-0.5]]", Errc::kBadInput, "layer 1 expert 0: negative: -0.5"),
        std::tuple("[[1],[0.5]]", Errc::kBadInput, "layer 1 expert 0: not a whole number: 0.5;"),
        std::tuple("1,2\n3,4.25\n", Errc::kBadInput, "x:2: layer 1 expert 1: not a whole number"),
        std::tuple("{\"tokens\":[[1,NaN]]}", Errc::kBadInput, "column 15: cannot read \"NaN\""),
        std::tuple("[[1,\n 2,x]]", Errc::kBadInput, "line 2, column 4"),
        std::tuple("[[1e300]]", Errc::kBadInput, "layer 0 expert 0: more than"),
        std::tuple("[[1,9007199254740993]]", Errc::kBadInput, "layer 0 expert 1: more than"),
        std::tuple("1,9007199254740993\n", Errc::kBadInput, "layer 0 expert 1: more than"),
        std::tuple("[[18446744073709551616]]", Errc::kBadInput, "more than"),
        std::tuple("[[9007199254740992,1]]", Errc::kBadInput, "the layer has more than"),
        std::tuple("[{\"iteration\":1,\"tokens\":[[1,2]]}]", Errc::kBadInput,
                   "x: expected lists of counts, found a list of objects"),
        std::tuple("[[\"1\"]]", Errc::kBadInput, "a count expected, found a text"),
        std::tuple("[[1,null]]", Errc::kBadInput, "layer 0 expert 1: a count expected, found null"),
        std::tuple("[]", Errc::kBadInput, "layer 0: no experts"),
        std::tuple("[[]]", Errc::kBadInput, "layer 0: no experts"),
        std::tuple("[[[[1]]]]", Errc::kBadInput, "4 levels of lists"),
        std::tuple("{\"token\":[[1]]}", Errc::kBadInput, "no token counts: expected one of tokens"),
        std::tuple("{\"tokens\":[[1]],\"tokens\":[[2]]}", Errc::kBadInput,
                   "key \"tokens\" appears twice"),
        std::tuple("{\"iteration\":1,\"tokens\":[[1]]}\n{\"tokens\":[[1]]}", Errc::kBadInput,
                   "iteration 1 occurs twice"),  // the second is iteration 1 by its place alone
        std::tuple("{\"iteration\":3,\"tokens\":[[1]]}\n{\"iteration\":4,\"tok\n", Errc::kBadInput,
                   "x:2: line 1, column"),
        std::tuple("{\"iteration\":3,\"tokens\":[[1]]}\n{\"iteration\":4,\"tok{\"iteration\":4,"
                   "\"tokens\":[[1]]}\n{\"iteration\":5,\"tokens\":[[1]]}\n",
                   Errc::kBadInput, "x:2: line 1, column"),  // no restart follows
        std::tuple("{\"iteration\":3,\"tokens\":[[1]]}\n{\"iteration\":4,\"tokens\":[[1x]]}",
                   Errc::kBadInput, "x:2: line 1, column"),  // whole, and wrong
        std::tuple("iteration,layer,expert,tokens\n1,0,0,1\n1,0,1,1\n1,0,1,1\n", Errc::kBadInput,
                   "x:4: layer 0 expert 1 occurs twice"),
        std::tuple("iteration,layer,expert,tokens\n1,0,0,1\n1,0\n2,0,0,1\n", Errc::kBadInput,
                   "x:3: 4 columns expected, found 2"),
        std::tuple("{\"iteration\":-1,\"tokens\":[[1]]}", Errc::kBadInput, "iteration: a whole"),
        std::tuple("{\"tokens\":[[1]]}\n[1]\n", Errc::kBadInput, "x:2: an object expected"),
        std::tuple("layer,expert,tokens\n3,0,1\n3,2,1\n5,0,1\n", Errc::kBadInput,
                   "no count for layer 3 expert 1"),
        std::tuple("layer,expert,tokens\n3,0,1\n5,0,1\n5,1,1\n", Errc::kBadInput,
                   "x: layer 5 has 2 experts, layer 3 has 1"),
        std::tuple("{\"tokens\":[[1,2],[3]]}\n{\"tokens\":[[1],[3,4]]}", Errc::kBadInput,
                   "x:2: tokens: layer 0 has 1 experts, in the first record 2"),
        std::tuple("{\"logical_count\":[[[0]]]}", Errc::kBadInput, "contains no token counts"),
        std::tuple("{\"record_type\":\"other\"}", Errc::kBadInput, "eplb_load_stats"),
        std::tuple(
            "{\"record_type\":\"eplb_load_stats\",\"expert_load\":[[1]],\"p2l_map\":[[0,1]]}",
            Errc::kBadInput, "layer 0: counts and map of physical experts differ"),
        std::tuple("{\"record_type\":\"eplb_load_stats\",\"expert_load\":[[1]],\"p2l_map\":[[-2]]}",
                   Errc::kBadInput, "map of layer 0"),
        std::tuple("1,2\n3,x\n", Errc::kBadInput, "x:2: layer 1 expert 1: \"x\" is not a count"),
        std::tuple("1,2\n3\n", Errc::kBadInput, "layer 1 has 1 experts"),
        std::tuple("layer,expert\n0,0\n", Errc::kBadInput, "lacks a column: layer"),
        std::tuple("layer,expert,tokens,foo\n", Errc::kBadInput, "column \"foo\" is unknown"),
        std::tuple("layer,layer,expert,tokens\n", Errc::kBadInput, "column \"layer\" occurs twice"),
        std::tuple("layer,expert,tokens\n0,0,1\n0,2,1\n", Errc::kBadInput,
                   "no count for layer 0 expert 1"),
        std::tuple("layer,expert,tokens\n0,0,1\n0,0,1\n", Errc::kBadInput,
                   "x:3: layer 0 expert 0 occurs twice"),
        std::tuple("layer,expert,tokens\n0,0\n", Errc::kBadInput, "x:2: 3 columns expected"),
        std::tuple("layer,expert,tokens\n99999,0,1\n", Errc::kLimit, "at most 4096 layers"),
        std::tuple("layer,expert,tokens\n", Errc::kBadInput, "contains no token counts"),
        std::tuple("layer,expert,tokens\n0,0,nan\n", Errc::kBadInput, "not a number"),
        std::tuple("layer,expert,tokens\n0,0,inf\n", Errc::kBadInput, "more than")));

TEST(IoLoadsTest, ASparseTableNamesLayersThatMayHaveFewerExperts) {
  std::string text = "layer_id,expert_id,count\n";
  for (const auto& [layer, expert] :
       {std::pair(0, 7), std::pair(1, 3), std::pair(2, 2), std::pair(3, 4)}) {
    text += std::to_string(layer) + "," + std::to_string(expert) + ",9\n";
  }
  const TokenTrace trace = Parsed(text);
  EXPECT_EQ(trace.experts, 8U);
  EXPECT_TRUE(trace.layer_experts.empty());
  ASSERT_EQ(trace.notes.size(), 1U);
  EXPECT_EQ(trace.notes[0],
            "x: 28 counts have no row and are set to 0; the highest expert_id implies 8 experts in "
            "every layer; in layers 1-2 no expert_id is above 3: for layers with fewer experts use "
            "the columns layer,expert,tokens, with a row for every count");
  // Half of the experts or more are an accident of few tokens.
  const TokenTrace close = Parsed("layer_id,expert_id,count\n0,7,9\n1,4,9\n");
  ASSERT_EQ(close.notes.size(), 1U);
  EXPECT_TRUE(close.notes[0].ends_with("implies 8 experts")) << close.notes[0];
}

TEST(IoLoadsTest, LayersWithoutRowsInASparseTableAreWithoutTokens) {
  const TokenTrace steps =
      Parsed("step,layer_id,expert_id,count\n1,0,0,5\n1,0,3,4\n1,1,1,2\n2,0,2,5\n");
  ASSERT_EQ(steps.records.size(), 2U);
  EXPECT_EQ(steps.records[0].tokens, (Tokens{5, 0, 0, 4, 0, 2, 0, 0}));
  EXPECT_EQ(steps.records[1].tokens, (Tokens{0, 0, 5, 0, 0, 0, 0, 0}));
  const TokenTrace dense = Parsed("layer_id,expert_id,count\n3,0,5\n3,3,4\n5,1,2\n");
  EXPECT_EQ(dense.layer_id, (std::vector<std::uint32_t>{3, 4, 5}));
  EXPECT_EQ(dense.records[0].tokens, (Tokens{5, 0, 0, 4, 0, 0, 0, 0, 0, 2, 0, 0}));
  ExpectRefused("layer_id,expert_id,count\n0,65535,1\n4095,0,1\n", Errc::kLimit,
                "4096 layers of 65536 experts: more than");
}

TEST(IoLoadsTest, AbsurdSizesAreRefusedBeforeTheyAreMade) {
  ExpectRefused(std::string(100, '['), Errc::kLimit, "levels");
  std::string many = "[[";
  for (std::uint64_t e = 0; e <= limits::kMoeExperts; ++e) many += e == 0 ? "1" : ",1";
  ExpectRefused(many + "]]", Errc::kLimit, "at most 4096 layers of 65536");
}

class LoadLog : public os::Scratch {
 protected:
  /// A line for each iteration, of 8 layers of `experts`, all of which got that many tokens.
  void Write(std::initializer_list<std::pair<std::uint64_t, std::uint64_t>> ranges,
             std::uint32_t experts = 256, std::string_view end = "") const {
    std::ofstream log(path_, std::ios::app);
    for (const auto& [first, last] : ranges) {
      for (std::uint64_t i = first; i <= last; ++i) {
        std::string row;
        for (std::uint32_t e = 0; e < experts; ++e) row += "," + std::to_string(i);
        row[0] = '[';
        std::string rows;
        for (int layer = 0; layer < 8; ++layer) rows += "," + row + "]";
        rows[0] = '[';
        log << R"({"iteration": )" << i << R"(, "tokens": )" << rows << "]}\n";
      }
    }
    log << end;
  }
  std::vector<std::uint64_t> Iterations(std::uint64_t after) const {
    const auto trace = ReadLoads(path_, after);
    EXPECT_TRUE(trace) << trace.error().message;
    std::vector<std::uint64_t> out;
    if (!trace) return out;
    EXPECT_EQ(trace->after, after);
    for (const TokenTrace::Record& record : trace->records) {
      EXPECT_EQ(record.tokens, std::vector<std::uint64_t>(record.tokens.size(), record.iteration));
      out.push_back(record.iteration);
    }
    return out;
  }

  void SetUp() override {
    os::Scratch::SetUp();
    path_ = At("tokens.jsonl");
  }

  std::string path_;
};

TEST_F(LoadLog, ItsEndIsReadAndTheNewestBeforeIt) {
  Write({{1, 600}});
  const std::uint64_t bytes = std::filesystem::file_size(path_);
  for (const std::uint64_t after : {0U, 1U, 2U, 299U, 300U, 598U, 599U, 600U, 1000U}) {
    std::vector<std::uint64_t> wanted(601 - std::clamp<std::uint64_t>(after, 1, 600));
    std::iota(wanted.begin(), wanted.end(), std::clamp<std::uint64_t>(after, 1, 600));
    EXPECT_EQ(Iterations(after), wanted) << after;
  }
  EXPECT_EQ(ReadLoads(path_)->bytes_read, bytes);
  EXPECT_LT(ReadLoads(path_, 595)->bytes_read, std::uint64_t{512} << 10);
}

TEST_F(LoadLog, ALogThatSkipsIterationsIsReadWhole) {
  // The run that logged 300 to 400 is abandoned. The new run logged only up to 299 before a gap.
  Write({{300, 400}, {1, 299}, {401, 500}});
  std::vector<std::uint64_t> wanted(101, 299);
  std::iota(wanted.begin() + 1, wanted.end(), 401);
  EXPECT_EQ(Iterations(300), wanted);
}

TEST_F(LoadLog, ARestartIsFoundFromTheEndToo) {
  Write({{1, 500}});
  const std::uint64_t restarted = std::filesystem::file_size(path_);
  Write({{450, 510}});
  for (const std::uint64_t after : {0U, 100U, 440U, 449U, 450U, 499U, 505U}) {
    std::vector<std::uint64_t> wanted(511 - std::max<std::uint64_t>(after, 1));
    std::iota(wanted.begin(), wanted.end(), std::max<std::uint64_t>(after, 1));
    EXPECT_EQ(Iterations(after), wanted) << after;
  }
  const auto trace = ReadLoads(path_, 445);
  ASSERT_EQ(trace->warnings.size(), 1U);
  EXPECT_LT(trace->bytes_read, std::uint64_t{2} << 20);
  EXPECT_NE(trace->warnings[0].find("line at byte " + std::to_string(restarted) +
                                    ": iteration 450 occurs again"),
            std::string::npos)
      << trace->warnings[0];
}

TEST_F(LoadLog, ATornLastLineIsIgnored) {
  Write({{1, 600}}, 256, R"({"iteration": 601, "tok)");
  const std::uint64_t bytes = std::filesystem::file_size(path_);
  EXPECT_EQ(Iterations(598), (std::vector<std::uint64_t>{598, 599, 600}));
  const auto trace = ReadLoads(path_, 590);
  EXPECT_TRUE(trace->torn);
  EXPECT_NE(trace->warnings.at(0).find("line at byte " + std::to_string(bytes - 23)),
            std::string::npos)
      << trace->warnings[0];
  // In the middle it is damage: the text after it may be anything.
  std::ofstream(path_, std::ios::app) << "\n";
  Write({{601, 601}});
  const auto torn = ReadLoads(path_, 590);
  ASSERT_FALSE(torn);
  EXPECT_EQ(torn.error().code, Errc::kBadInput);
  EXPECT_NE(torn.error().message.find("line at byte " + std::to_string(bytes - 23)),
            std::string::npos)
      << torn.error().message;
}

TEST_F(LoadLog, ItMayGrowAboveWhatIsReadWhole) {
  Write({{1, 520}}, 8192);
  const auto whole = ReadLoads(path_);
  ASSERT_FALSE(whole);
  EXPECT_EQ(whole.error().code, Errc::kLimit);
  EXPECT_EQ(Iterations(518), (std::vector<std::uint64_t>{518, 519, 520}));
}

TEST_F(LoadLog, ALongLogIsReadInParts) {
  // Blank lines make it long.
  const auto pad = [&] {
    std::ofstream log(path_, std::ios::app);
    const std::string blank = std::string((1 << 20) - 1, ' ') + "\n";
    for (std::uint64_t i = 0; i < limits::kJsonBytes >> 20; ++i) log << blank;
  };
  std::ofstream(path_) << "\xEF\xBB\xBF";
  Write({{1, 3}});
  pad();
  Write({{2, 5}}, 256, R"({"iteration": 6, "tok)");
  EXPECT_EQ(Iterations(0), (std::vector<std::uint64_t>{1, 2, 3, 4, 5}));
  auto trace = ReadLoads(path_);
  ASSERT_TRUE(trace);
  EXPECT_EQ(trace->bytes_read, std::filesystem::file_size(path_));
  ASSERT_EQ(trace->warnings.size(), 2U);
  EXPECT_NE(trace->warnings[0].find("tokens.jsonl:260: iteration 2 occurs again"),
            std::string::npos)
      << trace->warnings[0];

  std::ofstream(path_) << "1,2\n";
  pad();
  trace = ReadLoads(path_);
  ASSERT_FALSE(trace);
  EXPECT_EQ(trace.error().code, Errc::kLimit);
  EXPECT_NE(trace.error().message.find("longer files must have one JSON object per line"),
            std::string::npos)
      << trace.error().message;
}

TEST_F(LoadLog, OtherFormatsAreReadWholeAndCut) {
  std::ofstream(path_) << "iteration,layer,expert,tokens\n1,0,0,1\n2,0,0,2\n3,0,0,3\n";
  EXPECT_EQ(Iterations(2), (std::vector<std::uint64_t>{2, 3}));
}

/// Checks the known properties of a trace: every layer of a record has all tokens of its steps.
void ExpectTrace(const std::string& path, std::size_t layers, std::uint32_t experts,
                 std::size_t records, std::uint64_t last, std::uint64_t tokens) {
  const auto trace = ReadLoads(path);
  ASSERT_TRUE(trace) << trace.error().message;
  EXPECT_EQ(trace->layer_id.size(), layers);
  EXPECT_EQ(trace->experts, experts);
  EXPECT_EQ(trace->records.size(), records);
  EXPECT_EQ(trace->records.back().iteration, last);
  for (const auto& record : trace->records) {
    for (std::size_t l = 0; l < layers; ++l) {
      const auto first = record.tokens.begin() + static_cast<std::ptrdiff_t>(l * experts);
      ASSERT_EQ(std::accumulate(first, first + experts, std::uint64_t{0}), tokens);
    }
  }
}

TEST(IoLoadsTest, TheTraceOfARealRunIsRead) {
  const std::string own = std::string(SW_SOURCE_DIR) + "/tests/data/deepspeed/";
  ExpectTrace(own + "routing_12x32/tokens.jsonl", 12, 32, 30, 150, 640);
  // Its file is in the folder of its run's checkpoints.
  ExpectTrace(own + "moe4_ep2_series/tokens.jsonl", 1, 4, 6, 6, 192);
  const char* given = std::getenv("SHARDWRIGHT_SHARED");
  const std::string folder = given != nullptr ? given : std::string(SW_SOURCE_DIR) + "/../shared";
  const std::string path = folder + "/fixtures/routing/gpt_moe_24x32.jsonl";
  if (std::filesystem::exists(path)) ExpectTrace(path, 24, 32, 51, 5001, 262144);
}

}  // namespace
}  // namespace shardwright::token_counts
