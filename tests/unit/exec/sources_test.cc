#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "exec/byte_source.h"
#include "exec/file_pool.h"
#include "unit/os/scratch.h"

// Where bytes come from, and how it is noticed that they are no longer the ones that were found.

namespace shardwright::exec {
namespace {

namespace fs = std::filesystem;

class Sources : public os::Scratch {
 protected:
  std::string Write(const std::string& name, const std::string& text) {
    Put(name, text);
    return At(name);
  }

  static SourcePath Found(const std::string& path, bool may_grow = false) {
    return {path, os::File::OpenRead(path)->Stat().value(), may_grow};
  }
};

TEST_F(Sources, GiveTheBytesOfTheirMembers) {
  layout::ShardMap map;
  map.files = {"a"};
  map.members = {{0, 4, 6, std::nullopt, "one"}};
  FileBytes bytes(map, {Found(Write("a", "0123456789"))});
  std::string out(3, '?');
  ASSERT_TRUE(bytes.Read(0, 2, std::as_writable_bytes(std::span(out))).has_value());
  EXPECT_EQ(out, "678");
  EXPECT_EQ(bytes.bytes_read(), 3U);
  EXPECT_EQ(bytes.files_read(), 1U);
  std::string more(9, '?');
  const Status beyond = bytes.Read(0, 2, std::as_writable_bytes(std::span(more)));
  ASSERT_FALSE(beyond.has_value());
  EXPECT_EQ(beyond.error().code, Errc::kBadInput);
}

TEST_F(Sources, ThatChangedAreNotRead) {
  const std::string path = Write("a", "0123456789");
  const SourcePath then = Found(path);
  EXPECT_TRUE(OpenUnchanged(then).has_value());
  Write("a", "01234567890123");
  const auto opened = OpenUnchanged(then);
  ASSERT_FALSE(opened.has_value());
  EXPECT_EQ(opened.error().code, Errc::kNotFound);
  EXPECT_NE(opened.error().message.find("10 bytes then, 14 now"), std::string::npos)
      << opened.error().message;
  fs::remove(path);
  EXPECT_EQ(OpenUnchanged(then).error().code, Errc::kNotFound);
}

TEST_F(Sources, OfTheSameSizeAndAnotherTimeHaveChanged) {
  const std::string path = Write("a", "0123456789");
  const SourcePath then = Found(path);
  fs::last_write_time(path, fs::last_write_time(path) + std::chrono::seconds(1));
  EXPECT_FALSE(OpenUnchanged(then).has_value());
}

TEST_F(Sources, MayGrowWhereTheyAreLogs) {
  const std::string path = Write("log", "one\n");
  const SourcePath log = Found(path, true);
  layout::ShardMap map;
  map.files = {"log"};
  map.members = {{0, 0, 4, std::nullopt, "log"}};
  FileBytes bytes(map, {log});
  EXPECT_EQ(bytes.LookAgain(0).value(), false);
  std::ofstream(path, std::ios::app) << "two\n";
  EXPECT_EQ(bytes.LookAgain(0).value(), true);
  const SourcePath whole = {path, log.identity, false};
  EXPECT_FALSE(OpenUnchanged(whole).has_value());
  // A log that was written anew is another one, also where it is longer.
  fs::rename(Write("new", "another log\n"), path);
  EXPECT_FALSE(bytes.LookAgain(0).has_value());
}

TEST_F(Sources, AreHeldOpenOnlyToALimit) {
  std::vector<std::string> paths;
  paths.reserve(5);
  for (int i = 0; i < 5; ++i) {
    paths.push_back(Write("f" + std::to_string(i), std::string(1, static_cast<char>('a' + i))));
  }
  int opened = 0;
  FilePool pool(
      [&](std::uint32_t file) {
        ++opened;
        return os::File::OpenRead(paths[file]);
      },
      2);
  const auto first = pool.Get(0);
  ASSERT_TRUE(first.has_value());
  ASSERT_TRUE(pool.Get(0).has_value());
  EXPECT_EQ(opened, 1) << "it is still open";
  for (std::uint32_t file = 1; file < 5; ++file) ASSERT_TRUE(pool.Get(file).has_value());
  EXPECT_EQ(opened, 5);
  char byte = '?';
  ASSERT_TRUE((*first)->ReadAt(0, std::as_writable_bytes(std::span(&byte, 1))).has_value());
  EXPECT_EQ(byte, 'a') << "who holds a file can read it";
  ASSERT_TRUE(pool.Get(4).has_value());
  ASSERT_TRUE(pool.Get(3).has_value());
  EXPECT_EQ(opened, 5) << "the last two are kept";
  ASSERT_TRUE(pool.Get(0).has_value());
  EXPECT_EQ(opened, 6);
  EXPECT_EQ(pool.opened_count(), 5U) << "each file counts once";
}

TEST_F(Sources, ThatCannotBeOpenedMayBeTriedAgain) {
  const std::string path = At("late");
  FilePool pool([&](std::uint32_t) { return os::File::OpenRead(path); });
  EXPECT_EQ(pool.Get(0).error().code, Errc::kNotFound);
  EXPECT_EQ(pool.opened_count(), 0U);
  Write("late", "x");
  EXPECT_TRUE(pool.Get(0).has_value());
}

}  // namespace
}  // namespace shardwright::exec
