// SPDX-License-Identifier: Apache-2.0
#include "partial/agent/agent.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <fstream>
#include <functional>
#include <mutex>
#include <random>
#include <set>
#include <thread>

#include "engine/exec/byte_source.h"
#include "partial/store/check_store.h"
#include "partial/store/token_log.h"
#include "support/os/fault.h"
#include "unit/partial/agent_fixture.h"

namespace shardwright::partial {
namespace {

using test::AgentTest;

/// Counts the bytes read.
class CountedBytes final : public exec::ByteSource {
 public:
  CountedBytes(std::unique_ptr<exec::ByteSource> source, std::atomic<std::uint64_t>* bytes)
      : source_(std::move(source)), bytes_(bytes) {}
  Status Read(std::uint32_t member, std::uint64_t offset, std::span<std::byte> out) override {
    bytes_->fetch_add(out.size());
    return source_->Read(member, offset, out);
  }
  std::uint64_t bytes_read() const override { return source_->bytes_read(); }
  std::uint64_t files_read() const override { return source_->files_read(); }

 private:
  std::unique_ptr<exec::ByteSource> source_;
  std::atomic<std::uint64_t>* bytes_;
};

/// Changes a bit of a member.
class FlippedBytes final : public exec::ByteSource {
 public:
  FlippedBytes(std::unique_ptr<exec::ByteSource> source, std::uint32_t member)
      : source_(std::move(source)), member_(member) {}
  Status Read(std::uint32_t member, std::uint64_t offset, std::span<std::byte> out) override {
    SW_TRY(source_->Read(member, offset, out));
    if (member == member_ && offset == 0 && !out.empty()) out[0] ^= std::byte{1};
    return {};
  }
  std::uint64_t bytes_read() const override { return source_->bytes_read(); }
  std::uint64_t files_read() const override { return source_->files_read(); }

 private:
  std::unique_ptr<exec::ByteSource> source_;
  const std::uint32_t member_;
};

/// Runs a function before the first byte is read.
class BytesAfter final : public exec::ByteSource {
 public:
  BytesAfter(std::unique_ptr<exec::ByteSource> source, std::function<void()> event)
      : source_(std::move(source)), event_(std::move(event)) {}
  Status Read(std::uint32_t member, std::uint64_t offset, std::span<std::byte> out) override {
    std::call_once(once_, event_);
    return source_->Read(member, offset, out);
  }
  std::uint64_t bytes_read() const override { return source_->bytes_read(); }
  std::uint64_t files_read() const override { return source_->files_read(); }

