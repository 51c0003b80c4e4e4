// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <zstd.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "engine/exec/byte_source.h"
#include "engine/exec/file_pool.h"
#include "unit/support/os/scratch.h"

// Reads the bytes of sources, and detects that they changed after the scan.

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

TEST_F(Sources, FilesOfAPoolAreOpenedAtTheSameTimeAndEachOnce) {
  const std::string path = Write("a", "0123456789");
  std::mutex mutex;
  std::condition_variable both;
  int inside = 0;
  int opened = 0;
  FilePool pool([&](std::uint32_t) -> Result<os::File> {
    std::unique_lock lock(mutex);
    ++opened;
    ++inside;
    both.notify_all();
    const bool met = both.wait_for(lock, std::chrono::minutes(5), [&] { return inside == 2; });
    if (!met) return Fail(Errc::kInternal, "one thread only");
    return os::File::OpenRead(path);
  });
  std::vector<std::thread> threads;
  std::array<bool, 4> got{};
  for (std::uint32_t i = 0; i < got.size(); ++i) {
    threads.emplace_back([&, i] { got[i] = pool.Get(i % 2).has_value(); });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(got, (std::array<bool, 4>{true, true, true, true}));
  EXPECT_EQ(opened, 2);
}

TEST_F(Sources, AFileThatCouldNotBeOpenedMayBeTriedAgain) {
  const std::string path = Write("a", "0123456789");
  int calls = 0;
  FilePool pool([&](std::uint32_t) -> Result<os::File> {
    if (++calls == 1) return Fail(Errc::kNotFound, "not yet");
    if (calls == 2) throw std::bad_alloc();
    return os::File::OpenRead(path);
  });
  EXPECT_FALSE(pool.Get(0));
  EXPECT_THROW((void)pool.Get(0), std::bad_alloc);
  EXPECT_TRUE(pool.Get(0));
}

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

std::string Packed(const std::string& plain) {
  std::string out(ZSTD_compressBound(plain.size()), '\0');
  out.resize(ZSTD_compress(out.data(), out.size(), plain.data(), plain.size(), 1));
  return out;
}

/// Three items in one file, the second as it is, and a member in each.
class CompressedItems : public Sources {
 protected:
  void SetUp() override {
    Sources::SetUp();
    for (std::uint32_t i = 0; i < 3'000'000; ++i) first_ += static_cast<char>((i >> 7) ^ (i % 251));
    // Two frames are one stream.
    std::string text = Packed(first_.substr(0, 1'000'000)) + Packed(first_.substr(1'000'000));
    const std::uint64_t first_bytes = text.size();
    const std::string last = Packed("the last");
    text += "as it is" + last;
    path_ = Found(Write("items", text));
    path_.stretches = {{0, first_bytes, 0, first_.size(), true},
                       {first_bytes, 8, first_.size(), 8, false},
                       {first_bytes + 8, last.size(), first_.size() + 8, 8, true}};
    map_.files = {"items"};
    map_.members = {{0, 16, first_.size() - 16, std::nullopt, "large"},
                    {0, first_.size(), 8, std::nullopt, "plain"},
                    {0, first_.size() + 12, 4, std::nullopt, "last"}};
  }

  static std::string Bytes(FileBytes& bytes, std::uint32_t member, std::uint64_t offset,
                           std::size_t count) {
    std::string out(count, '?');
    const Status read = bytes.Read(member, offset, std::as_writable_bytes(std::span(out)));
    return read ? out : read.error().message;
  }

  std::string first_;
  SourcePath path_;
  layout::ShardMap map_;
};

TEST_F(CompressedItems, AreReadInAnyOrder) {
  FileBytes bytes(map_, {path_});
  EXPECT_EQ(Bytes(bytes, 2, 0, 4), "last");
  EXPECT_EQ(Bytes(bytes, 1, 3, 5), "it is");
  for (const std::uint64_t offset : {0U, 5U, 999'990U, 2'000'000U, 1'000'000U, 2'999'974U, 3U}) {
    EXPECT_EQ(Bytes(bytes, 0, offset, 10), first_.substr(16 + offset, 10)) << offset;
  }
  EXPECT_EQ(Bytes(bytes, 0, 0, first_.size() - 16), first_.substr(16));
}

TEST_F(CompressedItems, ThatAreDamagedAreNotRead) {
  const std::string whole = Get("items");
  const auto error_of = [&](const std::string& text, std::uint64_t stored) {
    SourcePath path = Found(Write("items", text));
    path.stretches = path_.stretches;
    path.stretches[0].stored_bytes = stored;
    FileBytes bytes(map_, {path});
    return Bytes(bytes, 0, 0, first_.size() - 16);
  };
  const std::uint64_t stored = path_.stretches[0].stored_bytes;
  EXPECT_EQ(error_of(whole, stored), first_.substr(16));
  EXPECT_NE(error_of(whole, stored - 1).find("it ends within a frame"), std::string::npos);
  EXPECT_NE(error_of(whole, stored / 8).find("ends"), std::string::npos);
  std::string flipped = whole;
  flipped[0] = static_cast<char>(flipped[0] ^ 1);
  EXPECT_NE(error_of(flipped, stored).find("is damaged"), std::string::npos);
}

TEST_F(Sources, ThatChangedAreNotRead) {
  const std::string path = Write("a", "0123456789");
  const SourcePath then = Found(path);
  EXPECT_TRUE(OpenUnchanged(then).has_value());
  Write("a", "01234567890123");
  const auto opened = OpenUnchanged(then);
  ASSERT_FALSE(opened.has_value());
  EXPECT_EQ(opened.error().code, Errc::kNotFound);
  EXPECT_NE(opened.error().message.find("10 bytes expected, found 14"), std::string::npos)
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
  EXPECT_EQ(bytes.Recheck(0).value(), false);
  std::ofstream(path, std::ios::app) << "two\n";
  EXPECT_EQ(bytes.Recheck(0).value(), true);
  const SourcePath whole = {path, log.identity, false};
  EXPECT_FALSE(OpenUnchanged(whole).has_value());
  // A rewritten log is a different one, also if it is longer.
  fs::rename(Write("new", "another log\n"), path);
  EXPECT_FALSE(bytes.Recheck(0).has_value());
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
