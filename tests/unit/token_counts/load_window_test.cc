// SPDX-License-Identifier: Apache-2.0
#include "token_counts/window.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "support/base/limits.h"
#include "unit/support/os/scratch.h"

namespace shardwright::token_counts {
namespace {

using Counts = std::vector<std::uint64_t>;

TokenTrace Read(const std::string& text, const std::string& name = "x") {
  auto trace = ParseLoads(text, name);
  EXPECT_TRUE(trace) << trace.error().message;
  return trace ? *trace : TokenTrace();
}

TokenTrace ThreeRecords() {
  return Read(
      "{\"iteration\":1,\"tokens\":[[1,10],[100,0]]}\n"
      "{\"iteration\":2,\"tokens\":[[2,20],[0,0]]}\n"
      "{\"iteration\":4,\"tokens\":[[4,40],[50,0]]}\n");
}

/// Tokens of one cell, for any scaling.
double TokensOf(const TokenCounts& loads, std::size_t cell) {
  return static_cast<double>(loads.tokens[cell]) * loads.unit;
}

TEST(LoadWindowTest, WindowsAreSumsOfRecords) {
  const TokenTrace trace = ThreeRecords();
  LoadWindow window;
  EXPECT_EQ(Pick(trace, window)->tokens, (Counts{4, 40, 50, 0}));
  window.windows = {2};
  EXPECT_EQ(Pick(trace, window)->tokens, (Counts{6, 60, 50, 0}));
  window.windows = {kAllRecords};
  const auto all = Pick(trace, window);
  EXPECT_EQ(all->tokens, (Counts{7, 70, 150, 0}));
  EXPECT_EQ(all->iteration, 4U);
  EXPECT_EQ(all->records, 3U);
  EXPECT_EQ(all->iterations, 3);
  EXPECT_EQ(all->unit, 1);
  window.at = 3;
  window.windows = {1};
  window.layers = {1};
  const auto one = Pick(trace, window);
  EXPECT_EQ(one->tokens, (Counts{0, 0}));
  EXPECT_EQ(one->iteration, 2U);
  EXPECT_EQ(one->layer_id, (std::vector<std::uint32_t>{1}));
}

TEST(LoadWindowTest, RecordingsOfServingEnginesCountAsAWhole) {
  TokenTrace trace = ThreeRecords();
  trace.serving = true;
  EXPECT_EQ(Pick(trace, LoadWindow{})->tokens, (Counts{7, 70, 150, 0}));
  LoadWindow newest;
  newest.windows = {1};
  EXPECT_EQ(Pick(trace, newest)->tokens, (Counts{4, 40, 50, 0}));
}

TEST(LoadWindowTest, HalfLivesFadeOldRecords) {
  LoadWindow window;
  window.windows = {kAllRecords};
  window.half_life = 1;
  const auto loads = Pick(ThreeRecords(), window);
  ASSERT_TRUE(loads);
  EXPECT_EQ(TokensOf(*loads, 0), 4 + 2 / 2.0 + 1 / 4.0);
  EXPECT_EQ(TokensOf(*loads, 2), 50 + 100 / 4.0);
  EXPECT_EQ(loads->iterations, 1.75);
  window.half_life = 3;
  const auto slow = Pick(ThreeRecords(), window);
  const double wanted = 4 + 2 * std::exp2(-1 / 3.0) + std::exp2(-2 / 3.0);
  EXPECT_NEAR(TokensOf(*slow, 0), wanted, 1e-12 * wanted);
}

TEST(LoadWindowTest, RecordingsAreJoinedByTheirWeights) {
  std::vector<Recording> recordings(2);
  recordings[0].trace = ThreeRecords();
  recordings[1].trace = Read("{\"tokens\":[[100,1],[0,3]]}\n");
  recordings[1].weight = 2;
  const auto whole = Pick(recordings, LoadWindow{});
  EXPECT_EQ(whole->tokens, (Counts{204, 42, 50, 6}));
  EXPECT_EQ(whole->unit, 1);
  recordings[1].weight = 0.3;
  EXPECT_NEAR(TokensOf(*Pick(recordings, LoadWindow{}), 0), 34, 1e-12);
  recordings[1].trace = Read("[[1,2,3],[4,5,6]]");
  const auto refused = Pick(recordings, LoadWindow{});
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Errc::kBadInput);
  EXPECT_NE(refused.error().message.find("2 layers of 2 experts"), std::string::npos);
  EXPECT_NE(refused.error().message.find("2 layers of 3 experts"), std::string::npos);
}

TEST(LoadWindowTest, EachRecordingHasItsOwnDefaultWindow) {
  std::vector<Recording> recordings(2);
  recordings[0].trace = ThreeRecords();
  recordings[1].trace = ThreeRecords();
  recordings[1].trace.serving = true;
  const auto log_first = Pick(recordings, LoadWindow{});
  ASSERT_TRUE(log_first);
  EXPECT_EQ(log_first->tokens, (Counts{11, 110, 200, 0}));
  EXPECT_EQ(log_first->records, 4U);
  std::swap(recordings[0], recordings[1]);
  EXPECT_EQ(Pick(recordings, LoadWindow{})->tokens, (Counts{11, 110, 200, 0}));
  LoadWindow newest;
  newest.windows = {1};
  EXPECT_EQ(Pick(recordings, newest)->tokens, (Counts{8, 80, 100, 0}));
}

TEST(LoadWindowTest, ErrorsNameTheRecording) {
  std::vector<Recording> recordings(2);
  recordings[0].trace = ThreeRecords();
  const auto message = [&](const std::string& other, const LoadWindow& window) {
    recordings[1].trace = Read(other, "other");
    const auto refused = Pick(recordings, window);
    EXPECT_FALSE(refused);
    return refused ? std::string() : refused.error().message;
  };
  const std::string one = "{\"iteration\":3,\"tokens\":[[1,2],[3,4]]}\n";
  LoadWindow window;
  window.windows = {3};
  EXPECT_EQ(message(one, window),
            "other: window of 3 iterations, but there are 1 up to iteration 3");
  window.windows = {1};
  window.at = 2;
  EXPECT_EQ(message(one, window), "other: iteration 2: the token counts start at iteration 3");
  const std::string layers =
      "{\"layers\":[{\"layer\":0,\"loads\":[1,2]},{\"layer\":2,\"loads\":[3,4]}]}";
  EXPECT_EQ(message(layers, {}),
            "the recordings differ: x has 2 layers of 2 experts, other has 2 layers of 2 experts: "
            "layer 1 is only in x");
  EXPECT_EQ(message("[[1,2]]", {}),
            "the recordings differ: x has 2 layers of 2 experts, other has 1 layer of 2 experts: "
            "layer 1 is only in x");
  EXPECT_EQ(message("[[1,2,3],[4,5,6]]", {}),
            "the recordings differ: x has 2 layers of 2 experts, other has 2 layers of 3 experts: "
            "layer 0 has 2 experts in x and 3 in other");
  LoadWindow absent;
  absent.layers = {5};
  EXPECT_EQ(Pick(recordings[0].trace, absent).error().message,
            "x: layer 5: the token counts have 2 layers, 0 to 1");
}

TEST(LoadWindowTest, SeveralWindowsAreKeptApart) {
  LoadWindow window;
  window.windows = {1, kAllRecords};
  const auto loads = Pick(ThreeRecords(), window);
  ASSERT_EQ(loads->window_count(), 2U);
  EXPECT_EQ(loads->windows[0], (Counts{4, 40, 50, 0}));
  EXPECT_EQ(loads->windows[1], (Counts{7, 70, 150, 0}));
  // All windows agree about the shares here, so their mean does too.
  EXPECT_NEAR(TokensOf(*loads, 0) / TokensOf(*loads, 1), 0.1, 1e-12);
  EXPECT_TRUE(Validate(*loads));
}

TEST(LoadWindowTest, SumsOfHugeCountsAreScaled) {
  const std::string most = std::to_string(limits::kMoeTokens);
  std::string text;
  for (int i = 0; i < 3000; ++i) text += "{\"tokens\":[[" + most + ",0]]}\n";
  LoadWindow window;
  window.windows = {3000};
  const auto loads = Pick(Read(text), window);
  ASSERT_TRUE(loads);
  EXPECT_TRUE(Validate(*loads));
  EXPECT_DOUBLE_EQ(TokensOf(*loads, 0), 3000 * static_cast<double>(limits::kMoeTokens));
}

TEST(LoadWindowTest, IdleRecordsAreRemoved) {
  TokenTrace trace = Read("[[[1,2]],[[0,0]],[[3,4]],[[0,0]]]");
  EXPECT_EQ(RemoveIdle(&trace), (Counts{1, 3}));
  EXPECT_EQ(Pick(trace, LoadWindow{})->tokens, (Counts{3, 4}));
  TokenTrace idle = Read("[[[0,0]],[[0,0]]]");
  EXPECT_TRUE(RemoveIdle(&idle).empty());
  EXPECT_EQ(idle.records.size(), 2U);
}

/// 40 steps of 4096 layers of 256 experts, in which each expert of step s gets s + 1 tokens, as
/// NumPy writes them: more counts than are kept.
std::string WriteLongRecording(const std::filesystem::path& path) {
  std::string header = "{'descr': '|u1', 'fortran_order': False, 'shape': (40, 4096, 256), }";
  header.resize(117, ' ');
  header += '\n';
  std::ofstream file(path, std::ios::binary);
  file << "\x93NUMPY" << '\1' << '\0' << static_cast<char>(header.size()) << '\0' << header;
  for (int step = 0; step < 40; ++step) {
    file << std::string(std::size_t{4096} * 256, static_cast<char>(step + 1));
  }
  return path.string();
}

class LongLoads : public os::Scratch {};

TEST_F(LongLoads, AreSummedWhileTheyAreRead) {
  const auto trace = ReadLoads(WriteLongRecording(At("long.npy")));
  ASSERT_TRUE(trace) << trace.error().message;
  EXPECT_GT(trace->first_sums, 1U);
  const auto all = Pick(*trace, LoadWindow{});
  EXPECT_EQ(all->records, 40U);
  EXPECT_EQ(all->iterations, 40);
  EXPECT_EQ(all->tokens.front(), 820U);
  EXPECT_EQ(all->tokens.back(), 820U);
  LoadWindow window;
  window.windows = {2};
  EXPECT_EQ(Pick(*trace, window)->tokens.front(), 79U);
  window.windows = {39};
  EXPECT_EQ(Pick(*trace, window).error().code, Errc::kLimit);
  window.windows = {kAllRecords};
  window.half_life = 3;
  const auto refused = Pick(*trace, window);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Errc::kLimit);
  EXPECT_NE(refused.error().message.find("use --window all without --half-life"),
            std::string::npos);
  // The sum contains iteration 0, so it is not missing.
  LoadWindow early;
  early.at = 0;
  const auto summed = Pick(*trace, early);
  ASSERT_FALSE(summed);
  EXPECT_EQ(summed.error().code, Errc::kLimit);
  EXPECT_NE(summed.error().message.find("were added up while reading"), std::string::npos)
      << summed.error().message;
}