 private:
  std::unique_ptr<exec::ByteSource> source_;
  const std::function<void()> event_;
  std::once_flag once_;
};

os::FaultRule Always(const std::string& target, int error) {
  os::FaultRule rule;
  rule.target = target;
  rule.onward = true;
  rule.error = error;
  return rule;
}

TEST_F(AgentTest, TrainingWaitsForTheCopyOnly) {
  Agent agent(Options());
  std::vector<std::uint64_t> copied;
  const auto note = [&](std::uint64_t iteration) {
    copied.push_back(iteration);
    EXPECT_FALSE(agent.status().newest) << "sums are not known yet";
  };
  ASSERT_EQ(*agent.Snapshot(*Open(1), 0, sink_, note), 1U);
  EXPECT_EQ(copied, std::vector<std::uint64_t>{1});
  EXPECT_EQ(agent.status().newest, 1U);
  // It is in memory already: nothing is copied.
  ASSERT_EQ(*agent.Snapshot(*Open(1), 0, sink_, note), 1U);
  EXPECT_EQ(copied.size(), 1U);
}

TEST_F(AgentTest, ComparesSumsAfterTheCopy) {
  std::uint32_t damaged = 0;
  for (std::uint32_t m = 0; m < Open(1)->checkpoint.map.members.size(); ++m) {
    const auto input = Open(1);
    if (!input->checkpoint.map.members[m].crc32) continue;
    input->bytes = std::make_unique<FlippedBytes>(std::move(input->bytes), m);
    bool copied = false;
    Agent agent(Options());  // the first snapshot takes all, so that no member is read in part
    const auto taken = agent.Snapshot(*input, 0, sink_, [&](std::uint64_t) { copied = true; });
    if (taken) continue;  // no read covers the beginning of this one
    ++damaged;
    EXPECT_TRUE(copied);
    EXPECT_EQ(taken.error().code, Errc::kBadInput);
    EXPECT_FALSE(agent.wants_persist());
    EXPECT_EQ(agent.pool()->used_bytes(), 0U);
    EXPECT_EQ(agent.status().snapshots_failed, 1U);
  }
  EXPECT_GT(damaged, 4U);
}

TEST_F(AgentTest, SnapshotsAllThenASelection) {
  Agent agent(Options());
  ASSERT_EQ(*Snapshot(agent, 1), 1U);
  const auto first = agent.Newest();
  for (const StoredModule& module : first->manifest.modules) {
    for (const auto& held : module) {
      EXPECT_TRUE(!held || held->version == 1);
    }
  }
  EXPECT_FALSE(Stored());
  EXPECT_EQ(**agent.Persist(sink_), 1U);
  EXPECT_EQ(Stored()->iteration, 1U);
  EXPECT_FALSE(agent.Persist(sink_)->has_value()) << "there is nothing left";
  ASSERT_EQ(*Snapshot(agent, 2), 2U);
  // Two of four experts of each of two layers are new, the others are still there.
  const auto second = agent.Newest();
  std::size_t fresh = 0;
  std::size_t old = 0;
  for (std::size_t i = 0; i < second->manifest.modules.size(); ++i) {
    const StoredModule& held = second->manifest.modules[i];
    const bool expert = second->manifest.names[i].find("deepspeed_experts") != std::string::npos;
    ASSERT_TRUE(held[0]);
    if (!expert) {
      EXPECT_EQ(held[0]->version, 2U);
    }
    if (expert) ++(held[0]->version == 2 ? fresh : old);
  }
  EXPECT_EQ(fresh, 4U);
  EXPECT_EQ(old, 4U);
  // One of the two is persisted.
  EXPECT_EQ(**agent.Persist(sink_), 2U);
  const auto stored = Stored();
  std::size_t persisted = 0;
  for (std::size_t i = 0; i < stored->modules.size(); ++i) {
    const auto& held = stored->modules[i][0];
    if (stored->names[i].find("deepspeed_experts") == std::string::npos) continue;
    persisted += held->version == 2 ? 1 : 0;
    if (held->version == 2) {
      EXPECT_EQ(held->blob.digest, second->manifest.modules[i][0]->blob.digest);
    }
  }
  EXPECT_EQ(persisted, 2U);
}

TEST_F(AgentTest, TokensAreKnownOfVersionsThatNeverCameToStorage) {
  AgentOptions options = Options();
  options.tokens_path = At("tokens.jsonl");
  std::ofstream(options.tokens_path)
      << R"({"iteration": 1, "tokens": [[1, 2, 3, 4], [5, 6, 7, 8]]})"
      << "\n"
      << R"({"iteration": 2, "tokens": [[10, 0, 0, 0], [0, 0, 0, 1]]})"
      << "\n"
      << R"({"iteration": 3, "tokens": [[0, 20, 0, 0], [0, 0, 1, 0]]})"
      << "\n"
      << R"({"iteration": 4, "tokens": [[0, 0, 30, 0], [0, 1, 0, 0]]})"
      << "\n";
  Agent agent(options);
  ASSERT_EQ(*Snapshot(agent, 1), 1U);
  ASSERT_EQ(**agent.Persist(sink_), 1U);
  ASSERT_EQ(*Snapshot(agent, 2), 2U);
  ASSERT_EQ(*Snapshot(agent, 4), 4U);
  ASSERT_EQ(**agent.Persist(sink_), 4U);
  // Experts with the snapshot of iteration 2 as newest version have lost all tokens after it.
  const auto history = ReadHistory(*Store::Open(options.save.store), Stored()->sequence, 0);
  ASSERT_TRUE(history && *history);
  EXPECT_EQ((*history)->iterations(), (std::vector<std::uint64_t>{1, 2, 4}));
  EXPECT_EQ((*history)->Between(0, 0, 1, 4), 10U);
  EXPECT_EQ((*history)->Between(0, 0, 2, 4), 0U);
  EXPECT_EQ((*history)->Between(0, 1, 2, 4), 20U);
  EXPECT_EQ((*history)->Between(0, 2, 2, 4), 30U);
}

TEST_F(AgentTest, ReadsNoByteOfUnselectedModules) {
  Agent agent(Options());
  ASSERT_TRUE(Snapshot(agent, 1));
  ASSERT_TRUE(agent.Persist(sink_));
  const auto input = Open(2);
  std::atomic<std::uint64_t> read = 0;
  input->bytes = std::make_unique<CountedBytes>(std::move(input->bytes), &read);
  const std::uint64_t before = agent.status().snapshot_bytes;
  ASSERT_TRUE(agent.Snapshot(*input, 0, sink_));
  const std::uint64_t taken = agent.status().snapshot_bytes - before;
  // Members that are needed almost whole are read to their end, to compare their checksums.
  std::uint64_t whole = 0;
  for (const layout::Member& member : input->checkpoint.map.members) whole += member.bytes;
  EXPECT_GE(read.load(), taken);
  EXPECT_LE(read.load(), taken + taken / 8);
  EXPECT_LT(read.load(), whole * 3 / 4);
}

TEST_F(AgentTest, RefusesWhatMemoryDoesNotHold) {
  AgentOptions options = Options();
  options.memory_bytes = 1000;
  Agent agent(options);
  const auto refused = Snapshot(agent, 1);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Errc::kLimit);
  EXPECT_NE(refused.error().message.find("the limit is 1000 B"), std::string::npos)
      << refused.error().message;
  EXPECT_EQ(agent.status().memory_bytes, 0U);
  EXPECT_EQ(agent.status().snapshots_failed, 1U);
  EXPECT_FALSE(agent.Newest());
}

TEST_F(AgentTest, GivesMemoryBack) {
  Agent agent(Options());
  std::uint64_t most = 0;
  for (std::uint64_t i = 1; i <= kLast; ++i) {
    ASSERT_TRUE(Snapshot(agent, i));
    if (i % 3 == 0) {
      ASSERT_TRUE(agent.Persist(sink_));
    }
    if (i <= 6) most = std::max(most, agent.status().memory_bytes);
  }
  EXPECT_LE(agent.status().memory_bytes, most);
}

TEST_F(AgentTest, ForgetsWhatARestoreHasGivenUp) {
  Agent agent(Options());
  for (const std::uint64_t i : {1U, 2U, 3U}) {
    ASSERT_TRUE(Snapshot(agent, i));
    ASSERT_TRUE(agent.Persist(sink_));
  }
  ASSERT_TRUE(Snapshot(agent, 4));
  Restore(2);
  EXPECT_FALSE(agent.Persist(sink_)->has_value()) << "a snapshot of a past that is given up";
  EXPECT_EQ(Stored()->iteration, 2U);
  EXPECT_FALSE(agent.Newest() && agent.Newest()->manifest.iteration > 2);
  ASSERT_EQ(*Snapshot(agent, 3), 3U);
  EXPECT_EQ(**agent.Persist(sink_), 3U);
  EXPECT_EQ(Stored()->iteration, 3U);
}

TEST_F(AgentTest, ForgetsWhatRestoresHaveGivenUpThatItHasMissed) {
  Agent agent(Options());
  for (const std::uint64_t i : {1U, 2U}) {
    ASSERT_TRUE(Snapshot(agent, i));
    ASSERT_TRUE(agent.Persist(sink_));
  }
  ASSERT_TRUE(Snapshot(agent, 3));
  // Back to 1; another process saves 2 and 4 of the new past; then a restore of the newest state.
  Restore(1);
  Agent other(Options());
  for (const std::uint64_t i : {2U, 4U}) {
    ASSERT_TRUE(Snapshot(other, i));
    ASSERT_TRUE(other.Persist(sink_));
  }
  Restore(4);
  ASSERT_TRUE(agent.CatchUp());
  EXPECT_FALSE(agent.Newest());
  EXPECT_FALSE(agent.Persist(sink_)->has_value());
  EXPECT_EQ(Stored()->iteration, 4U);
}

TEST_F(AgentTest, ARestoreWhileASnapshotIsSavedStopsIt) {
  Agent agent(Options());
  ASSERT_TRUE(Snapshot(agent, 1));
  ASSERT_TRUE(agent.Persist(sink_));
  ASSERT_TRUE(Snapshot(agent, 3));
  const auto input = OpenMemory(*agent.Newest(), {});
  ASSERT_TRUE(input) << input.error().message;
  // The comparison is over when blobs are read. No restore passes the lock; with locks local to
  // each node, its record is visible before the manifest is written.
  (*input)->bytes = std::make_unique<BytesAfter>(std::move((*input)->bytes), [this] {
    EXPECT_EQ(Store::Open(At("store"))->LockForWriting("pec-restore").error().code, Errc::kBusy);
    Restore(1);
  });
  Snapshotted snapshotted;
  snapshotted.level = agent.Newest()->manifest.state.snapshot;
  snapshotted.selection.resize(snapshotted.level.version.size());
  SaveRequest request = Options().save;
  request.iteration = 3;
  request.snapshotted = &snapshotted;
  const auto comm = comm::MakeSerialComm();
  const auto saved = Save(*comm, **input, request, sink_);
  ASSERT_FALSE(saved);
  EXPECT_EQ(saved.error().code, Errc::kMismatch) << saved.error().message;
  EXPECT_EQ(Stored()->iteration, 1U);
  EXPECT_FALSE(agent.Persist(sink_)->has_value()) << "it is forgotten";
}

TEST_F(AgentTest, ARestoreWhileFilesAreOpenedGivesThemUp) {
  Agent agent(Options());
  for (const std::uint64_t i : {1U, 2U}) {
    ASSERT_TRUE(Snapshot(agent, i));
    ASSERT_TRUE(agent.Persist(sink_));
  }
  const std::uint64_t known = Known(At("store"));
  const auto input = Open(3);
  Restore(1);
  for (int i = 0; i < 2; ++i) {  // also when the agent knows of the restore
    const auto refused = agent.Snapshot(*input, known, sink_);
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, Errc::kMismatch) << refused.error().message;
  }
  EXPECT_FALSE(agent.Persist(sink_)->has_value());
  EXPECT_EQ(Stored()->iteration, 1U);
  ASSERT_EQ(*agent.Snapshot(*Open(3), Known(At("store")), sink_), 3U)
      << "asked for after the restore";
}

