// SPDX-License-Identifier: Apache-2.0
// Damage of every kind: the error names it, or it is a tail without records after it. The accepted
// part is a prefix of the written records, and never anything else.

#include <algorithm>
#include <fstream>

#include "log_fixture.h"
#include "support/os/fault.h"

namespace shardwright::partial {
namespace {

using Bytes = std::vector<std::byte>;

/// The bytes of the only segment of a log of iterations 1 to 3 of module "m".
Bytes SmallSegment(const std::string& folder, bool marked) {
  auto writer = LogWriter::Open(folder, Options());
  EXPECT_TRUE(writer.has_value());
  for (std::uint64_t i = 1; i <= 3; ++i) EXPECT_TRUE(Append(&*writer, "m", i));
  if (marked) {
    EXPECT_TRUE(writer->Persist());
  }
  return os::ReadWholeFile(folder + "/0-1.swg", 1 << 20).value();
}

/// Returns the offsets of the records, and the end.
std::vector<std::size_t> Records(const Bytes& segment) {
  const std::string magic = "SWGRADR1";
  std::vector<std::size_t> at;
  for (std::size_t i = 64; i < segment.size(); i += 64) {
    const auto* const text = reinterpret_cast<const char*>(segment.data() + i);
    if (std::equal(magic.begin(), magic.end(), text)) at.push_back(i);
  }
  at.push_back(segment.size());
  return at;
}

/// Returns n if iterations 1 to n are accepted; fails for anything else.
std::size_t Accepted(const GradientLog& log) {
  const auto modules = log.Modules();
  if (modules.empty()) return 0;
  EXPECT_EQ(modules.size(), 1U);
  const auto& iterations = modules.begin()->second;
  std::string expected;
  for (std::size_t i = 0; i < iterations.size(); ++i) {
    EXPECT_EQ(iterations[i], i + 1);
    expected += std::to_string(i + 1) + " ";
  }
  EXPECT_EQ(ChainText(log, 0, iterations.size()), expected);
  return iterations.size();
}

void Put(const std::string& path, const Bytes& bytes) {
  std::ofstream out(path, std::ios::binary);
  out.write(reinterpret_cast<const char*>(bytes.data()),
            static_cast<std::streamsize>(bytes.size()));
}

TEST(LogDamage, AFlippedByteIsNeverAccepted) {
  for (const bool marked : {true, false}) {
    const Scratch scratch;
    const std::string folder = scratch.Path("logs");
    const std::string path = folder + "/0-1.swg";
    const Bytes good = SmallSegment(folder, marked);
    const std::vector<std::size_t> records = Records(good);
    ASSERT_EQ(records.size(), marked ? 5U : 4U);
    const std::size_t last = records[records.size() - 2];
    for (std::size_t i = 0; i < good.size(); ++i) {
      const auto one_bit = static_cast<std::byte>(1U << (i % 8));
      for (const std::byte mask : {one_bit, std::byte{0xFF}}) {
        if (!marked && mask != one_bit) continue;
        Bytes bad = good;
        bad[i] ^= mask;
        Put(path, bad);
        const auto log = GradientLog::Open(folder, kModel);
        // Records without a mark after them were not promised to be durable, even if others follow.
        if (i < records[0] || (marked && i < last)) {
          ASSERT_FALSE(log) << "byte " << i;
          EXPECT_EQ(log.error().code, Errc::kBadInput) << log.error().message;
          EXPECT_TRUE(log.error().message.starts_with(path)) << log.error().message;
        } else {
          ASSERT_TRUE(log) << "byte " << i << ": " << log.error().message;
          const auto hit = std::ranges::upper_bound(records, i) - records.begin() - 1;
          EXPECT_EQ(Accepted(*log), static_cast<std::size_t>(hit));
          ASSERT_EQ(log->torn().size(), 1U);
          EXPECT_EQ(log->torn()[0].bytes, good.size() - records[static_cast<std::size_t>(hit)]);
        }
      }
    }
  }
}

TEST(LogDamage, AFileThatEndsEarlyIsATornTail) {
  const Scratch scratch;
  const std::string folder = scratch.Path("logs");
  const std::string path = folder + "/0-1.swg";
  const Bytes good = SmallSegment(folder, false);
  const std::vector<std::size_t> records = Records(good);
  for (std::size_t size = 0; size < good.size(); size += size < 130 ? 1 : 13) {
    Put(path, Bytes(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(size)));
    const auto log = GradientLog::Open(folder, kModel);
    ASSERT_TRUE(log) << size << ": " << log.error().message;
    const auto whole = std::ranges::count_if(records, [&](std::size_t at) { return at <= size; });
    EXPECT_EQ(Accepted(*log), static_cast<std::size_t>(std::max<std::ptrdiff_t>(whole, 1) - 1));
    // A writer cuts it off and continues.
    auto writer = LogWriter::Open(folder, Options());
    ASSERT_TRUE(writer) << size << ": " << writer.error().message;
    const std::uint64_t next = Accepted(*log) + 1;
    ASSERT_TRUE(Append(&*writer, "m", next));
    ASSERT_TRUE(writer->Persist());
    const auto again = GradientLog::Open(folder, kModel);
    ASSERT_TRUE(again) << size << ": " << again.error().message;
    EXPECT_EQ(Accepted(*again), next);
    EXPECT_TRUE(again->torn().empty());
  }
}

TEST(LogDamage, ZerosAndNoiseBehindTheEndAreATornTail) {
  const Scratch scratch;
  const std::string folder = scratch.Path("logs");
  Bytes bytes = SmallSegment(folder, true);
  for (const std::byte fill : {std::byte{0}, std::byte{0xA5}}) {
    Bytes longer = bytes;
    longer.resize(bytes.size() + 1000, fill);
    Put(folder + "/0-1.swg", longer);
    const auto log = GradientLog::Open(folder, kModel);
    ASSERT_TRUE(log);
    EXPECT_EQ(Accepted(*log), 3U);
    EXPECT_EQ(log->torn().at(0).bytes, 1000U);
  }
}

TEST(LogDamage, RecordsMissingTwiceOrOutOfOrderAreNamed) {
  const Scratch scratch;
  const std::string folder = scratch.Path("logs");
  const std::string path = folder + "/0-1.swg";
  const Bytes good = SmallSegment(folder, true);
  const std::vector<std::size_t> at = Records(good);
  const auto put = [&](const std::vector<std::size_t>& order) {
    Bytes bytes(good.begin(), good.begin() + 64);
    for (const std::size_t i : order) {
      bytes.insert(bytes.end(), good.begin() + static_cast<std::ptrdiff_t>(at[i]),
                   good.begin() + static_cast<std::ptrdiff_t>(at[i + 1]));
    }
    Put(path, bytes);
    return ErrorOf(folder);
  };
  EXPECT_EQ(put({0, 1, 2, 3}), "");
  EXPECT_EQ(put({0, 2, 3}), path + ", byte " + std::to_string(at[1]) +
                                ": records 1 to 1 are missing before record 2");
  EXPECT_EQ(put({0, 1, 1, 2, 3}),
            path + ", byte " + std::to_string(at[2]) +
                ": record 2 expected, found 1, which comes twice or out of order");
  EXPECT_EQ(put({1, 0, 2, 3}), path + ", byte 64: records 0 to 0 are missing before record 1");
}

TEST(LogDamage, RecordsOfAnotherLogAreNamed) {
  const Scratch scratch;
  const std::string folder = scratch.Path("logs");
  const Bytes good = SmallSegment(folder, true);
  auto other = LogWriter::Open(scratch.Path("other"), Options());
  ASSERT_TRUE(other);
  for (const std::uint64_t i : {7U, 8U, 9U}) ASSERT_TRUE(Append(&*other, "m", i));
  const Bytes foreign = os::ReadWholeFile(scratch.Path("other/0-1.swg"), 1 << 20).value();
  const auto at = Records(good);
  const auto theirs = Records(foreign);
  Bytes mixed(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(at[1]));
  mixed.insert(mixed.end(), foreign.begin() + static_cast<std::ptrdiff_t>(theirs[1]),
               foreign.end());
  Put(folder + "/0-1.swg", mixed);
  EXPECT_EQ(ErrorOf(folder), folder + "/0-1.swg, byte " + std::to_string(at[1]) +
                                 ": record 1 does not continue the record before it: they belong "
                                 "to different logs");
}

/// A log of four segments, of two records or so each.
std::string ManySegments(const Scratch& scratch) {
  std::string folder = scratch.Path("logs");
  LogWriterOptions options = Options();
  options.segment_bytes = 1500;
  auto writer = LogWriter::Open(folder, options);
  EXPECT_TRUE(writer.has_value());
  for (std::uint64_t i = 1; i <= 8; ++i) EXPECT_TRUE(Append(&*writer, "m", i));
  EXPECT_TRUE(writer->Persist());
  return folder;
}

TEST(LogDamage, SegmentsMissingTwiceOrCutAreNamed) {
  const Scratch scratch;
  const std::string folder = ManySegments(scratch);
  const auto segments = os::ListDir(folder).value();
  ASSERT_GE(segments.size(), 4U);
  const Bytes second = os::ReadWholeFile(folder + "/0-2.swg", 1 << 20).value();
  const Bytes third = os::ReadWholeFile(folder + "/0-3.swg", 1 << 20).value();
  EXPECT_EQ(ErrorOf(folder), "");

  ASSERT_TRUE(os::RemoveFile(folder + "/0-2.swg"));
  EXPECT_EQ(ErrorOf(folder), folder + "/0-2.swg is missing before 0-3.swg");
  Put(folder + "/0-2.swg", third);
  EXPECT_EQ(ErrorOf(folder), folder + "/0-2.swg: segment 0-3.swg under another name");
  // Whole records cut off, and half of one, where segments follow.
  const auto at = Records(second);
  Put(folder + "/0-2.swg",
      Bytes(second.begin(), second.begin() + static_cast<std::ptrdiff_t>(at[at.size() - 2])));
  EXPECT_TRUE(ErrorOf(folder).starts_with(folder + "/0-3.swg: record ")) << ErrorOf(folder);
  Put(folder + "/0-2.swg", Bytes(second.begin(), second.end() - 64));
  EXPECT_TRUE(ErrorOf(folder).ends_with("is damaged: it is truncated")) << ErrorOf(folder);
  Put(folder + "/0-2.swg", Bytes(second.begin(), second.begin() + 10));
  EXPECT_EQ(ErrorOf(folder),
            folder + "/0-2.swg: its header is truncated, but later segments exist");
  Put(folder + "/0-2.swg", second);
  EXPECT_EQ(ErrorOf(folder), "");
  // Segments that were collected: the log begins later.
  ASSERT_TRUE(os::RemoveFile(folder + "/0-1.swg"));
  const auto log = GradientLog::Open(folder, kModel);
  ASSERT_TRUE(log) << log.error().message;
  EXPECT_NE(log->Modules().at("m").front(), 1U);
}

TEST(LogDamage, OtherModelsAndStrangersAreRefused) {
  const Scratch scratch;
  const std::string folder = scratch.Path("logs");
  SmallSegment(folder, true);
  const auto log = GradientLog::Open(folder, exec::Digest{9});
  ASSERT_FALSE(log);
  EXPECT_EQ(log.error().code, Errc::kMismatch);
  EXPECT_EQ(LogWriter::Open(folder, LogWriterOptions{}).error().code, Errc::kMismatch);
  ASSERT_TRUE(os::ReplaceFile(folder + "/0-01.swg", std::string_view("x")));
  EXPECT_EQ(ErrorOf(folder), folder + "/0-01.swg: not a file of a gradient log");
}

TEST(LogDamage, AWriterGoesOnWhateverCallFailed) {
  std::uint64_t calls = 0;
  {
    const Scratch scratch;
    const os::ScopedFault count;
    ManySegments(scratch);
    calls = count.CountMutating();
  }
  ASSERT_GT(calls, 20U);
  for (std::uint64_t call = 1; call <= calls; ++call) {
    for (const char* const action : {"any:eio", "any:enospc", "write:short"}) {
      const Scratch scratch;
      const std::string folder = scratch.Path("logs");
      LogWriterOptions options = Options();
      options.segment_bytes = 1500;
      std::uint64_t durable = 0;
      {
        const std::string spec = action;
        const std::string at = ":" + std::to_string(call);
        const auto rule = os::ParseFault(std::string(spec).insert(spec.find(':'), at));
        ASSERT_TRUE(rule) << rule.error().message;
        const os::ScopedFault fault(*rule);
        auto writer = LogWriter::Open(folder, options);
        for (std::uint64_t i = 1; writer && i <= 8; ++i) {
          if (!Append(&*writer, "m", i)) break;
          if (!writer->Persist()) break;
          durable = i;
        }
      }
      auto writer = LogWriter::Open(folder, options);
      ASSERT_TRUE(writer) << call << " " << action << ": " << writer.error().message;
      const auto log = GradientLog::Open(folder, kModel);
      ASSERT_TRUE(log) << call << " " << action << ": " << log.error().message;
      // Persisted records are there; records that a failed call has written may be there.
      const std::size_t found = Accepted(*log);
      EXPECT_GE(found, durable) << call << " " << action;
      ASSERT_TRUE(Append(&*writer, "m", found + 1));
      ASSERT_TRUE(writer->Persist());
      const auto again = GradientLog::Open(folder, kModel);
      ASSERT_TRUE(again) << call << " " << action << ": " << again.error().message;
      EXPECT_EQ(Accepted(*again), found + 1);
    }
  }
}

}  // namespace
}  // namespace shardwright::partial
