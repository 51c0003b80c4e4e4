// SPDX-License-Identifier: Apache-2.0
// Gradients that processes of a trainer submit, and their records in the log of a store.

#include "partial/agent/gradient_logs.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cmath>
#include <cstring>
#include <fstream>
#include <thread>

#include "partial/agent/throttle/handed_memory.h"
#include "partial/store/store.h"
#include "support/os/fault.h"
#include "unit/partial/gradient_log/log_fixture.h"

namespace shardwright::partial {
namespace {

constexpr std::uint64_t kPlace = 64;  // bytes

/// Elements [first, first + count) of "w" of module "m", float32, and all of "v" of "n".
std::string Described(std::uint64_t first, std::uint64_t count, std::uint64_t recovery = 0) {
  return R"({"recovery":)" + std::to_string(recovery) +
         R"(,"begun":1,"zstd":0,"places":2,"place_bytes":64,"tensors":2,"modules":[)"
         R"({"name":"m","pieces":[{"param":"w","elems":10,"first":)" +
         std::to_string(first) + R"(,"count":)" + std::to_string(count) +
         R"(,"dtype":"float32","offset":0,"tensor":0}]},)"
         R"({"name":"n","pieces":[{"param":"v","elems":2,"first":0,"count":2,"dtype":"float32",)"
         R"("offset":48,"tensor":1}]}]})";
}

Handing Handed(std::uint64_t first, std::uint64_t count, std::uint32_t writer,
               std::uint64_t recovery = 0) {
  const auto handing = ParseHanding(Described(first, count, recovery), writer, "here");
  EXPECT_TRUE(handing) << handing.error().message;
  return *handing;
}

std::vector<std::byte> PlaceOf(std::uint64_t iteration) {
  std::array<float, kPlace / 4> place{};
  for (std::size_t i = 0; i < place.size(); ++i) {
    place[i] = static_cast<float>(iteration) + static_cast<float>(i) / 16;
  }
  const auto bytes = std::as_bytes(std::span(place));
  return {bytes.begin(), bytes.end()};
}

std::vector<LogStep> StepsAt(std::uint64_t iteration) {
  return {StepAt(iteration), StepAt(iteration)};
}

class GradientLogsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    StoreHead head;
    head.fingerprint = kModel;
    ASSERT_TRUE(Store::OpenOrCreate(store_, head));
  }
  Result<GradientLog> Read() const { return GradientLog::Open(store_ + "/logs", kModel); }
  std::string Chain(const std::string& module, const std::vector<LoggedParam>& params,
                    std::uint64_t from, std::uint64_t to,
                    std::span<const RecoveryRecord> recoveries = {}) const {
    const auto log = Read();
    if (!log) return log.error().message;
    const auto chain = log->ChainOf(module, params, from, to, recoveries);
    if (!chain) return chain.error().message;
    std::string text;
    for (const LogLink& link : *chain) {
      for (const LogLink::Piece& piece : link.pieces) {
        const auto bytes = ReadPiece(*log, piece);
        EXPECT_TRUE(bytes) << bytes.error().message;
        float first = 0;
        std::memcpy(&first, bytes->data(), sizeof first);
        text += std::to_string(link.iteration) + ":" + std::to_string(piece.piece->first) + "+" +
                std::to_string(piece.piece->count) + "=" + std::to_string(first).substr(0, 6) + " ";
      }
    }
    return text;
  }

  const Scratch scratch_;
  const std::string store_ = scratch_.Path("store");
};

