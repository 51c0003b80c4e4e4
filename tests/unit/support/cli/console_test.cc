// SPDX-License-Identifier: Apache-2.0
#include "support/cli/console.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace shardwright::cli {
namespace {

namespace fs = std::filesystem;

std::string Stderr(int verbosity, bool color, void (*act)(Console&)) {
  ::testing::internal::CaptureStderr();
  {
    Console console({"cmd", verbosity, color, 0});
    act(console);
  }
  return ::testing::internal::GetCapturedStderr();
}

void SayAll(Console& console) {
  console.Error("broken");
  console.Warning("odd");
  console.Note("plain", 0);
  console.Note("more", 1);
  console.Note("most", 2);
}

TEST(Console, VerbosityChoosesWhatIsSaid) {
  EXPECT_EQ(Stderr(-1, false, SayAll), "cmd: error: broken\n");
  EXPECT_EQ(Stderr(0, false, SayAll), "cmd: error: broken\ncmd: warning: odd\ncmd: plain\n");
  EXPECT_EQ(Stderr(2, false, SayAll),
            "cmd: error: broken\ncmd: warning: odd\ncmd: plain\ncmd: more\ncmd: most\n");
}

TEST(Console, ColorsOnlyTheTag) {
  EXPECT_EQ(Stderr(-1, true, SayAll), "cmd: \x1b[1;31merror:\x1b[0m broken\n");
}

TEST(Console, NoTextPassesForAnotherMessage) {
  EXPECT_EQ(
      Stderr(0, false, [](Console& console) { console.Note("a\x1b[2J\ncmd: error: fake\n", 0); }),
      "cmd: a\\x1b[2J\n  cmd: error: fake\n");
}

TEST(Console, AMessageTakesThePlaceOfThePaintedLine) {
  EXPECT_EQ(Stderr(0, false,
                   [](Console& console) {
                     console.Paint("50%");
                     console.Note("note", 0);
                     console.Paint("60%");
                   }),
            "\rcmd: 50%\x1b[K\r\x1b[Kcmd: note\n\rcmd: 60%\x1b[K\r\x1b[K");
}

TEST(Console, LogsEverythingWithRankAndTime) {
  std::string folder = (fs::temp_directory_path() / "sw-console-XXXXXX").string();
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  {
    Console console({"cmd", -1, false, 3});
    ASSERT_TRUE(console.OpenLog(folder + "/log-{rank}-{rank}"));
    console.Note("most", 2);
    console.Warning("odd");
    console.Warning("merged", true);
    EXPECT_EQ(console.log_errno(), 0);
    ASSERT_TRUE(console.OpenLog(folder + "/shared"));
  }
  std::ostringstream text;
  text << std::ifstream(folder + "/log-3-3").rdbuf();
  const std::string when = "[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}[.][0-9]{3}Z";
  EXPECT_THAT(text.str(), ::testing::MatchesRegex(when + " cmd\\[3\\] note: most\n" + when +
                                                  " cmd\\[3\\] warning: odd\n"));
  EXPECT_FALSE(fs::exists(folder + "/shared")) << "without {rank} only rank 0 keeps a log";
  fs::remove_all(folder);
}

TEST(Console, TellsWhyThereIsNoLog) {
  Console console({"cmd", 0, false, 0});
  const Status opened = console.OpenLog("/proc/nonexistent/log");
  ASSERT_FALSE(opened);
  EXPECT_EQ(opened.error().code, Errc::kIo);
  EXPECT_EQ(opened.error().message,
            "log /proc/nonexistent/log: cannot open: No such file or directory");
}

TEST(Console, RemembersThatTheLogIsCut) {
  Console console({"cmd", -1, false, 0});
  ASSERT_TRUE(console.OpenLog("/dev/full"));
  console.Note("lost", 0);
  EXPECT_EQ(console.log_errno(), ENOSPC);
}

TEST(WantColor, FlagOutranksTheEnvironment) {
  setenv("NO_COLOR", "1", 1);
  EXPECT_TRUE(WantColor(ColorMode::kAlways));
  EXPECT_FALSE(WantColor(ColorMode::kAuto));
  EXPECT_FALSE(WantColor(ColorMode::kNever));
  unsetenv("NO_COLOR");
}

}  // namespace
}  // namespace shardwright::cli
