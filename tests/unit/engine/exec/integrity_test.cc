// SPDX-License-Identifier: Apache-2.0
#include "engine/exec/integrity.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "engine/exec/verify.h"
#include "memory_bytes.h"
#include "support/comm/threads.h"

namespace shardwright::exec {
namespace {

std::span<const std::byte> BytesOf(const std::string& text) {
  return std::as_bytes(std::span(text));
}

TEST(Digests, AreXxh3OfOneHundredAndTwentyEightBits) {
  // BytesOf an empty input, as in the algorithm's own documentation.
  EXPECT_EQ(Hex(DigestOf({})), "99aa06d3014798d86001c324468d497f");
  EXPECT_NE(DigestOf(BytesOf("a")), DigestOf(BytesOf("b")));
}

TEST(Digests, OfPiecesAreThoseOfTheWhole) {
  std::string text;
  std::mt19937 dice(5);
  for (int i = 0; i < 5000; ++i) text += static_cast<char>(dice());
  DigestStream stream;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t count = std::min<std::size_t>(dice() % 700, text.size() - at);
    stream.Add(BytesOf(text).subspan(at, count));
    at += count;
  }
  EXPECT_EQ(stream.Finish(), DigestOf(BytesOf(text)));
}

TEST(Sums, DoNotDependOnTheOrderOfPieces) {
  const std::string text = "what a member holds, in three pieces";
  const auto share = [&](std::size_t first, std::size_t count) {
    return Share{1, Crc32Share(Crc(text.substr(first, count)), text.size() - first - count), count};
  };
  const std::vector<Share> pieces = {share(20, text.size() - 20), share(0, 7), share(7, 13)};
  SourceSums here(2);
  SourceSums there(2);
  here.Add(std::span(pieces).first(1));
  there.Add(std::span(pieces).subspan(1));
  here.Combine(there.Pack());
  EXPECT_EQ(here.crc(1), Crc(text));
  EXPECT_EQ(here.bytes(1), text.size());
  EXPECT_EQ(here.bytes(0), 0U);
}

/// A member of 40 bytes of which a plan reads 8 to 24.
class Verified : public testing::Test {
 protected:
  void SetUp() override {
    const std::uint32_t array = source_.Array(DType::kF32, 10);
    source_.Tensor("w", "fp32", DType::kF32, {4})
        .fragments.push_back(
            {plan::MapMaker::Cut(layout::Cut::Whole({4})), {array, 2}, layout::Role::kOwner});
    plan::MapMaker wanted;
    wanted.Whole("w", "fp32", DType::kF32, {4});
    target_ = wanted.AsTarget();
    for (int i = 0; i < 40; ++i) bytes_ += static_cast<char>('A' + i);
    source_.map.members[0].crc32 = Crc(bytes_);
  }

  Result<MembersVerified> Verify(const std::string& bytes) {
    auto plan = plan::Plan::Make(source_.map, target_);
    EXPECT_TRUE(plan.has_value());
    SourceSums sums(1);
    const Share share{0, Crc32Share(Crc(bytes.substr(8, 16)), 16), 16};
    sums.Add({&share, 1});
    MemoryBytes source({bytes});
    tbb::task_arena arena(2);
    return VerifyMembers(*plan, sums, {.source = &source}, arena);
  }

  plan::MapMaker source_;
  plan::Target target_;
  std::string bytes_;
};

TEST_F(Verified, WithWhatUnitsDidNotRead) { EXPECT_EQ(Verify(bytes_).value().verified, 1U); }

TEST_F(Verified, DamageIsFoundWhereverItIs) {
  for (std::size_t at = 0; at < bytes_.size(); ++at) {
    std::string damaged = bytes_;
    damaged[at] = static_cast<char>(damaged[at] ^ 1);
    const auto verified = Verify(damaged);
    ASSERT_FALSE(verified.has_value()) << at;
    EXPECT_EQ(verified.error().code, Errc::kBadInput);
    for (const char* word : {"file0", "data/0", "\"w\" fp32", "CRC-32"}) {
      EXPECT_NE(verified.error().message.find(word), std::string::npos) << verified.error().message;
    }
  }
}

// The gaps of a plan are longer than one read.
TEST(Gaps, OfSeveralUnitsAreReadFromOneEndToTheOther) {
  constexpr std::uint64_t kAll = plan::kUnitBytes;  // 4 MiB
  plan::MapMaker source, wanted;
  const std::uint32_t array = source.Array(DType::kF32, kAll);
  source.Tensor("w", "fp32", DType::kF32, {4})
      .fragments.push_back(
          {plan::MapMaker::Cut(layout::Cut::Whole({4})), {array, 2}, layout::Role::kOwner});
  wanted.Whole("w", "fp32", DType::kF32, {4});
  const plan::Target target = wanted.AsTarget();
  std::string bytes(kAll * 4, '\0');
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 31 >> 7);
  source.map.members[0].crc32 = Crc(bytes);
  const auto plan = plan::Plan::Make(source.map, target);
  ASSERT_TRUE(plan.has_value()) << plan.error().message;
  SourceSums sums(1);
  const Share share{0, Crc32Share(Crc(bytes.substr(8, 16)), bytes.size() - 24), 16};
  sums.Add({&share, 1});
  MemoryBytes memory({bytes});
  tbb::task_arena arena(2);
  const auto verified = VerifyMembers(*plan, sums, {.source = &memory}, arena);
  ASSERT_TRUE(verified) << verified.error().message;
  EXPECT_EQ(verified->verified, 1U);
}

TEST(Sums, OfAllRanksAreEveryRanks) {
  const auto answers = comm::RunThreads(3, [](comm::Comm& comm) -> Status {
    const auto rank = static_cast<std::uint32_t>(comm.rank());
    SourceSums sums(3);
    const Share share{rank, 100 + rank, 10 + rank};
    sums.Add({&share, 1});
    SW_TRY(CombineSums(comm, &sums));
    for (std::uint32_t m = 0; m < 3; ++m) {
      EXPECT_EQ(sums.crc(m), 100 + m);
      EXPECT_EQ(sums.bytes(m), 10 + m);
    }
    return {};
  });
  for (const Status& answer : answers) EXPECT_TRUE(answer);
}

TEST_F(Verified, WithoutAChecksumIsNotSaid) {
  source_.map.members[0].crc32.reset();
  const MembersVerified members = Verify(bytes_).value();
  EXPECT_EQ(members.verified, 0U);
  EXPECT_EQ(members.without_sum, 1U);
}

}  // namespace
}  // namespace shardwright::exec