TEST_F(GradientLogsTest, SharesOfProcessesJoin) {
  GradientLogs logs(store_);
  const Handing one = Handed(0, 6, 0);
  Handing other = Handed(6, 4, 1);
  other.modules.pop_back();
  for (std::uint64_t i = 2; i <= 3; ++i) {
    const auto bytes = logs.Append(one, i, PlaceOf(i), StepsAt(i));
    ASSERT_TRUE(bytes) << bytes.error().message;
    EXPECT_EQ(*bytes, (6U + 2U) * 4U);
    EXPECT_EQ(*logs.Append(other, i, PlaceOf(i), StepsAt(i)), 4U * 4U);
  }
  ASSERT_EQ(logs.Persist(3).value_or("?"), "");
  EXPECT_EQ(Chain("m", kParams, 1, 3), "2:0+6=2.0000 2:6+4=2.0000 3:0+6=3.0000 3:6+4=3.0000 ");
  EXPECT_EQ(Chain("n", {{"v", 2}}, 1, 3), "2:0+2=2.7500 3:0+2=3.7500 ");
  const GradientLogStatus status = logs.status();
  EXPECT_EQ(status.records, 6U);
  EXPECT_EQ(status.gradient_bytes, 2U * 12U * 4U);
  EXPECT_EQ(status.newest, 3U);
  EXPECT_EQ(status.persisted, 3U);
}

TEST_F(GradientLogsTest, AnotherProcessGoesOnAndCutsATornTail) {
  for (std::uint64_t i = 2; i <= 4; ++i) {
    GradientLogs logs(store_);
    ASSERT_TRUE(logs.Append(Handed(0, 10, 0), i, PlaceOf(i), StepsAt(i)));
    EXPECT_EQ(logs.status().cut_bytes, i == 2 ? 0U : 7U);
    std::ofstream(store_ + "/logs/0-1.swg", std::ios::app) << "SWGRADR";
  }
  EXPECT_EQ(Chain("m", kParams, 1, 4), "2:0+10=2.0000 3:0+10=3.0000 4:0+10=4.0000 ");
}

TEST_F(GradientLogsTest, WhatWasHandedOverIsOfItsTrainersRecovery) {
  GradientLogs logs(store_);
  for (std::uint64_t i = 2; i <= 4; ++i) {
    ASSERT_TRUE(logs.Append(Handed(0, 10, 0, 0), i, PlaceOf(i), StepsAt(i)));
  }
  RecoveryRecord recovery;
  recovery.sequence = 1;
  recovery.resume = 3;
  ASSERT_TRUE(logs.Append(Handed(0, 10, 0, 1), 4, PlaceOf(40), StepsAt(4)));
  EXPECT_EQ(Chain("m", kParams, 1, 4, std::span(&recovery, 1)),
            "2:0+10=2.0000 3:0+10=3.0000 4:0+10=40.000 ");
}

TEST_F(GradientLogsTest, APersistWaitsForProcessesThatAreBehind) {
  GradientLogs logs(store_);
  logs.Enter(0, 1);
  logs.Enter(1, 1);
  ASSERT_TRUE(logs.Append(Handed(0, 6, 0), 2, PlaceOf(2), StepsAt(2)));
  EXPECT_EQ(logs.Persist(1).value_or("?"), "");  // no process has to submit that
  std::thread late([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    EXPECT_TRUE(logs.Append(Handed(6, 4, 1), 2, PlaceOf(2), StepsAt(2)));
  });
  EXPECT_EQ(logs.Persist(2).value_or("?"), "");
  late.join();
  EXPECT_EQ(logs.status().records, 4U);
  // Both have a mark now, so that a byte before it that has changed is damage and no torn tail.
  std::fstream segment(store_ + "/logs/1-1.swg", std::ios::in | std::ios::out | std::ios::binary);
  segment.seekp(200).put('?');
  segment.close();
  EXPECT_FALSE(Read());
  logs.Leave(0);
  logs.Leave(1);
  EXPECT_EQ(logs.status().writers, 0U);
}

