// SPDX-License-Identifier: Apache-2.0
#include "partial/agent/buffers.h"

#include <string>

#include <gtest/gtest.h>

namespace shardwright::partial {
namespace {

using enum BufferState;

const ModuleId kRest{0, kNonExpert};

std::shared_ptr<const void> Bytes(const std::string& text) {
  return std::make_shared<const std::string>(text);
}

// A snapshot of one expert and the non-expert module.
std::size_t Snapshot(SnapshotBuffers* buffers, std::uint64_t iteration, std::int32_t expert) {
  const auto buffer = buffers->Begin(iteration);
  EXPECT_TRUE(buffer) << buffer.error().message;
  EXPECT_TRUE(buffers->Put(kRest, Bytes("rest")));
  EXPECT_TRUE(buffers->Put({0, expert}, Bytes("expert")));
  EXPECT_TRUE(buffers->End());
  return buffer ? *buffer : 0;
}

std::uint64_t VersionIn(const SnapshotBuffers& buffers, std::size_t buffer, std::int32_t expert) {
  const auto found = buffers.content(buffer).find({0, expert});
  return found == buffers.content(buffer).end() ? 0 : found->second.version;
}

TEST(Buffers, APersistMakesTheBufferToRecoverFrom) {
  SnapshotBuffers buffers;
  EXPECT_FALSE(buffers.StartPersist());
  const std::size_t first = Snapshot(&buffers, 10, 0);
  EXPECT_EQ(buffers.state(first), kFilled);
  ASSERT_EQ(buffers.StartPersist(), first);
  EXPECT_EQ(buffers.state(first), kPersisting);
  EXPECT_FALSE(buffers.StartPersist());  // one at a time
  ASSERT_TRUE(buffers.EndPersist());
  EXPECT_EQ(buffers.state(first), kRecovery);
  const std::size_t second = Snapshot(&buffers, 20, 1);
  ASSERT_EQ(buffers.StartPersist(), second);
  ASSERT_TRUE(buffers.EndPersist());
  EXPECT_EQ(buffers.state(first), kIdle);
  EXPECT_TRUE(buffers.content(first).empty());
  EXPECT_EQ(buffers.state(second), kRecovery);
}

// Without this, memory would forget the experts of all but the last three checkpoints.
TEST(Buffers, ASnapshotStartsWithTheNewestCompleteContent) {
  SnapshotBuffers buffers;
  for (std::int32_t e = 0; e < 6; ++e) {
    const std::size_t buffer = Snapshot(&buffers, 10 * (static_cast<std::uint64_t>(e) + 1), e);
    for (std::int32_t old = 0; old <= e; ++old) {
      EXPECT_EQ(VersionIn(buffers, buffer, old), 10 * (static_cast<std::uint64_t>(old) + 1));
    }
    if (buffers.StartPersist()) {
      ASSERT_TRUE(buffers.EndPersist());
    }
  }
}

TEST(Buffers, BlobsAreShared) {
  SnapshotBuffers buffers;
  Snapshot(&buffers, 10, 0);
  const std::size_t second = Snapshot(&buffers, 20, 1);
  EXPECT_EQ(buffers.content(second).at({0, 0}).data.use_count(), 2);
}

TEST(Buffers, AnIterationBegunAgainTakesThePlaceOfTheFirst) {
  SnapshotBuffers buffers;
  const std::size_t filled = Snapshot(&buffers, 10, 0);
  const std::size_t second = Snapshot(&buffers, 10, 0);
  EXPECT_NE(second, filled);
  EXPECT_EQ(buffers.state(filled), kIdle);
  EXPECT_EQ(buffers.NewestComplete(), second);
  ASSERT_EQ(buffers.StartPersist(), second);
  // A buffer that is persisting, or kept for recovery, stays until the later one is durable.
  const std::size_t third = Snapshot(&buffers, 10, 0);
  EXPECT_EQ(buffers.state(second), kPersisting);
  EXPECT_EQ(buffers.NewestComplete(), third);
  ASSERT_TRUE(buffers.EndPersist());
  ASSERT_EQ(buffers.StartPersist(), third);
  ASSERT_TRUE(buffers.EndPersist());
  EXPECT_EQ(buffers.state(second), kIdle);
  EXPECT_EQ(buffers.state(third), kRecovery);
}

TEST(Buffers, ASlowPersistIsSkippedOver) {
  SnapshotBuffers buffers;
  const std::size_t slow = Snapshot(&buffers, 10, 0);
  ASSERT_EQ(buffers.StartPersist(), slow);
  const std::size_t second = Snapshot(&buffers, 20, 1);
  const std::size_t third = Snapshot(&buffers, 30, 2);
  EXPECT_EQ(buffers.skipped(), 0U);
  const auto fourth = buffers.Begin(40);  // no idle one: the oldest filled one is discarded
  ASSERT_TRUE(fourth);
  EXPECT_EQ(*fourth, second);
  EXPECT_EQ(buffers.skipped(), 1U);
  EXPECT_EQ(VersionIn(buffers, *fourth, 2), 30U);
  ASSERT_TRUE(buffers.Put(kRest, Bytes("rest")));
  ASSERT_TRUE(buffers.End());
  ASSERT_TRUE(buffers.EndPersist());
  ASSERT_EQ(buffers.StartPersist(), *fourth);  // the newest; older ones never follow
  EXPECT_EQ(buffers.state(third), kIdle);
  EXPECT_EQ(buffers.skipped(), 2U);
}

TEST(Buffers, AFailedPersist) {
  SnapshotBuffers buffers;
  const std::size_t first = Snapshot(&buffers, 10, 0);
  ASSERT_EQ(buffers.StartPersist(), first);
  ASSERT_TRUE(buffers.FailPersist());
  EXPECT_EQ(buffers.state(first), kFilled);  // nothing newer: persisting starts again
  ASSERT_EQ(buffers.StartPersist(), first);
  const std::size_t second = Snapshot(&buffers, 20, 1);
  ASSERT_TRUE(buffers.FailPersist());
  EXPECT_EQ(buffers.state(first), kIdle);
  EXPECT_EQ(buffers.state(second), kFilled);
  EXPECT_EQ(buffers.failed(), 2U);
}

TEST(Buffers, AFaultWhileFilling) {
  SnapshotBuffers buffers;
  const std::size_t first = Snapshot(&buffers, 10, 0);
  const auto second = buffers.Begin(20);
  ASSERT_TRUE(second);
  ASSERT_TRUE(buffers.Put({0, 0}, Bytes("half")));
  buffers.AbandonFilling();
  EXPECT_EQ(buffers.state(*second), kIdle);
  EXPECT_EQ(buffers.NewestComplete(), first);
  EXPECT_EQ(VersionIn(buffers, first, 0), 10U);
  buffers.AbandonFilling();
}

TEST(Buffers, AnIncompleteSnapshotDoesNotEnd) {
  SnapshotBuffers buffers;
  Snapshot(&buffers, 10, 0);
  const auto second = buffers.Begin(20);
  ASSERT_TRUE(second);
  const Status ended = buffers.End();
  ASSERT_FALSE(ended);
  EXPECT_EQ(ended.error().message,
            "non-expert module 0 is of iteration 10 in a snapshot of iteration 20");
  EXPECT_EQ(buffers.state(*second), kFilling);
}

TEST(Buffers, RollbackDropsWhatIsNewer) {
  SnapshotBuffers buffers;
  const std::size_t first = Snapshot(&buffers, 10, 0);
  buffers.StartPersist();
  ASSERT_TRUE(buffers.EndPersist());
  const std::size_t second = Snapshot(&buffers, 20, 1);
  buffers.Rollback(10);
  EXPECT_EQ(buffers.state(first), kRecovery);
  EXPECT_EQ(buffers.state(second), kIdle);
  EXPECT_TRUE(buffers.Begin(15));
}

TEST(Buffers, EventsAtTheWrongTime) {
  SnapshotBuffers buffers;
  EXPECT_EQ(buffers.End().error().code, Errc::kUsage);
  EXPECT_EQ(buffers.Put(kRest, Bytes("")).error().code, Errc::kUsage);
  EXPECT_EQ(buffers.EndPersist().error().code, Errc::kUsage);
  EXPECT_EQ(buffers.FailPersist().error().code, Errc::kUsage);
  ASSERT_TRUE(buffers.Begin(10));
  EXPECT_EQ(buffers.Begin(20).error().code, Errc::kBusy);
  ASSERT_TRUE(buffers.End());
  EXPECT_EQ(buffers.Begin(9).error().message,
            "snapshot of iteration 9: the newer snapshot of iteration 10 already exists");
  EXPECT_STREQ(Name(kRecovery), "recovery");
}

}  // namespace
}  // namespace shardwright::partial
