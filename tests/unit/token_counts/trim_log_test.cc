// SPDX-License-Identifier: Apache-2.0
#include "token_counts/trim_log.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>

#include "unit/support/os/scratch.h"

namespace shardwright::token_counts {
namespace {

std::string Line(int iteration) {
  return "{\"iteration\": " + std::to_string(iteration) + ", \"tokens\": [[1, 2]]}\n";
}

class TrimLogTest : public os::Scratch {
 protected:
  void Write(const std::string& text) const {
    std::ofstream(path_, std::ios::trunc | std::ios::binary) << text;
  }
  std::string Text() const {
    std::ifstream file(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  /// The log after it is trimmed to an iteration.
  std::string Trimmed(const std::string& text, std::uint64_t last) const {
    Write(text);
    const Status checked = CheckLog(path_);
    EXPECT_TRUE(checked) << checked.error().message;
    EXPECT_EQ(Text(), text) << "a check changes nothing";
    const Status trimmed = TrimLog(path_, last);
    EXPECT_TRUE(trimmed) << trimmed.error().message;
    return Text();
  }

  void SetUp() override {
    Scratch::SetUp();
    path_ = At("log.jsonl");
  }

  std::string path_;
};

TEST_F(TrimLogTest, CutsOffLaterIterationsAndATruncatedLine) {
  const std::string log = Line(1) + Line(2) + Line(3);
  EXPECT_EQ(Trimmed(log, 3), log);
  EXPECT_EQ(Trimmed(log, 2), Line(1) + Line(2));
  EXPECT_EQ(Trimmed(log, 0), "");
  EXPECT_EQ(Trimmed(log + "{\"iteration\": 4, \"tok", 9), log);
  EXPECT_EQ(Trimmed(log + "\n" + log, 2), log + "\n" + Line(1) + Line(2))
      << "again after a restart";
  EXPECT_EQ(Trimmed(Line(1) + "{\"iteration\": 2}", 2), Line(1) + "{\"iteration\": 2}\n")
      << "a line that lacks its end only";
  EXPECT_EQ(Trimmed(Line(1) + "{\"iteration\": 2}", 1), Line(1));
  EXPECT_EQ(Trimmed("", 5), "");
}

TEST_F(TrimLogTest, ReadsLinesLongerThanABlock) {
  const std::string line = "{\"iteration\": 2, \"tokens\": [" + std::string(3 << 20, ' ') + "]}\n";
  EXPECT_EQ(Trimmed(Line(1) + line + line + Line(3), 2), Line(1) + line + line);
}

TEST_F(TrimLogTest, NamesALineThatIsNoRecord) {
  for (const char* bad : {"{\"iteration\": 3, \"tok{\"iteration\": 3}", "{\"tokens\": []}", "7",
                          "{\"iteration\": -1}", "{\"iteration\": \"3\"}"}) {
    const std::string log = Line(1) + Line(2) + bad + "\n" + Line(4);
    Write(log);
    for (const Status& failed : {CheckLog(path_), TrimLog(path_, 1)}) {
      ASSERT_FALSE(failed);
      EXPECT_EQ(failed.error().code, Errc::kBadInput);
      EXPECT_NE(failed.error().message.find("log.jsonl: line 3: not a JSON object"),
                std::string::npos)
          << failed.error().message;
    }
    EXPECT_EQ(Text(), log);
  }
}

TEST_F(TrimLogTest, AMissingLogIsEmptyAndADanglingLinkIsNot) {
  EXPECT_TRUE(CheckLog(path_));
  EXPECT_TRUE(TrimLog(path_, 3));
  EXPECT_FALSE(std::filesystem::exists(path_));
  std::filesystem::create_symlink("nowhere", path_);
  EXPECT_EQ(CheckLog(path_).error().code, Errc::kNotFound);
  EXPECT_EQ(TrimLog(path_, 3).error().code, Errc::kNotFound);
}

}  // namespace
}  // namespace shardwright::token_counts