TEST_F(GradientLogsTest, WhatACheckpointHasIsHeldBackAndDropped) {
  GradientLogs logs(store_, 100 + 2 * GradientLogs::kBufferedRecordBytes);
  logs.Hold(2, {"m"});
  for (std::uint64_t i = 2; i <= 4; ++i) {
    ASSERT_TRUE(logs.Append(Handed(0, 10, 0), i, PlaceOf(i), StepsAt(i)));
  }
  EXPECT_EQ(logs.status().held_bytes, 80U);
  EXPECT_EQ(Chain("n", {{"v", 2}}, 1, 4), "2:0+2=2.7500 3:0+2=3.7500 4:0+2=4.7500 ");
  EXPECT_EQ(Chain("m", kParams, 1, 2), "2:0+10=2.0000 ");
  EXPECT_EQ(Chain("m", kParams, 1, 4), "gradients of \"m\", iteration 3: no record has them");
  // The checkpoint of 4 has it, that of 3 does not any more: both are there before it is durable.
  ASSERT_EQ(logs.Persist(4, {"m"}).value_or("?"), "");
  EXPECT_EQ(Chain("m", kParams, 2, 4), "gradients of \"m\", iteration 3: no record has them");
  logs.Drop(3, {"m"});
  EXPECT_EQ(logs.status().held_bytes, 40U);
  EXPECT_EQ(logs.status().dropped_bytes, 40U);
  ASSERT_EQ(logs.Persist(5).value_or("?"), "");  // a checkpoint of 5 that has no "m"
  EXPECT_EQ(Chain("m", kParams, 3, 4), "4:0+10=4.0000 ");
  logs.Drop(5, {"m"});
  EXPECT_EQ(logs.status().held_bytes, 0U);
  EXPECT_EQ(logs.status().dropped_bytes, 40U);
}

