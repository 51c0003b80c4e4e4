// SPDX-License-Identifier: Apache-2.0
#include "engine/exec/units.h"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <memory>
#include <mutex>
#include <numeric>
#include <set>

#include "engine/exec/for_each.h"
#include "engine/exec/verify.h"
#include "engine/exec/zpack.h"
#include "support/base/crc32.h"
#include "support/comm/threads.h"

namespace shardwright::exec {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t kUnit = plan::kUnitBytes;

/// Members in memory.
class Memory final : public ByteSource {
 public:
  explicit Memory(std::vector<std::string> texts) : members(std::move(texts)) {}
  Status Read(std::uint32_t member, std::uint64_t offset, std::span<std::byte> out) override {
    std::memcpy(out.data(), members[member].data() + offset, out.size());
    return {};
  }
  std::uint64_t bytes_read() const override { return 0; }
  std::uint64_t files_read() const override { return 0; }
  std::vector<std::string> members;
};

class StoppingSink final : public NullSink {
 public:
  explicit StoppingSink(const bool& stop) : stop_(stop) {}
  bool stop_requested() const override { return stop_; }

 private:
  const bool& stop_;
};

/// Records the units it received, in rounds.
class Noting final : public UnitSink {
 public:
  bool sums() const override { return takes_sums; }
  Status BeginRound(std::span<const std::uint64_t> round) override {
    rounds.emplace_back(round.begin(), round.end());
    return {};
  }
  Status Put(const UnitInHand& unit) override {
    const std::lock_guard lock(mutex_);
    if (fails.contains(unit.index)) return Fail(Errc::kIo, "unit ", unit.index);
    units.insert(unit.index);
    if (unit.record != nullptr) ++records;
    if (unit.index == stops_at) *stop = true;
    return {};
  }
  Status Drain() override {
    ++drained;
    return drain_fails ? Status(Fail(Errc::kIo, "late")) : Status();
  }

  bool takes_sums = true;
  std::set<std::uint64_t> fails;
  bool drain_fails = false;
  std::uint64_t stops_at = ~std::uint64_t{0};
  bool* stop = nullptr;
  std::set<std::uint64_t> units;
  std::size_t records = 0;
  std::vector<std::vector<std::uint64_t>> rounds;
  int drained = 0;

 private:
  std::mutex mutex_;
};

/// One file of three members, each a payload of its own: of 2.5 units, of 100 bytes, of 4 units.
/// Between them there are gaps. Seven units and a bit.
class Units : public testing::Test {
 protected:
  Units() : bytes_({Text(2 * kUnit + kUnit / 2, 3), Text(100, 5), Text(4 * kUnit, 7)}) {
    map_.files = {"source"};
    plan::OutputFile file;
    file.path = "packed";
    for (std::uint32_t m = 0; m < bytes_.members.size(); ++m) {
      const std::string& text = bytes_.members[m];
      map_.members.push_back(
          {.file = 0, .offset = 0, .bytes = text.size(), .crc32 = Crc(text), .name = "m"});
      plan::Payload payload;
      payload.kind = plan::Payload::Kind::kMember;
      payload.member = m;
      payload.offset = file.bytes + 60;
      payload.bytes = text.size();
      file.bytes = payload.offset + payload.bytes;
      plain_.resize(payload.offset, '\0');
      plain_ += text;
      file.payloads.push_back(payload);
    }
    target_.files.push_back(std::move(file));
    auto made = plan::Plan::Make(map_, target_);
    EXPECT_TRUE(made) << made.error().message;
    plan_ = std::make_unique<plan::Plan>(*std::move(made));
    all_.resize(plan_->unit_count());
    std::iota(all_.begin(), all_.end(), std::uint64_t{0});
  }

  static std::string Text(std::uint64_t bytes, std::uint64_t step) {
    std::string text(bytes, '\0');
    for (std::uint64_t i = 0; i < bytes; ++i) text[i] = static_cast<char>(i * step + i / 1013);
    return text;
  }
  static std::uint32_t Crc(std::string_view text) { return Crc32(std::as_bytes(std::span(text))); }
  UnitLoop Loop(unsigned threads, SourceSums* sums = nullptr) {
    arena_ = std::make_unique<tbb::task_arena>(static_cast<int>(threads));
    UnitLoopOptions options;
    options.sums = sums;
    return {*plan_, bytes_, *arena_, sink_, options};
  }