TEST_F(AgentTest, AnotherSaveOfAnIterationTakesItsPlace) {
  for (const bool persisted : {false, true}) {
    AgentOptions options = Options();
    options.save.store = At(persisted ? "persisted" : "filled");
    Agent agent(options);
    for (const std::uint64_t i : {1U, 2U, 3U}) {
      ASSERT_TRUE(Snapshot(agent, i));
      if (persisted || i < 3) {
        ASSERT_TRUE(agent.Persist(sink_));
      }
    }
    const auto first = agent.Newest();
    ASSERT_EQ(*Snapshot(agent, 3), 3U);
    EXPECT_EQ(agent.Newest(), first) << "the same files";
    // The catalogue is the same but for one file's time: as if all had been written again.
    const auto input = Open(3);
    ++input->set.files.front().identity.mtime_ns;
    bool copied = false;
    ASSERT_EQ(*agent.Snapshot(*input, 0, sink_, [&](std::uint64_t) { copied = true; }), 3U);
    EXPECT_TRUE(copied);
    const auto second = agent.Newest();
    EXPECT_NE(second, first);
    EXPECT_EQ(second->manifest.state.snapshot.version, first->manifest.state.snapshot.version)
        << "the selection is repeated";
    EXPECT_TRUE(agent.wants_persist());
    EXPECT_EQ(**agent.Persist(sink_), 3U);
    EXPECT_FALSE(agent.wants_persist());
    EXPECT_EQ(agent.Entries().size(), 1U);
    EXPECT_EQ(*Snapshot(agent, 4), 4U);
  }
}

