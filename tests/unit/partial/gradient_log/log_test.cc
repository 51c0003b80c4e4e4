// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "log_fixture.h"
#include "support/os/fault.h"

namespace shardwright::partial {
namespace {

TEST(GradientLog, GivesTheChainThatWasWritten) {
  const Scratch scratch;
  const std::string folder = scratch.Path("logs");
  auto writer = LogWriter::Open(folder, Options());
  ASSERT_TRUE(writer) << writer.error().message;
  for (std::uint64_t i = 1; i <= 5; ++i) {
    ASSERT_TRUE(Append(&*writer, "m", i));
    ASSERT_TRUE(Append(&*writer, "other", i));
  }
  ASSERT_TRUE(writer->Persist());
  const auto log = GradientLog::Open(folder, kModel);
  ASSERT_TRUE(log) << log.error().message;
  EXPECT_TRUE(log->torn().empty());
  EXPECT_EQ(ChainText(*log, 2, 5), "3 4 5 ");
  EXPECT_EQ(ChainText(*log, 5, 5), "");
  EXPECT_EQ(ChainText(*log, 2, 6), "gradients of \"m\", iteration 6: no record has them");
  EXPECT_EQ(log->Modules().at("other"), (std::vector<std::uint64_t>{1, 2, 3, 4, 5}));
  const auto chain = log->ChainOf("m", kParams, 0, 1, {});
  ASSERT_TRUE(chain);
  EXPECT_EQ(*chain->at(0).pieces.at(0).step, StepAt(1));
}

TEST(GradientLog, RangesOfManyWritersMakeOneLink) {
  const Scratch scratch;
  const std::string folder = scratch.Path("logs");
  for (std::uint32_t rank = 0; rank < 3; ++rank) {
    LogWriterOptions options = Options(rank);
    options.zstd_level = rank == 1 ? 3 : 0;
    options.segment_bytes = 600;  // a segment for nearly every record
    auto writer = LogWriter::Open(folder, options);
    ASSERT_TRUE(writer);
    for (std::uint64_t i = 1; i <= 4; ++i) {
      if ((rank == 2 && i == 3) || (rank == 1 && i == 4)) continue;
      ASSERT_TRUE(Append(&*writer, "m", i, std::uint64_t{4} * rank,
                         std::min<std::uint64_t>(kElems, std::uint64_t{4} * rank + 4)));
    }
    ASSERT_TRUE(writer->Persist());
  }
  const auto log = GradientLog::Open(folder, kModel);
  ASSERT_TRUE(log) << log.error().message;
  EXPECT_EQ(ChainText(*log, 0, 2), "1 2 ");
  EXPECT_EQ(ChainText(*log, 0, 4),
            "gradients of \"m\", iteration 3: parameter \"w\": elements 8 to 9 are missing");
  EXPECT_EQ(ChainText(*log, 3, 4),
            "gradients of \"m\", iteration 4: parameter \"w\": elements 4 to 7 are missing");
}

TEST(GradientLog, CompressesWhereThatIsSmaller) {
  const Scratch scratch;
  const std::string folder = scratch.Path("logs");
  LogWriterOptions options = Options();
  options.zstd_level = 3;
  auto writer = LogWriter::Open(folder, options);
  ASSERT_TRUE(writer);
  const std::vector<std::byte> zeros(100'000);
  const LogStep step = StepAt(1);
  GradientRange range{"w", 25'000, 0, DType::kF32, 0, 25'000, zeros};
  ASSERT_TRUE(writer->Append(1, "m", std::span(&step, 1), std::span(&range, 1)));
  ASSERT_TRUE(writer->Persist());
  const auto log = GradientLog::Open(folder, kModel);
  ASSERT_TRUE(log);
  const std::vector<LoggedParam> params = {{"w", 25'000}};
  const auto chain = log->ChainOf("m", params, 0, 1, {});
  ASSERT_TRUE(chain);
  EXPECT_LT(chain->at(0).pieces.at(0).piece->bytes, 1000U);
  EXPECT_EQ(ReadPiece(*log, chain->at(0).pieces.at(0)).value(), zeros);
}

TEST(GradientLog, SkippedStepsHaveNoBytesAndAreCounted) {
  const Scratch scratch;
  const std::string folder = scratch.Path("logs");
  auto writer = LogWriter::Open(folder, Options());
  ASSERT_TRUE(writer);
  ASSERT_TRUE(Append(&*writer, "m", 1));
  LogStep skipped = StepAt(1);
  skipped.step.skipped = true;
  const GradientRange range{"w", kElems, 0, DType::kBF16, 0, kElems, {}};
  ASSERT_TRUE(writer->Append(2, "m", std::span(&skipped, 1), std::span(&range, 1)));
  ASSERT_TRUE(Append(&*writer, "m", 3));  // counts 3, and the second step has not been made
  const auto log = GradientLog::Open(folder, kModel);
  ASSERT_TRUE(log);
  EXPECT_EQ(ChainText(*log, 0, 2), "1 2 ");
  EXPECT_EQ(ChainText(*log, 0, 3),
            "gradients of \"m\", iteration 3: parameter \"w\": step 2 expected, found 3");
}

TEST(GradientLog, WhatARecoveryHasGivenUpIsNotLookedAt) {
  const Scratch scratch;
  const std::string folder = scratch.Path("logs");
  {
    auto writer = LogWriter::Open(folder, Options());
    ASSERT_TRUE(writer);
    for (std::uint64_t i = 1; i <= 4; ++i) ASSERT_TRUE(Append(&*writer, "m", i));
    ASSERT_TRUE(writer->Persist());
  }
  LogWriterOptions options = Options();
  options.recovery = 1;
  auto writer = LogWriter::Open(folder, options);
  ASSERT_TRUE(writer);
  ASSERT_TRUE(Append(&*writer, "m", 3));
  const auto log = GradientLog::Open(folder, kModel);
  ASSERT_TRUE(log);
  RecoveryRecord recovery;
  recovery.sequence = 1;
  recovery.resume = 2;
  const std::vector<RecoveryRecord> recoveries = {recovery};
  EXPECT_EQ(ChainText(*log, 0, 3, recoveries), "1 2 3 ");
  EXPECT_EQ(ChainText(*log, 0, 4, recoveries),
            "gradients of \"m\", iteration 4: no record has them");
  EXPECT_EQ(ChainText(*log, 0, 3),
            "gradients of \"m\", iteration 3: parameter \"w\": elements 0 to 9 come twice, the "
            "second time in " +
                folder + "/0-1.swg");
}

TEST(GradientLog, RecordsThatContradictEachOtherAreNoChain) {
  const Scratch scratch;
  const std::string folder = scratch.Path("logs");
  auto writer = LogWriter::Open(folder, Options());
  ASSERT_TRUE(writer);
  ASSERT_TRUE(Append(&*writer, "m", 1));
  const auto log = GradientLog::Open(folder, kModel);
  ASSERT_TRUE(log);
  const std::vector<LoggedParam> larger = {{"w", 11}};
  auto chain = log->ChainOf("m", larger, 0, 1, {});
  ASSERT_FALSE(chain);
  EXPECT_EQ(chain.error().code, Errc::kBadInput);
  EXPECT_EQ(chain.error().message,
            "gradients of \"m\", iteration 1: parameter \"w\": 11 elements expected, found 10 in " +
                folder + "/0-1.swg");
  const std::vector<LoggedParam> other = {{"v", 10}};
  chain = log->ChainOf("m", other, 0, 1, {});
  ASSERT_FALSE(chain);
  EXPECT_EQ(chain.error().code, Errc::kBadInput);
}

TEST(LogWriter, RefusesWhatNoReaderWouldTake) {
  const Scratch scratch;
  auto writer = LogWriter::Open(scratch.Path("logs"), Options());
  ASSERT_TRUE(writer);
  LogStep step = StepAt(1);
  const std::vector<std::byte> bytes(40);
  const auto append = [&](const GradientRange& range) {
    const Status status = writer->Append(1, "m", std::span(&step, 1), std::span(&range, 1));
    return status ? std::string() : status.error().message;
  };
  EXPECT_EQ(append({"w", 10, 0, DType::kF32, 0, 9, bytes}),
            "gradients of \"m\", iteration 1, parameter \"w\": 36 bytes expected, found 40");
  EXPECT_NE(append({"w", 10, 5, DType::kF32, 0, 10, bytes}), "");
  EXPECT_NE(append({"w", 10, 0, DType::kF32, 1, 10, bytes}), "");
  EXPECT_NE(append({"w", 5, 0, DType::kF64, 0, 5, bytes}), "");
  EXPECT_NE(append({"\xff", 10, 0, DType::kF32, 0, 10, bytes}), "");
  step.step.lr = std::numeric_limits<double>::infinity();
  EXPECT_EQ(append({"w", 10, 0, DType::kF32, 0, 10, bytes}),
            "gradients of \"m\", iteration 1: \"lr\" is not finite");
  // Nothing of it was written.
  ASSERT_TRUE(Append(&*writer, "m", 1));
  const auto log = GradientLog::Open(scratch.Path("logs"), kModel);
  ASSERT_TRUE(log);
  EXPECT_EQ(ChainText(*log, 0, 1), "1 ");
}

TEST(Roots, AreKeptByTheirDigest) {
  const Scratch scratch;
  std::vector<std::byte> codes(optimizer_steps::RootTable::kBytes, std::byte{0x19});
  const auto table = optimizer_steps::RootTable::FromBytes(codes, 0x7F000000U);
  ASSERT_TRUE(table);
  const auto digest = PutRoots(scratch.path(), *table);
  ASSERT_TRUE(digest);
  EXPECT_EQ(PutRoots(scratch.path(), *table).value(), *digest);
  const auto again = GetRoots(scratch.path(), *digest);
  ASSERT_TRUE(again);
  EXPECT_EQ(again->last(), 0x7F000000U);
  EXPECT_TRUE(std::ranges::equal(again->bytes(), codes));
  const std::string path = scratch.Path("roots-" + exec::Hex(*digest) + ".swr");
  auto bytes = os::ReadWholeFile(path, 1 << 23).value();
  bytes[1000] ^= std::byte{4};
  ASSERT_TRUE(os::ReplaceFile(path, bytes));
  EXPECT_EQ(GetRoots(scratch.path(), *digest).error().code, Errc::kBadInput);
  // Nor are they in the way of segments.
  ASSERT_TRUE(LogWriter::Open(scratch.path(), Options()));
}

}  // namespace
}  // namespace shardwright::partial