  Memory bytes_;
  layout::ShardMap map_;
  plan::Target target_;
  std::string plain_;
  std::unique_ptr<plan::Plan> plan_;
  std::vector<std::uint64_t> all_;
  std::unique_ptr<tbb::task_arena> arena_;
  bool stop_ = false;
  StoppingSink sink_{stop_};
};

TEST(FirstErrorTest, AnErrorOutranksAStopAndTheLowestIndexWins) {
  FirstError error;
  error.Set(1, {Errc::kStopped, "stopped", 0, -1});
  error.Set(7, {Errc::kIo, "seven", 0, -1});
  error.Set(4, {Errc::kIo, "four", 0, -1});
  error.Set(5, {Errc::kIo, "five", 0, -1});
  EXPECT_EQ(error.Take().error().message, "four");
}

TEST_F(Units, AllAreTakenAndDrainedOnce) {
  for (const unsigned threads : {1U, 2U}) {
    UnitLoop loop = Loop(threads);
    Noting to;
    ASSERT_TRUE(loop.ForUnits(all_, to));
    EXPECT_EQ(to.units.size(), 8U);
    EXPECT_EQ(to.drained, 1);
  }
}

TEST_F(Units, RecordsAreForSinksThatHaveUseForThem) {
  for (const bool sums : {true, false}) {
    UnitLoop loop = Loop(2);
    Noting to;
    to.takes_sums = sums;
    ASSERT_TRUE(loop.ForUnits(all_, to));
    EXPECT_EQ(to.records, sums ? 8U : 0U);
  }
}

TEST_F(Units, AfterAnErrorNothingIsDrainedAndOnlyWhatWasPutCounts) {
  UnitLoop loop = Loop(1);
  Noting to;
  to.fails = {3, 5};
  const Status failed = loop.ForUnits(all_, to);
  ASSERT_FALSE(failed);
  EXPECT_EQ(failed.error().message, "unit 3");
  EXPECT_EQ(to.units, (std::set<std::uint64_t>{0, 1, 2}));
  EXPECT_EQ(to.drained, 0);
}

TEST_F(Units, WhatASinkFailsToEndIsAnError) {
  UnitLoop loop = Loop(2);
  Noting to;
  to.drain_fails = true;
  const Status failed = loop.ForUnits(all_, to);
  ASSERT_FALSE(failed);
  EXPECT_EQ(failed.error().message, "late");
}

TEST_F(Units, AStopEndsTheLoopAtAUnit) {
  UnitLoop loop = Loop(1);
  Noting to;
  to.stops_at = 2;
  to.stop = &stop_;
  const Status stopped = loop.ForUnits(all_, to);
  ASSERT_FALSE(stopped);
  EXPECT_EQ(stopped.error().code, Errc::kStopped);
  EXPECT_EQ(to.units, (std::set<std::uint64_t>{0, 1, 2}));
  EXPECT_EQ(to.drained, 0);
}

TEST_F(Units, RoundsAreAnnouncedAndDrained) {
  UnitLoop loop = Loop(2);
  const auto comm = comm::MakeSerialComm();
  Exchange source(*comm, map_, bytes_, {});
  Noting to;
  ASSERT_TRUE(ForUnitsInRounds(*comm, loop, *plan_, source, all_, 3, to));
  EXPECT_EQ(to.rounds, (std::vector<std::vector<std::uint64_t>>{{0, 1, 2}, {3, 4, 5}, {6, 7}}));
  EXPECT_EQ(to.units.size(), 8U);
  EXPECT_EQ(to.drained, 3);
}

TEST_F(Units, NoRankGoesOnWhenOneHasFailed) {
  const auto answers = comm::RunThreads(2, [&](comm::Comm& comm) -> Status {
    tbb::task_arena arena(1);
    NullSink sink;
    Memory bytes(bytes_.members);
    Exchange source(comm, map_, bytes, {});
    UnitLoop loop(*plan_, bytes, arena, sink, {});
    Noting to;
    if (comm.rank() == 1) to.fails = {3};
    return ForUnitsInRounds(comm, loop, *plan_, source, all_, all_.size(), to);
  });
  for (const Status& answer : answers) {
    ASSERT_FALSE(answer);
    EXPECT_NE(answer.error().message.find("unit 3"), std::string::npos) << answer.error().message;
  }
}

// One thread has windows of two blocks, so that units reach from one into the next.
TEST_F(Units, APackedFileHoldsThePlainOne) {
  const fs::path folder = fs::path(testing::TempDir()) / "units_packed";
  fs::remove_all(folder);
  fs::create_directories(folder);
  std::vector<Digest> digests;
  for (const unsigned threads : {1U, 3U}) {
    const std::string path = (folder / std::to_string(threads)).string();
    UnitLoop loop = Loop(threads);
    ZstdContexts contexts;
    auto created = os::File::Create(path);
    ASSERT_TRUE(created) << created.error().message;
    std::vector<UnitSum> sums;
    const auto packed =
        PackFile(*plan_, 0, loop, ZpackWriter(*std::move(created), contexts), *arena_, &sums);
    ASSERT_TRUE(packed) << packed.error().message;
    EXPECT_EQ(packed->bytes, fs::file_size(path));
    digests.push_back(packed->digest);
    EXPECT_TRUE(IsZpack(path, plain_.size()));
    layout::ShardMap whole;
    whole.files = {"packed"};
    whole.members.push_back(
        {.file = 0, .offset = 0, .bytes = plain_.size(), .crc32 = std::nullopt, .name = "m"});
    ZpackBytes read(whole, {path});
    std::string found(plain_.size(), 'x');
    ASSERT_TRUE(read.Read(0, 0, std::as_writable_bytes(std::span(found))));
    EXPECT_TRUE(found == plain_);
    const auto crcs = SumPayloads(*plan_, 0, sums, true);
    ASSERT_TRUE(crcs) << crcs.error().message;
    for (std::size_t m = 0; m < crcs->size(); ++m) EXPECT_EQ((*crcs)[m], Crc(bytes_.members[m]));
  }
  EXPECT_EQ(digests[0], digests[1]);
  fs::remove_all(folder);
}

TEST_F(Units, ACopiedMemberWithAnotherChecksumIsRefused) {
  map_.members[2].crc32 = 1;
  std::vector<UnitSum> sums;
  for (const std::string& member : bytes_.members) {
    for (std::uint64_t at = 0; at < member.size(); at += kUnit) {
      const auto unit = std::string_view(member).substr(at, kUnit);
      sums.push_back(SumOf(std::as_bytes(std::span(unit))));
    }
  }
  EXPECT_TRUE(SumPayloads(*plan_, 0, sums, false));
  const auto refused = SumPayloads(*plan_, 0, sums, true);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Errc::kBadInput);
  EXPECT_NE(refused.error().message.find("CRC-32 00000001 expected"), std::string::npos)
      << refused.error().message;
}

}  // namespace
}  // namespace shardwright::exec