TEST_F(AgentTest, KeepsNoCopyThatARestoreHasGivenUp) {
  Agent own(Options());
  for (const std::uint64_t i : {1U, 2U}) {
    ASSERT_TRUE(Snapshot(own, i));
    ASSERT_TRUE(own.Persist(sink_));
  }
  const auto old = own.Newest();
  EXPECT_EQ(old->recovery, 0U);
  Restore(1);
  Agent peer(Options());
  const Status refused = peer.Accept("own", *old);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Errc::kMismatch);
  EXPECT_NE(refused.error().message.find("made before recovery 1, which went back to iteration 1"),
            std::string::npos)
      << refused.error().message;
  ASSERT_EQ(*Snapshot(own, 2), 2U);
  EXPECT_EQ(own.Newest()->recovery, 1U);
  ASSERT_TRUE(peer.Accept("own", *own.Newest()));
  ASSERT_TRUE(own.Persist(sink_));
  // A restore of the newest state discards nothing.
  Restore(2);
  ASSERT_TRUE(peer.CatchUp());
  EXPECT_EQ(peer.Entries().size(), 1U);
  // A store without that recovery is another one, or an old state of this one.
  AgentOptions elsewhere = Options();
  elsewhere.save.store = At("other-store");
  Agent far(elsewhere);
  EXPECT_EQ(far.Accept("own", *own.Newest()).error().code, Errc::kNotFound);
  ASSERT_TRUE(Snapshot(far, 1));
  ASSERT_TRUE(far.Persist(sink_));
  EXPECT_EQ(far.Accept("own", *own.Newest()).error().code, Errc::kMismatch);
}

