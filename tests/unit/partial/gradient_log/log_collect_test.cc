// SPDX-License-Identifier: Apache-2.0
#include "partial/gradient_log/log_collect.h"

#include <atomic>
#include <thread>

#include "log_fixture.h"
#include "support/os/file.h"

namespace shardwright::partial {
namespace {

namespace fs = std::filesystem;

/// A segment for every record.
LogWriterOptions Small(std::uint32_t writer = 0) {
  LogWriterOptions options = Options(writer);
  options.segment_bytes = 600;
  return options;
}

void Write(const std::string& folder, std::uint32_t rank, std::uint64_t first, std::uint64_t last,
           std::uint64_t recovery = 0) {
  LogWriterOptions options = Small(rank);
  options.recovery = recovery;
  auto writer = LogWriter::Open(folder, options);
  ASSERT_TRUE(writer) << writer.error().message;
  const std::uint64_t begin = std::uint64_t{5} * rank;
  for (std::uint64_t i = first; i <= last; ++i) {
    ASSERT_TRUE(Append(&*writer, "m", i, begin, begin + 5));
  }
  ASSERT_TRUE(writer->Persist());
}

OldSegments Find(const std::string& folder, std::uint64_t through) {
  auto old = FindOldSegments(folder, kModel, through);
  EXPECT_TRUE(old) << old.error().message;
  return old ? *std::move(old) : OldSegments();
}

std::string Failure(const std::string& folder, std::uint64_t through) {
  const auto old = FindOldSegments(folder, kModel, through);
  return old ? "" : old.error().message;
}

std::size_t Files(const std::string& folder) {
  return static_cast<std::size_t>(
      std::distance(fs::directory_iterator(folder), fs::directory_iterator()));
}

class LogCollect : public testing::Test {
 protected:
  Scratch scratch_;
  std::string folder_ = scratch_.Path("logs");
};

TEST_F(LogCollect, TheFirstSegmentsOfEveryWriterGo) {
  Write(folder_, 0, 1, 8);
  Write(folder_, 1, 3, 8);
  const OldSegments old = Find(folder_, 4);
  EXPECT_EQ(old.segments, 4U + 2);
  EXPECT_EQ(old.segments + old.segments_kept, Files(folder_));
  ASSERT_EQ(old.rounds.size(), 4U);
  EXPECT_EQ(old.rounds[0], (std::vector<std::string>{folder_ + "/0-1.swg", folder_ + "/1-1.swg"}));
  EXPECT_EQ(old.rounds[3], (std::vector<std::string>{folder_ + "/0-4.swg"}));
  std::uint64_t bytes = 0;
  for (const auto& round : old.rounds) {
    for (const std::string& path : round) bytes += fs::file_size(path);
  }
  EXPECT_EQ(old.bytes, bytes);
  ASSERT_TRUE(RemoveSegments(folder_, old));
  EXPECT_EQ(Files(folder_), old.segments_kept);
  const auto log = GradientLog::Open(folder_, kModel);
  ASSERT_TRUE(log) << log.error().message;
  EXPECT_TRUE(log->torn().empty());
  EXPECT_EQ(ChainText(*log, 4, 8), "5 6 7 8 ");
  EXPECT_EQ(ChainText(*log, 3, 8), "gradients of \"m\", iteration 4: no record has them");
  EXPECT_EQ(Find(folder_, 4).segments, 0U);
}

TEST_F(LogCollect, TheLastSegmentStaysAndWritersGoOn) {
  Write(folder_, 0, 1, 5);
  Write(folder_, 1, 1, 5);
  auto writer = LogWriter::Open(folder_, Small(0));
  ASSERT_TRUE(writer);
  ASSERT_TRUE(RemoveSegments(folder_, Find(folder_, 1000)));
  EXPECT_EQ(Files(folder_), 2U);
  EXPECT_EQ(ErrorOf(folder_), "");
  // One that was open, and one that opens now.
  for (std::uint64_t i = 6; i <= 9; ++i) {
    ASSERT_TRUE(Append(&*writer, "m", i, 0, 5));
    ASSERT_TRUE(RemoveSegments(folder_, Find(folder_, i - 2)));
  }
  ASSERT_TRUE(writer->Persist());
  Write(folder_, 1, 6, 9);
  const auto log = GradientLog::Open(folder_, kModel);
  ASSERT_TRUE(log) << log.error().message;
  EXPECT_EQ(ChainText(*log, 7, 9), "8 9 ");
}

TEST_F(LogCollect, ARecordOfALaterIterationStopsItsWriterThere) {
  Write(folder_, 0, 1, 6);
  // Training has gone back: older iterations follow newer ones.
  Write(folder_, 0, 3, 6, 1);
  EXPECT_EQ(Find(folder_, 4).segments, 4U);
  EXPECT_EQ(Find(folder_, 5).segments, 5U);
  EXPECT_EQ(Find(folder_, 0).segments, 0U);
}

TEST_F(LogCollect, WhereverItIsInterruptedALogIsLeft) {
  Write(folder_, 0, 1, 6);
  Write(folder_, 1, 1, 6);
  const OldSegments old = Find(folder_, 4);
  ASSERT_EQ(old.rounds.size(), 4U);
  for (const auto& round : old.rounds) {
    for (const std::string& path : round) {
      fs::remove(path);
      const auto log = GradientLog::Open(folder_, kModel);
      ASSERT_TRUE(log) << path << ": " << log.error().message;
      EXPECT_EQ(ChainText(*log, 4, 6), "5 6 ");
    }
  }
}

TEST_F(LogCollect, NothingGoesThatTheEndOfAWriterNeeds) {
  Write(folder_, 0, 1, 4);
  std::uint64_t number = Files(folder_);
  const std::string last = folder_ + "/0-" + std::to_string(number) + ".swg";
  fs::resize_file(last, 30);  // a power failure has left a part of its head
  const OldSegments old = Find(folder_, 1000);
  EXPECT_EQ(old.segments, number - 2);
  ASSERT_TRUE(RemoveSegments(folder_, old));
  auto writer = LogWriter::Open(folder_, Small(0));
  ASSERT_TRUE(writer) << writer.error().message;
  ASSERT_TRUE(Append(&*writer, "m", 5));
  ASSERT_TRUE(writer->Persist());
  EXPECT_EQ(ErrorOf(folder_), "");
}

TEST_F(LogCollect, DamageInWhatItReadsIsTold) {
  Write(folder_, 0, 1, 6);
  const std::string second = folder_ + "/0-2.swg";
  const auto flip = [&](std::uint64_t at) {
    auto file = os::File::OpenWrite(second);
    ASSERT_TRUE(file);
    std::byte byte{};
    ASSERT_TRUE(file->ReadAt(at, std::span(&byte, 1)));
    byte ^= std::byte{1};
    ASSERT_TRUE(file->WriteAt(at, std::span(&byte, 1)));
  };
  flip(20);
  EXPECT_EQ(Failure(folder_, 4),
            second + ": not a segment of a gradient log, or its header is damaged");
  flip(20);
  flip(70);
  EXPECT_EQ(Failure(folder_, 4),
            second +
                ", byte 64: record 1 is damaged: the checksum of its header does "
                "not match");
  // The reader does not read records after the first one that is needed.
  EXPECT_EQ(Failure(folder_, 0), "");
  flip(70);
  fs::resize_file(second, fs::file_size(second) - 64);
  EXPECT_EQ(Failure(folder_, 4), second + ", byte 64: record 1 is damaged: it is truncated");
  fs::remove(second);
  EXPECT_EQ(Failure(folder_, 4), second + " is missing before 0-3.swg");
  const exec::Digest other = {9};
  EXPECT_EQ(FindOldSegments(folder_, other, 4).error().code, Errc::kBadInput);
}

TEST_F(LogCollect, AWriterGoesOnWhateverOthersLack) {
  Write(folder_, 0, 1, 4);
  Write(folder_, 1, 1, 4);
  fs::remove(folder_ + "/0-2.swg");
  EXPECT_EQ(Failure(folder_, 1), folder_ + "/0-2.swg is missing before 0-3.swg");
  EXPECT_TRUE(LogWriter::Open(folder_, Small(1)));
  EXPECT_FALSE(LogWriter::Open(folder_, Small(0)));
}

TEST_F(LogCollect, ReadersAndWritersBesideIt) {
  Write(folder_, 0, 1, 60);
  Write(folder_, 1, 1, 60);
  std::atomic<bool> done = false;
  std::thread reader([&] {
    while (!done) {
      const auto log = GradientLog::Open(folder_, kModel, 2);
      ASSERT_TRUE(log) << log.error().message;
      EXPECT_EQ(ChainText(*log, 58, 60), "59 60 ");
    }
  });
  std::thread writer([&] {
    for (std::uint64_t i = 1; i <= 20; ++i) {
      auto log = LogWriter::Open(folder_, Small(2));
      ASSERT_TRUE(log) << log.error().message;
      ASSERT_TRUE(Append(&*log, "other", i));
      ASSERT_TRUE(log->Persist());
    }
  });
  for (std::uint64_t through = 1; through <= 58; ++through) {
    const auto old = FindOldSegments(folder_, kModel, through);
    ASSERT_TRUE(old) << old.error().message;
    EXPECT_TRUE(RemoveSegments(folder_, *old));
  }
  writer.join();
  done = true;
  reader.join();
  EXPECT_EQ(ErrorOf(folder_), "");
}

}  // namespace
}  // namespace shardwright::partial
