// SPDX-License-Identifier: Apache-2.0
// Tests of logs of token counts: restarted runs, incomplete lines, and keys of other programs.

#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "token_counts/trace.h"
#include "unit/token_counts/traces.h"

namespace shardwright::token_counts {
namespace {

std::string Line(std::uint64_t iteration, std::uint64_t tokens) {
  return "{\"iteration\":" + std::to_string(iteration) + ",\"tokens\":[[" + std::to_string(tokens) +
         "]]}\n";
}

TEST(IoLoadsTest, ALogThatRepeatsIterationsCountsTheLaterLines) {
  std::string text;
  for (std::uint64_t i = 1; i <= 7; ++i) text += Line(i, i);
  const std::string first_run = text;
  for (std::uint64_t i = 6; i <= 9; ++i) text += Line(i, 100 + i);
  const TokenTrace trace = Parsed(text);
  EXPECT_EQ(
      CountsIn(trace),
      (Pairs{{1, 1}, {2, 2}, {3, 3}, {4, 4}, {5, 5}, {6, 106}, {7, 107}, {8, 108}, {9, 109}}));
  EXPECT_FALSE(trace.torn);
  ASSERT_EQ(trace.warnings.size(), 1U);
  EXPECT_EQ(trace.warnings[0],
            "x:8: iteration 6 occurs again, as after a restart of training: earlier lines of "
            "iterations from 6 on are ignored");
  // Iterations after the restart point are discarded, also where the training has not come so
  // far again.
  const TokenTrace behind = Parsed(first_run + Line(4, 104) + Line(5, 105));
  EXPECT_EQ(CountsIn(behind), (Pairs{{1, 1}, {2, 2}, {3, 3}, {4, 104}, {5, 105}}));
  // Restarts of restarts, and of the last iteration alone.
  const TokenTrace thrice =
      Parsed(first_run + Line(7, 107) + Line(8, 108) + Line(3, 203) + Line(4, 204) + Line(3, 303));
  EXPECT_EQ(CountsIn(thrice), (Pairs{{1, 1}, {2, 2}, {3, 303}}));
  EXPECT_EQ(thrice.warnings.size(), 3U);
}

TEST(IoLoadsTest, AnIterationAfterALargerOneIsARestart) {
  const TokenTrace trace = Parsed(Line(10, 1) + Line(20, 2) + Line(30, 99) + Line(25, 3));
  EXPECT_EQ(CountsIn(trace), (Pairs{{10, 1}, {20, 2}, {25, 3}}));
  ASSERT_EQ(trace.warnings.size(), 1U);
  EXPECT_EQ(trace.warnings[0],
            "x:4: iteration 25 follows iteration 30, as after a restart of training: earlier lines "
            "of iterations from 25 on are ignored");
  const TokenTrace twice = Parsed(Line(10, 1) + Line(20, 2) + Line(30, 3) + Line(5, 4) +
                                  Line(15, 5) + Line(25, 6) + Line(7, 7) + Line(17, 8));
  EXPECT_EQ(CountsIn(twice), (Pairs{{5, 4}, {7, 7}, {17, 8}}));
  EXPECT_EQ(twice.warnings.size(), 2U);
  // The new run comes to an iteration of the abandoned one.
  const TokenTrace again =
      Parsed(Line(10, 1) + Line(20, 2) + Line(30, 3) + Line(40, 4) + Line(25, 5) + Line(30, 6));
  EXPECT_EQ(CountsIn(again), (Pairs{{10, 1}, {20, 2}, {25, 5}, {30, 6}}));
  const TokenTrace short_log = Parsed(Line(30, 3) + Line(20, 2));
  EXPECT_EQ(CountsIn(short_log), (Pairs{{20, 2}}));
  EXPECT_EQ(short_log.warnings.size(), 1U);
  // A log in descending order is sorted.
  const TokenTrace sorted = Parsed(Line(30, 3) + Line(20, 2) + Line(10, 1));
  EXPECT_EQ(CountsIn(sorted), (Pairs{{10, 1}, {20, 2}, {30, 3}}));
  EXPECT_TRUE(sorted.warnings.empty());
}

/// Rows of one layer with one expert, with an iteration and its count.
std::string RowsOf(const Pairs& counts) {
  std::string text = "iteration,layer,expert,tokens\n";
  for (const auto& [iteration, tokens] : counts) {
    text += std::to_string(iteration) + ",0,0," + std::to_string(tokens) + "\n";
  }
  return text;
}

TEST(IoLoadsTest, RowsOfAnIterationAfterALargerOneAreARestart) {
  const TokenTrace trace = Parsed(RowsOf({{10, 1}, {20, 2}, {30, 99}, {25, 3}, {26, 4}}));
  EXPECT_EQ(CountsIn(trace), (Pairs{{10, 1}, {20, 2}, {25, 3}, {26, 4}}));
  ASSERT_EQ(trace.warnings.size(), 1U);
  EXPECT_NE(trace.warnings[0].find("x:5: iteration 25 follows iteration 30"), std::string::npos);
  EXPECT_EQ(CountsIn(Parsed(RowsOf({{10, 1}, {20, 2}, {30, 3}, {40, 4}, {25, 5}, {30, 6}}))),
            (Pairs{{10, 1}, {20, 2}, {25, 5}, {30, 6}}));
  EXPECT_EQ(CountsIn(Parsed(RowsOf({{30, 3}, {20, 2}, {10, 1}}))),
            (Pairs{{10, 1}, {20, 2}, {30, 3}}));
  // A table that is sorted by layer or expert has no restarts.
  for (const Pairs& iterations : {Pairs{{1, 1}, {2, 2}, {3, 3}}, Pairs{{3, 3}, {2, 2}, {1, 1}},
                                  Pairs{{2, 2}, {1, 1}}, Pairs{{2, 2}, {3, 3}, {1, 1}}}) {
    for (const char* heading : {"layer,expert", "expert,layer"}) {
      std::string text = std::string(heading) + ",iteration,tokens\n";
      for (const char* row : {"0,0,", "0,1,", "1,0,", "1,1,"}) {
        for (const auto& [iteration, tokens] : iterations) {
          text += row + std::to_string(iteration) + "," + std::to_string(tokens) + "\n";
        }
      }
      const TokenTrace table = Parsed(text);
      EXPECT_EQ(table.records.size(), iterations.size()) << text;
      EXPECT_TRUE(table.warnings.empty()) << text;
    }
  }
}

TEST(IoLoadsTest, RestartsInALogOfVllm) {
  const auto line = [](int step, int tokens) {
    return "{\"record_type\":\"eplb_load_stats\",\"step\":" + std::to_string(step) +
           ",\"expert_load\":[[" + std::to_string(tokens) + ",0]],\"p2l_map\":[[0,1]]}\n";
  };
  const TokenTrace trace = Parsed(line(10, 1) + line(20, 2) + line(20, 3) + line(30, 4));
  // A server that starts again counts from the beginning: its steps follow those before.
  EXPECT_EQ(CountsIn(trace), (Pairs{{10, 1}, {20, 2}, {21, 3}, {31, 4}}));
  ASSERT_EQ(trace.warnings.size(), 1U);
  EXPECT_NE(trace.warnings[0].find("x:3: step 20 after step 20"), std::string::npos);
  const TokenTrace twice = Parsed(line(1, 1) + line(2, 2) + line(1, 3) + line(2, 4) + line(1, 5));
  EXPECT_EQ(CountsIn(twice), (Pairs{{1, 1}, {2, 2}, {3, 3}, {4, 4}, {5, 5}}));
}

TEST(IoLoadsTest, ALogThatIsCutShortIsReadUpToThere) {
  const std::string whole = Line(1, 1) + Line(2, 2) + Line(3, 3);
  const std::size_t last = Line(1, 1).size() * 2;
  for (std::size_t end = last; end < whole.size(); ++end) {
    const TokenTrace trace = Parsed(whole.substr(0, end));
    const bool torn = end > last && end < whole.size() - 1;  // the line break alone may be missing
    EXPECT_EQ(trace.torn, torn) << end;
    ASSERT_EQ(trace.warnings.size(), torn ? 1U : 0U) << end;
    if (torn) {
      EXPECT_EQ(trace.warnings[0], "x:3: the last line is truncated and is ignored");
    }
    EXPECT_EQ(trace.records.size(), end == whole.size() - 1 ? 3U : 2U) << end;
  }
}

TEST(IoLoadsTest, RestartsAndATornLineInRowsOfCounts) {
  std::string text = "iteration,rank,layer,expert,tokens\n";
  const auto add = [&](int iteration, int tokens) {
    for (const char* rank : {"0", "1"}) {
      for (const char* expert : {"0", "1"}) {
        text += std::to_string(iteration) + "," + rank + ",0," + expert + "," +
                std::to_string(tokens) + "\n";
      }
    }
  };
  for (int i = 1; i <= 4; ++i) add(i, i);
  const std::string first_run = text;
  add(3, 30);
  EXPECT_EQ(CountsIn(Parsed(text)), (Pairs{{1, 2}, {2, 4}, {3, 60}}));
  ASSERT_EQ(Parsed(text).warnings.size(), 1U);
  EXPECT_NE(Parsed(text).warnings[0].find("x:18: iteration 3 occurs again"), std::string::npos);
  // An incomplete iteration does not count.
  for (const char* torn : {"5", "5,0,0", "5,0,0,0,1\n5,0,0,1,1\n5,1,", "5,0,0,0,x"}) {
    const TokenTrace trace = Parsed(first_run + torn);
    EXPECT_EQ(CountsIn(trace), (Pairs{{1, 2}, {2, 4}, {3, 6}, {4, 8}})) << torn;
    EXPECT_TRUE(trace.torn) << torn;
    EXPECT_EQ(trace.warnings.size(), 1U) << torn;
  }
}

TEST(IoLoadsTest, ATruncatedLineBeforeARestartIsIgnored) {
  const std::string run = Line(1, 1) + Line(2, 2);
  const std::string torn = "{\"iteration\":3,\"tok";
  const std::string zeros(9, '\0');
  // The new run may begin on the same line, or repeat it.
  for (const std::string& end : {torn, torn + "\n", torn + zeros, zeros, zeros + "\n"}) {
    const TokenTrace trace = Parsed(run + end + Line(2, 20) + Line(3, 30));
    EXPECT_EQ(CountsIn(trace), (Pairs{{1, 1}, {2, 20}, {3, 30}})) << end;
    EXPECT_FALSE(trace.torn);
    ASSERT_EQ(trace.warnings.size(), 2U) << end;
    EXPECT_EQ(trace.warnings[0], "x:3: the line is truncated, as before a restart, and is ignored");
    EXPECT_NE(trace.warnings[1].find("iteration 2 occurs again"), std::string::npos);
    ExpectRefused(run + end + Line(3, 30) + Line(4, 40), Errc::kBadInput, "x:3: line 1, column");
  }
  ExpectRefused(run + torn + "\n" + torn + "\n" + Line(2, 20), Errc::kBadInput, "x:3: line 1");
  ExpectRefused(run + torn + "\n", Errc::kBadInput, "x:3: line 1, column");
  const auto step = [](int number) {
    return "{\"record_type\":\"eplb_load_stats\",\"step\":" + std::to_string(number) +
           ",\"expert_load\":[[1]],\"p2l_map\":[[0]]}\n";
  };
  EXPECT_EQ(Parsed(step(0) + step(1) + step(2).substr(0, 30) + step(0) + step(1)).records.size(),
            4U);
}

TEST(IoLoadsTest, ZeroBytesAtTheEndAreATruncatedLine) {
  const std::string zeros(50, '\0');
  for (const std::string& text : {Line(1, 1) + zeros, Line(1, 1) + "{\"iteration\":2" + zeros,
                                  RowsOf({{1, 1}}) + zeros, RowsOf({{1, 1}}) + "2,0,0,1" + zeros}) {
    const TokenTrace trace = Parsed(text);
    EXPECT_EQ(CountsIn(trace), (Pairs{{1, 1}})) << text;
    EXPECT_TRUE(trace.torn) << text;
    EXPECT_EQ(trace.warnings.size(), 1U) << text;
  }
  EXPECT_EQ(CountsIn(Parsed(Line(1, 1) + "{\"iteration\":2,\"tokens\":[[2]]}" + zeros)),
            (Pairs{{1, 1}, {2, 2}}));
}

TEST(IoLoadsTest, AnIncompleteLastIterationOfATableIsIgnored) {
  const std::string first =
      "iteration,layer,expert,tokens\n1,0,0,1000\n1,0,1,1000\n1,1,0,5\n1,1,1,6\n";
  for (const char* rows : {"2,0,0,1000\n", "2,0,0,1000\n2,0,1,7\n", "2,0,0,1000\n2,0,1,7"}) {
    const TokenTrace trace = Parsed(first + rows);
    ASSERT_EQ(trace.records.size(), 1U) << rows;
    EXPECT_TRUE(trace.torn);
    ASSERT_EQ(trace.warnings.size(), 1U) << rows;
    EXPECT_NE(trace.warnings[0].find("of 4: it is truncated and is ignored"), std::string::npos)
        << trace.warnings[0];
  }
  // Rows that are missing elsewhere are errors.
  ExpectRefused(first + "2,0,1,7\n", Errc::kBadInput, "no count for layer 0 expert 0");
  // A new run of the incomplete iteration has all its rows.
  const TokenTrace again = Parsed(first + "2,0,0,1\n2,0,0,2\n2,0,1,2\n2,1,0,2\n2,1,1,2\n");
  ASSERT_EQ(again.records.size(), 2U);
  EXPECT_EQ(again.records[1].tokens, std::vector<std::uint64_t>(4, 2));
  EXPECT_EQ(again.warnings.size(), 1U);
}

TEST(IoLoadsTest, TheLastNumberOfATableMayBeTruncated) {
  const TokenTrace trace = Parsed("iteration,layer,expert,tokens\n1,0,0,9\n2,0,0,3");
  EXPECT_EQ(CountsIn(trace), (Pairs{{1, 9}, {2, 3}}));
  ASSERT_EQ(trace.warnings.size(), 1U);
  EXPECT_EQ(trace.warnings[0], "x:3: the last line has no line break and may be truncated");
  EXPECT_TRUE(Parsed("layer,expert,tokens\n0,0,9\n0,1,3").warnings.empty());
  EXPECT_TRUE(Parsed("1,2\n3,4").warnings.empty());
  const TokenTrace sparse = Parsed(
      "step,layer_id,expert_id,count\n1,0,0,9\n1,0,1,9\n1,1,0,5\n1,1,1,6\n2,0,0,9\n2,1,0,7\n");
  EXPECT_EQ(sparse.records.size(), 2U);
  ASSERT_EQ(sparse.warnings.size(), 1U);
  EXPECT_EQ(sparse.warnings[0],
            "x: iteration 2, the last one, has 2 rows of 4: it may be truncated");
}

TEST(IoLoadsTest, LinesWithTheKeysOfOthersAreRecords) {
  for (const char* key : {"tokens", "loads", "expert_load", "expert_load_view", "tokens_per_expert",
                          "token_counts", "expert_counts", "logical_count"}) {
    const std::string counts = std::string("\"") + key + "\":[[";
    for (const char* number : {"\"iteration\":", "\"step\":"}) {
      std::string text;
      for (const char* i : {"10", "20", "30", "40"}) {
        text.append("{").append(number).append(i).append(",").append(counts).append(i).append(
            "]]}\n");
      }
      const TokenTrace trace = Parsed(text);
      EXPECT_EQ(CountsIn(trace), (Pairs{{10, 10}, {20, 20}, {30, 30}, {40, 40}})) << text;
      EXPECT_TRUE(trace.warnings.empty()) << text;
      EXPECT_EQ(CountsIn(Parsed(text.substr(0, text.find('\n')))), (Pairs{{10, 10}})) << text;
    }
    std::string lines;
    for (const char* count : {"7", "8", "9"})
      lines.append("{").append(counts).append(count).append("]]}\n");
    EXPECT_EQ(CountsIn(Parsed(lines)), (Pairs{{0, 7}, {1, 8}, {2, 9}})) << lines;
  }
  // The steps of several lines of SGLang follow each other. A step without tokens was not recorded.
  EXPECT_EQ(CountsIn(Parsed(
                "{\"logical_count\":[[[1]],[[0]],[[3]]]}\n{\"logical_count\":[[[4]],[[5]]]}\n")),
            (Pairs{{0, 1}, {2, 3}, {3, 4}, {4, 5}}));
  // A plan has the iteration that it was made for.
  EXPECT_EQ(CountsIn(Parsed("{\"iteration\":7,\n\"layers\":[{\"layer\":0,\"loads\":[5]}]}")),
            (Pairs{{7, 5}}));
}

}  // namespace
}  // namespace shardwright::token_counts
