// SPDX-License-Identifier: Apache-2.0
#include "support/cli/report.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "support/cli/console.h"

namespace shardwright::cli {
namespace {

namespace fs = std::filesystem;

class ReportFile : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "sw-report-XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string Path(const char* name) const { return (folder_ / name).string(); }
  static std::string Content(const std::string& path) {
    std::ostringstream text;
    text << std::ifstream(path).rdbuf();
    return text.str();
  }
  std::size_t FileCount() const {
    return static_cast<std::size_t>(
        std::distance(fs::directory_iterator(folder_), fs::directory_iterator()));
  }

  fs::path folder_;
};

TEST_F(ReportFile, ReplacesTheOldOneWhole) {
  ASSERT_TRUE(WriteReportFile(Path("r.json"), "old\n"));
  ASSERT_TRUE(WriteReportFile(Path("r.json"), "new\n"));
  EXPECT_EQ(Content(Path("r.json")), "new\n");
  EXPECT_EQ(FileCount(), 1U);
}

TEST_F(ReportFile, NamesTheFolderThatIsMissing) {
  const Status checked = CheckReportFile(Path("no/r.json"));
  ASSERT_FALSE(checked);
  EXPECT_EQ(checked.error().code, Errc::kIo);
  EXPECT_EQ(checked.error().message, "report " + Path("no/r.json") + ": cannot write into " +
                                         Path("no") + ": No such file or directory");
  EXPECT_FALSE(WriteReportFile(Path("no/r.json"), "x"));
  EXPECT_FALSE(CheckReportFile(folder_.string())) << "a folder is no file";
  EXPECT_TRUE(CheckReportFile(Path("r.json")));
}

TEST_F(ReportFile, WritesDevicesInPlace) {
  EXPECT_TRUE(CheckReportFile("/dev/null"));
  EXPECT_TRUE(WriteReportFile("/dev/null", "x"));
  struct stat info {};
  ASSERT_EQ(stat("/dev/null", &info), 0);
  EXPECT_TRUE(S_ISCHR(info.st_mode));
  const Status full = WriteReportFile("/dev/full", "x");
  ASSERT_FALSE(full);
  EXPECT_EQ(full.error().sys, ENOSPC);
}

RankStats Facts(std::uint64_t scale, std::vector<std::string> warnings) {
  RankStats facts;
  facts.passes = {{"read", 1.5 * static_cast<double>(scale)}, {"write", 2}};
  facts.bytes_read = 10 * scale;
  facts.bytes_written = 20 * scale;
  facts.files_read = scale;
  facts.files_written = 2 * scale;
  facts.peak_memory_bytes = 1000 * scale;
  facts.warnings = std::move(warnings);
  facts.warnings_omitted = scale;
  return facts;
}

TEST(Facts, PackAndUnpackAreInverse) {
  const RankStats facts = Facts(3, {"one", "two"});
  const auto back = UnpackStats(PackStats(facts));
  ASSERT_TRUE(back);
  EXPECT_EQ(PackStats(*back), PackStats(facts));
  EXPECT_EQ(back->warnings, facts.warnings);
  EXPECT_EQ(back->peak_memory_bytes, 3000U);
  for (const char* text : {"", "{}", "[]", "{\"passes\":3,\"counts\":[],\"warnings\":[]}"}) {
    EXPECT_EQ(UnpackStats(text).error().code, Errc::kInternal) << text;
  }
}

TEST(Facts, MergeAddsUpAndJoinsEqualWarnings) {
  const std::array ranks = {Facts(1, {"same", "first"}), Facts(4, {"late", "same"})};
  const MergedStats merged = Merge(ranks);
  EXPECT_EQ(merged.total.bytes_read, 50U);
  EXPECT_EQ(merged.total.bytes_written, 100U);
  EXPECT_EQ(merged.total.files_read, 5U);
  EXPECT_EQ(merged.total.files_written, 10U);
  EXPECT_EQ(merged.total.peak_memory_bytes, 4000U);
  EXPECT_EQ(merged.total.warnings_omitted, 5U);
  ASSERT_EQ(merged.total.passes.size(), 2U);
  EXPECT_EQ(merged.total.passes[0].seconds, 6.0);
  ASSERT_EQ(merged.warnings.size(), 3U);
  EXPECT_EQ(merged.warnings[0].message, "same");
  EXPECT_EQ(merged.warnings[0].ranks, (std::vector<int>{0, 1}));
  EXPECT_EQ(merged.warnings[2].message, "late");
  EXPECT_EQ(merged.warnings[2].ranks, (std::vector<int>{1}));
}

TEST(ReportText, TellsTheFailure) {
  Report report;
  report.command = "probe";
  report.argv = {"probe", "na\xffme"};
  report.status = tl::unexpected<Error>(Error{Errc::kIo, "out: full", ENOSPC, 3});
  const nlohmann::json json = nlohmann::json::parse(ReportText(report, nullptr));
  EXPECT_EQ(json["exit_code"], 7);
  EXPECT_EQ(json["status"], "failed");
  EXPECT_EQ(json["error"]["name"], "io");
  EXPECT_EQ(json["error"]["rank"], 3);
  EXPECT_EQ(json["error"]["errno"], ENOSPC);
  EXPECT_EQ(json["argv"][1], "na\xef\xbf\xbdme");
  EXPECT_TRUE(json["threads"].is_null());
  EXPECT_TRUE(json["result"].is_null());
}

}  // namespace
}  // namespace shardwright::cli