TEST_F(AgentTest, FlushesNoCopyThatARestoreHasGivenUp) {
  Agent own(Options());
  ASSERT_TRUE(Snapshot(own, 1));
  ASSERT_TRUE(own.Persist(sink_));
  ASSERT_TRUE(Snapshot(own, 3));
  Agent peer(Options());
  ASSERT_TRUE(peer.Accept("own", *own.Newest(), nullptr));
  EXPECT_EQ(peer.Accept("own", *own.Newest(), own.Newest()).error().code, Errc::kMismatch);
  Restore(1);
  EXPECT_EQ(**peer.Flush(sink_), 1U);
  EXPECT_EQ(Stored()->iteration, 1U);
  EXPECT_TRUE(peer.Entries().empty());
}

TEST_F(AgentTest, AStopOfThePersistLosesNothing) {
  AgentOptions options = Options();
  options.bandwidth = 20'000;  // the checkpoint has about 30 KiB
  Agent agent(options);
  ASSERT_TRUE(Snapshot(agent, 1));
  std::thread persist([&] { EXPECT_EQ(**agent.Persist(sink_), 1U); });
  while (agent.status().states[0] != BufferState::kPersisting) std::this_thread::yield();
  // Training continues meanwhile: the snapshots do not wait.
  for (const std::uint64_t i : {2U, 3U, 4U, 5U}) {
    EXPECT_TRUE(Snapshot(agent, i));
  }
  EXPECT_EQ(agent.status().snapshots_skipped, 2U);
  persist.join();
  EXPECT_EQ(**agent.Persist(sink_), 5U);
  EXPECT_EQ(Stored()->iteration, 5U);
}