TEST(LoadWindowTest, WindowsThatDoNotFitAreRefused) {
  const TokenTrace trace = Read("{\"iteration\":5,\"tokens\":[[1]]}\n");
  LoadWindow window;
  window.at = 4;
  EXPECT_EQ(Pick(trace, window).error().code, Errc::kUsage);
  window.at.reset();
  window.windows = {2};
  EXPECT_NE(Pick(trace, window).error().message.find("there are 1"), std::string::npos);
  window.windows = {1};
  window.layers = {3};
  EXPECT_NE(Pick(trace, window).error().message.find("layer 3"), std::string::npos);
}

class UnevenLoads : public os::Scratch {};

TEST_F(UnevenLoads, ChosenLayersAreAdded) {
  std::ofstream(At("mixed.jsonl")) << "{\"iteration\":1,\"tokens\":[[1,2,3],[4,5],[6,7,8]]}\n"
                                      "{\"iteration\":2,\"tokens\":[[1,1,1],[1,1],[0,0,1]]}\n";
  const auto refused = ReadLoads(At("mixed.jsonl"));
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().message.find("layer 1 has 2 experts, layer 0 has 3"), std::string::npos)
      << refused.error().message;
  const auto trace = ReadUnevenLoads(At("mixed.jsonl"));
  ASSERT_TRUE(trace) << trace.error().message;
  EXPECT_EQ(trace->layer_experts, (std::vector<std::uint32_t>{3, 2, 3}));
  EXPECT_EQ(trace->records[0].tokens, (Counts{1, 2, 3, 4, 5, 0, 6, 7, 8}));
  LoadWindow window;
  window.windows = {kAllRecords};
  const auto all = Pick(*trace, window);
  ASSERT_TRUE(all);
  EXPECT_EQ(all->experts, 3U);
  EXPECT_EQ(all->layer_experts, (std::vector<std::uint32_t>{3, 2, 3}));
  EXPECT_EQ(all->tokens, (Counts{2, 3, 4, 5, 6, 0, 6, 7, 9}));
  EXPECT_EQ(all->layer(1).size(), 2U);
  window.layers = {1};
  const auto small = Pick(*trace, window);
  ASSERT_TRUE(small);
  EXPECT_EQ(small->experts, 2U);
  EXPECT_TRUE(small->layer_experts.empty());
  EXPECT_EQ(small->tokens, (Counts{5, 6}));
  window.layers = {0, 2};
  window.windows = {1, kAllRecords};
  const auto large = Pick(*trace, window);
  ASSERT_TRUE(large);
  EXPECT_EQ(large->experts, 3U);
  EXPECT_EQ(large->windows[0], (Counts{1, 1, 1, 0, 0, 1}));
  EXPECT_EQ(large->windows[1], (Counts{2, 3, 4, 6, 7, 9}));
}

TEST(LoadWindowTest, ListsAreRead) {
  EXPECT_EQ(*ParseLayers("3"), (std::vector<std::uint32_t>{3}));
  EXPECT_EQ(*ParseLayers("5,0-2,1"), (std::vector<std::uint32_t>{0, 1, 2, 5}));
  for (const char* text : {"", ",", "1,", "-", "1-", "-1", "a", "3-1", "1-99999999", "0x1", " 1"}) {
    const auto layers = ParseLayers(text);
    ASSERT_FALSE(layers) << text;
    EXPECT_EQ(layers.error().code, Errc::kUsage);
  }
  EXPECT_EQ(*ParseWindows("1,10,all"), (Counts{1, 10, kAllRecords}));
  for (const char* text : {"", ",", "1,", "0", "-1", "1.5", "ALL", "1 2"}) {
    EXPECT_FALSE(ParseWindows(text)) << text;
  }
  EXPECT_EQ(Ranges(Counts{0, 1, 2, 7}), "0-2, 7");
  EXPECT_EQ(Ranges(Counts{1, 3, 5, 7, 9, 11, 13, 14}), "1, 3, 5, 7, 9, 11 and 2 more");
}

}  // namespace
}  // namespace shardwright::token_counts