TEST_F(GradientLogsTest, WhatCannotBeAppendedStaysHeldBack) {
  GradientLogs logs(store_, 10'000);
  logs.Hold(1, {"m"});
  ASSERT_TRUE(logs.Append(Handed(0, 10, 0), 2, PlaceOf(2), StepsAt(2)));
  {
    os::FaultRule full;
    full.target = "log.record";
    full.error = ENOSPC;
    const os::ScopedFault fault(full);
    EXPECT_FALSE(logs.Persist(2));
    EXPECT_TRUE(fault.fired());
  }
  EXPECT_EQ(logs.status().held_bytes, 40U);
  ASSERT_EQ(logs.Persist(2).value_or("?"), "");
  EXPECT_EQ(Chain("m", kParams, 1, 2), "2:0+10=2.0000 ");
}

// A snapshot that failed: the checkpoint lacks the gradients buffered for it.
TEST_F(GradientLogsTest, WhatComesAfterAPersistIsNotHeldBackForItsCheckpoint) {
  GradientLogs logs(store_, 10'000);
  logs.Hold(1, {"m"});
  ASSERT_TRUE(logs.Append(Handed(0, 10, 0), 2, PlaceOf(2), StepsAt(2)));
  ASSERT_EQ(logs.Persist(3).value_or("?"), "");
  ASSERT_TRUE(logs.Append(Handed(0, 10, 0), 3, PlaceOf(3), StepsAt(3)));
  EXPECT_EQ(Chain("m", kParams, 1, 3), "2:0+10=2.0000 3:0+10=3.0000 ");
  logs.Hold(3, {"m"});
  ASSERT_EQ(logs.Persist(3).value_or("?"), "");
  ASSERT_TRUE(logs.Append(Handed(0, 10, 0), 4, PlaceOf(4), StepsAt(4)));
  EXPECT_EQ(logs.status().held_bytes, 40U);
}

TEST_F(GradientLogsTest, WhatIsHeldBackIsAppendedAsItWasUsed) {
  GradientLogs logs(store_, 10'000);
  logs.Hold(1, {"m", "n"});
  ASSERT_TRUE(logs.Append(Handed(0, 10, 0), 2, PlaceOf(2), StepsAt(2)));
  ASSERT_TRUE(logs.Append(Handed(0, 10, 0), 3, PlaceOf(3), StepsAt(3)));
  RecoveryRecord recovery;
  recovery.sequence = 1;
  recovery.resume = 2;
  logs.DiscardAll();
  ASSERT_TRUE(logs.Append(Handed(0, 10, 0, 1), 3, PlaceOf(30), StepsAt(3)));
  ASSERT_TRUE(logs.AppendBuffered());
  EXPECT_EQ(Chain("m", kParams, 1, 3, std::span(&recovery, 1)), "2:0+10=2.0000 3:0+10=30.000 ");
  EXPECT_EQ(Chain("n", {{"v", 2}}, 1, 2), "2:0+2=2.7500 ");
  EXPECT_EQ(logs.status().held_bytes, 0U);
}

// 40 bytes of "m": gradients above the buffer size are logged.
TEST_F(GradientLogsTest, NoMoreIsHeldBackThanThereIsRoomFor) {
  GradientLogs logs(store_, 79 + 2 * GradientLogs::kBufferedRecordBytes);
  logs.Hold(1, {"m"});
  for (std::uint64_t i = 2; i <= 3; ++i) {
    ASSERT_TRUE(logs.Append(Handed(0, 10, 0), i, PlaceOf(i), StepsAt(i)));
  }
  EXPECT_EQ(logs.status().held_bytes, 40U);
  EXPECT_EQ(Chain("m", kParams, 2, 3), "3:0+10=3.0000 ");
  // Not even a step that was skipped, which has no gradients.
  GradientLogs none(store_, 0);
  none.Hold(3, {"m", "n"});
  std::vector<LogStep> skipped = StepsAt(4);
  for (LogStep& step : skipped) step.step.skipped = true;
  ASSERT_TRUE(none.Append(Handed(0, 10, 1), 4, PlaceOf(4), skipped));
  const auto log = Read();
  ASSERT_TRUE(log);
  EXPECT_EQ(log->Modules().at("m").back(), 4U);
}

TEST_F(GradientLogsTest, WhatHasNoGapIsKnown) {
  GradientLogs logs(store_, 100);
  EXPECT_EQ(logs.logged_since(), std::nullopt);
  logs.Enter(0, 4, false, 2);
  logs.Enter(1, 4, false, 2);
  EXPECT_EQ(logs.logged_since(), 4U);
  EXPECT_EQ(logs.every(), 2U);
  ASSERT_TRUE(logs.Append(Handed(0, 6, 0), 5, PlaceOf(5), StepsAt(5)));
  ASSERT_TRUE(logs.Append(Handed(0, 6, 0), 7, PlaceOf(7), StepsAt(7)));
  EXPECT_EQ(logs.logged_since(), 6U);
  logs.Leave(1);
  EXPECT_EQ(logs.logged_since(), std::nullopt);
  logs.Enter(1, 8);
  EXPECT_EQ(logs.logged_since(), 8U);
  logs.Leave(0);
  logs.Leave(1);
  logs.Enter(0, 9, true);  // one process now, filled by a restore
  EXPECT_EQ(logs.logged_since(), 0U);
  EXPECT_EQ(logs.every(), 0U);
}

TEST_F(GradientLogsTest, RootsAreWrittenWithTheFirstStepThatNamesThem) {
  std::vector<float> roots;
  for (std::uint32_t bits = 0x3F800000; roots.size() < optimizer_steps::RootTable::kRoots; ++bits) {
    float number = 0;
    std::memcpy(&number, &bits, sizeof number);
    roots.push_back(std::sqrt(number));
  }
  GradientLogs logs(store_);
  EXPECT_EQ(*logs.AddRoots(*optimizer_steps::RootTable::FromRoots(roots, 0x7F7FFFFF)),
            std::nullopt);
  roots[3] = std::nextafter(roots[3], 9.0F);
  const auto digest = logs.AddRoots(*optimizer_steps::RootTable::FromRoots(roots, 0x7F7FFFFF));
  ASSERT_TRUE(digest && *digest);
  std::vector<LogStep> steps = StepsAt(2);
  steps[0].roots = **digest;
  EXPECT_FALSE(GetRoots(store_ + "/logs", **digest));
  ASSERT_TRUE(logs.Append(Handed(0, 10, 0), 2, PlaceOf(2), steps));
  const auto kept = GetRoots(store_ + "/logs", **digest);
  ASSERT_TRUE(kept) << kept.error().message;
  EXPECT_FALSE(kept->IsCorrect());
  EXPECT_TRUE(Read());
}

TEST_F(GradientLogsTest, WhatDoesNotFitIsRefused) {
  const auto why = [](std::string text, const std::string& from, const std::string& to) {
    text.replace(text.find(from), from.size(), to);
    const auto handing = ParseHanding(text, 0, "here");
    return handing ? "" : handing.error().message;
  };
  const std::string good = Described(0, 10);
  EXPECT_EQ(why(good, "zstd", "zst"), "here: \"zstd\" is missing");
  EXPECT_NE(why(good, "\"count\":10", "\"count\":11"), "");
  EXPECT_NE(why(good, "\"offset\":0", "\"offset\":28"), "");
  EXPECT_NE(why(good, "\"tensor\":1", "\"tensor\":2"), "");
  // Sizes with a product beyond any memory, and pieces with names beyond any memory.
  EXPECT_EQ(why(good, R"("places":2,"place_bytes":64)",
                R"("places":16777216,"place_bytes":1099511627777)"),
            "here: invalid shared memory: 16777216 slots of 1099511627777 bytes");
  EXPECT_NE(why(good, R"("places":2)", R"("places":0)"), "");
  std::string many = good;
  many.replace(many.find("\"place_bytes\":64"), 16, "\"place_bytes\":17592186044416");
  EXPECT_NE(why(many, R"("elems":10,"first":0,"count":10)",
                R"("elems":4398046511103,"first":0,"count":4398046511103)"),
            "");
  EXPECT_EQ(why(good, "float32", "float64"),
            "here: parameter \"w\": gradients in float32, bfloat16 or float16 expected, found "
            "\"float64\"");
  GradientLogs logs(store_);
  EXPECT_FALSE(logs.Append(Handed(0, 10, 0), 2, PlaceOf(2), std::vector{StepAt(2)}));
  EXPECT_FALSE(
      GradientLogs(scratch_.Path("none")).Append(Handed(0, 10, 0), 2, PlaceOf(2), StepsAt(2)));
}

TEST_F(GradientLogsTest, PiecesAboveWhatALogTakesAreCut) {
  const std::uint64_t most = kLogPieceBytes / 4;
  const std::string count = std::to_string(2 * most + 5);
  const std::string text =
      R"({"recovery":0,"begun":0,"zstd":0,"places":1,"place_bytes":)" +
      std::to_string(4 * (2 * most + 6)) +
      R"(,"tensors":1,"modules":[{"name":"m","pieces":[{"param":"w","elems":)" + count +
      R"(,"first":0,"count":)" + count + R"(,"dtype":"float32","offset":4,"tensor":0}]}]})";
  const auto handing = ParseHanding(text, 0, "here");
  ASSERT_TRUE(handing) << handing.error().message;
  const auto& pieces = handing->modules[0].pieces;
  ASSERT_EQ(pieces.size(), 3U);
  EXPECT_EQ(pieces[2].first, 2 * most);
  EXPECT_EQ(pieces[2].count, 5U);
  EXPECT_EQ(pieces[2].offset, 4 + 8 * most);
}

TEST(HandedMemoryTest, OnlySealedMemoryOfTheSizeIsMapped) {
  const auto make = [](std::uint64_t bytes, bool sealed) {
    const int fd = ::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    EXPECT_EQ(::ftruncate(fd, static_cast<off_t>(bytes)), 0);
    EXPECT_EQ(::pwrite(fd, "x", 1, 5), 1);
    if (sealed) {
      EXPECT_EQ(::fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
    }
    return fd;
  };
  const auto mapped = HandedMemory::Map(make(4096, true), 4096);
  ASSERT_TRUE(mapped) << mapped.error().message;
  EXPECT_EQ(mapped->bytes()[5], std::byte{'x'});
  EXPECT_FALSE(HandedMemory::Map(make(4096, false), 4096));
  EXPECT_FALSE(HandedMemory::Map(make(4096, true), 8192));
  EXPECT_FALSE(HandedMemory::Map(::open("/dev/zero", O_RDONLY), 4096));
}

}  // namespace
}  // namespace shardwright::partial
