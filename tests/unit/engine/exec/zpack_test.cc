// SPDX-License-Identifier: Apache-2.0
#include "engine/exec/zpack.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <random>

#include "unit/support/os/scratch.h"

namespace shardwright::exec {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t kBlock = kZpackBlockBytes;

class Packs : public os::Scratch {
 protected:
  void SetUp() override {
    os::Scratch::SetUp();
    // Two blocks and a half, of which the first can be compressed well.
    plain_.assign(kBlock * 5 / 2, 'a');
    std::mt19937 dice(3);
    for (std::size_t i = kBlock; i < plain_.size(); ++i) plain_[i] = static_cast<char>(dice());
    map_.files = {"pack"};
    map_.members = {{0, 100, plain_.size() - 100, std::nullopt, "all"}};
  }

  Result<ZpackResult> Write(const std::string& name, unsigned threads = 2) {
    ZstdContexts contexts;
    tbb::task_arena arena(static_cast<int>(threads));
    SW_TRY_ASSIGN(os::File created, os::File::Create(At(name)));
    ZpackWriter writer(std::move(created), contexts);
    const auto plain = std::as_bytes(std::span(plain_));
    SW_TRY(writer.Append(plain.first(kBlock), arena));
    SW_TRY(writer.Append(plain.subspan(kBlock), arena));
    return writer.Finish();
  }

  void Damage(const std::string& name, std::size_t at) {
    std::string text = Get(name);
    text.at(at) = static_cast<char>(text[at] ^ 0x10);
    Put(name, text);
  }

  Result<std::string> Read(const std::string& name, std::uint64_t offset, std::uint64_t bytes) {
    ZpackBytes pack(map_, {At(name)});
    std::string out(bytes, '?');
    SW_TRY(pack.Read(0, offset, std::as_writable_bytes(std::span(out))));
    return out;
  }

  std::string plain_;
  layout::ShardMap map_;
};

TEST_F(Packs, GiveBackAnyStretch) {
  const auto written = Write("p");
  ASSERT_TRUE(written.has_value()) << written.error().message;
  EXPECT_EQ(written->bytes, fs::file_size(At("p")));
  EXPECT_LT(written->bytes, plain_.size());
  const std::string text = Get("p");
  EXPECT_EQ(written->digest, DigestOf(std::as_bytes(std::span(text))));
  std::mt19937_64 dice(7);
  for (int i = 0; i < 20; ++i) {
    const std::uint64_t offset = dice() % map_.members[0].bytes;
    const std::uint64_t bytes = 1 + dice() % (map_.members[0].bytes - offset);
    const auto got = Read("p", offset, bytes);
    ASSERT_TRUE(got.has_value()) << got.error().message;
    ASSERT_TRUE(*got == plain_.substr(100 + offset, bytes)) << offset << " " << bytes;
  }
}

TEST_F(Packs, DoNotDependOnTheNumberOfThreads) {
  ASSERT_TRUE(Write("one", 1).has_value());
  ASSERT_TRUE(Write("four", 4).has_value());
  EXPECT_TRUE(Get("one") == Get("four"));
}

TEST_F(Packs, AreKnownWhenWhole) {
  ASSERT_TRUE(Write("p").has_value());
  const std::string path = At("p");
  EXPECT_TRUE(IsZpack(path, plain_.size()));
  EXPECT_FALSE(IsZpack(path, plain_.size() - 1)) << "of another size";
  EXPECT_FALSE(IsZpack(At("none"), plain_.size()));
  fs::resize_file(path, fs::file_size(path) - 1);
  EXPECT_FALSE(IsZpack(path, plain_.size())) << "cut off";
  fs::resize_file(path, 10);
  EXPECT_FALSE(IsZpack(path, plain_.size())) << "shorter than its end";
}

TEST_F(Packs, ThatAreDamagedAreNamed) {
  ASSERT_TRUE(Write("frame").has_value());
  ASSERT_TRUE(Write("index").has_value());
  Damage("frame", 20);
  Damage("index", fs::file_size(At("index")) - 28 - 4);
  const auto frame = Read("frame", 0, 10);
  ASSERT_FALSE(frame.has_value());
  EXPECT_EQ(frame.error().code, Errc::kBadInput);
  EXPECT_NE(frame.error().message.find("block 0 is damaged"), std::string::npos)
      << frame.error().message;
  EXPECT_TRUE(Read("frame", kBlock, 10).has_value()) << "other blocks can be read";
  const auto index = Read("index", 0, 10);
  ASSERT_FALSE(index.has_value());
  EXPECT_NE(index.error().message.find("index is damaged"), std::string::npos)
      << index.error().message;
}

TEST_F(Packs, AreNotReadBeyondTheirEnd) {
  ASSERT_TRUE(Write("p").has_value());
  map_.members[0].bytes = plain_.size();
  const auto got = Read("p", plain_.size() - 110, 20);
  ASSERT_FALSE(got.has_value());
  EXPECT_EQ(got.error().code, Errc::kBadInput);
}

TEST_F(Packs, AreNotWrittenOverAFile) {
  Put("p", "mine");
  const auto written = Write("p");
  ASSERT_FALSE(written.has_value());
  EXPECT_EQ(written.error().code, Errc::kBusy);
  EXPECT_EQ(Get("p"), "mine");
}

}  // namespace
}  // namespace shardwright::exec