class RandomEvents : public AgentTest, public ::testing::WithParamInterface<unsigned> {};

/// Checks the invariants that must hold after every event.
void CheckInvariants(const Agent& agent, const std::optional<Manifest>& stored,
                     std::optional<std::uint64_t> durable) {
  const AgentStatus status = agent.status();
  std::array<int, 5> count{};
  for (const BufferState state : status.states) ++count[static_cast<std::size_t>(state)];
  EXPECT_LE(count[static_cast<std::size_t>(BufferState::kFilling)], 0) << "between events";
  EXPECT_LE(count[static_cast<std::size_t>(BufferState::kPersisting)], 0);
  EXPECT_EQ(count[static_cast<std::size_t>(BufferState::kRecovery)], durable ? 1 : 0);
  ASSERT_EQ(stored.has_value(), durable.has_value());
  if (durable) {
    EXPECT_EQ(stored->iteration, *durable);
  }
  if (durable) {
    EXPECT_GE(*status.newest, *durable) << "memory is never older than the store";
  }
  for (const AgentEntry& entry : agent.Entries()) {
    for (std::size_t i = 0; i < entry.checkpoint->manifest.modules.size(); ++i) {
      for (const auto& held : entry.checkpoint->manifest.modules[i]) {
        if (!held) continue;
        const BlobPtr blob = agent.Find(held->blob.digest);
        ASSERT_TRUE(blob);
        EXPECT_EQ(blob->ref().digest, held->blob.digest);
        // The store's blob of the same version is the same.
        if (!stored) continue;
        for (const auto& other : stored->modules[i]) {
          if (other && other->version == held->version && other->blob.head == held->blob.head) {
            EXPECT_EQ(other->blob.digest, held->blob.digest);
          }
        }
      }
    }
  }
}

TEST_P(RandomEvents, KeepTheInvariants) {
  std::mt19937 random(GetParam());
  Agent agent(Options());
  std::uint64_t next = 1;
  std::optional<std::uint64_t> durable;
  std::uint64_t failures = 0;
  while (next <= kLast) {
    switch (random() % 6) {
      case 0:
      case 1:
        ASSERT_EQ(*Snapshot(agent, next), next);
        ++next;
        break;
      case 2: {  // the checkpoint cannot be read
        const auto input = Open(next);
        const os::ScopedFault fault(Always("read", EIO));
        EXPECT_FALSE(agent.Snapshot(*input, 0, sink_));
        ++failures;
        break;
      }
      case 3: {  // the disk is full
        if (!agent.wants_persist()) break;
        const os::ScopedFault fault(Always(random() % 2 == 0 ? "write" : "rename", ENOSPC));
        EXPECT_FALSE(agent.Persist(sink_));
        EXPECT_TRUE(agent.wants_persist());
        break;
      }
      default:
        if (const auto done = agent.Persist(sink_); *done) durable = **done;
    }
    CheckInvariants(agent, Stored(), durable);
  }
  EXPECT_EQ(agent.status().snapshots_failed, failures);
  ASSERT_TRUE(agent.Flush(sink_));
  EXPECT_EQ(Stored()->iteration, kLast);
  const auto comm = comm::MakeSerialComm();
  const auto check = CheckStore(*comm, At("store"), *convert::ReadPatterns({}), 1, sink_);
  ASSERT_TRUE(check) << check.error().message;
  EXPECT_TRUE(check->damaged.empty());
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomEvents, ::testing::Range(0U, 4U));

}  // namespace
}  // namespace shardwright::partial
