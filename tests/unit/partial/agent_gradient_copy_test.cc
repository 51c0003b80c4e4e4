// SPDX-License-Identifier: Apache-2.0
// Copies for peers with gradients in place of states: equal bits, and senders, peers and streams
// that are wrong.

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "partial/agent/agent_protocol.h"
#include "partial/agent/agent_server.h"
#include "partial/agent/gradient_copy.h"
#include "support/os/file.h"
#include "unit/partial/agent_replay_fixture.h"

namespace shardwright::partial {
namespace {

using test::AgentReplayTest;
using test::HelloOf;

/// An agent that sends, and a peer behind a socket file. Both have the same store. The first
/// checkpoint is in it, and the peer has a copy.
class GradientCopyTest : public AgentReplayTest {
 protected:
  void SetUp() override {
    AgentReplayTest::SetUp();
    sender_.emplace(Replaying());
    gradients_.emplace(sender_->logs());
    commands_.self = HelloOf("peer");
    StartPeer();
    ASSERT_TRUE(Snapshot(*sender_, 1));
    ASSERT_TRUE(sender_->Persist(sink_));
    const PushedBytes sent = Copy();
    ASSERT_GT(sent.states, 0U);
    ASSERT_EQ(sent.gradients, 0U);
    ASSERT_TRUE(sent.replays);
  }
  void TearDown() override {
    client_.reset();
    server_.reset();
    peer_.reset();
    gradients_.reset();
    sender_.reset();
    AgentReplayTest::TearDown();
  }

  /// Starts the peer, with an empty memory.
  void StartPeer() {
    client_.reset();
    server_.reset();
    peer_.emplace(Options());
    auto listener = os::Listener::Open(*os::ParseAddress("unix:" + At("peer")));
    ASSERT_TRUE(listener) << listener.error().message;
    server_.emplace(*peer_, commands_, *std::move(listener), sink_);
    client_.emplace(server_->address(), nullptr, os::Stop{}, kAgentPatience, HelloOf("sender"));
  }

  /// Sends the newest snapshot, as an agent does.
  Result<PushedBytes> TryCopy() {
    const auto newest = sender_->Newest();
    const AnnouncedGradients announced = gradients_->For(*newest);
    auto sent = client_->Push(*newest, sender_->limiter(), announced);
    if (sent) {
      gradients_->Sent(*newest, sent->replays);
    } else {
      gradients_->Failed();
    }
    return sent;
  }
  PushedBytes Copy() {
    const auto sent = TryCopy();
    EXPECT_TRUE(sent) << sent.error().message;
    return sent ? *sent : PushedBytes();
  }

  /// Sends an earlier snapshot as states.
  void CopyStates(const MemoryCheckpoint& earlier) {
    const auto sent = client_->Push(earlier, sender_->limiter());
    EXPECT_TRUE(sent) << sent.error().message;
  }

  /// Takes a snapshot after two more steps. Its experts that were read are not what the gradients
  /// lead to, because the checkpoints are made up.
  void Train() {
    HandOver(*sender_, 2);
    HandOver(*sender_, 3);
    ASSERT_TRUE(Snapshot(*sender_, 3));
  }

  std::shared_ptr<const MemoryCheckpoint> Copied() const {
    for (const AgentEntry& entry : peer_->Entries()) {
      if (entry.state == "copy") return entry.checkpoint;
    }
    return nullptr;
  }

  /// Compares the peer's copy with the newest snapshot, byte by byte.
  void ExpectSame() const {
    const auto wanted = sender_->Newest();
    const auto found = Copied();
    ASSERT_TRUE(found);
    EXPECT_EQ(ToText(found->manifest), ToText(wanted->manifest));
    EXPECT_EQ(found->blobs.size(), wanted->blobs.size());
    for (const auto& [digest, blob] : wanted->blobs) {
      const auto copy = found->blobs.find(digest);
      ASSERT_NE(copy, found->blobs.end());
      EXPECT_TRUE(std::ranges::equal(copy->second->bytes(), blob->bytes()));
      EXPECT_EQ(copy->second->unit_bytes(), blob->unit_bytes());
    }
  }

  /// Requests of a peer for a copy that the test sends, and its last answer.
  struct Requested {
    std::size_t gradients = 0;  ///< modules
    std::size_t states = 0;     ///< blobs
    std::size_t repeated = 0;   ///< blobs of the second request
    std::string answer;
  };

  /// Sends a copy of the newest snapshot with announced gradients that `change` may spoil before
  /// the text is sent, and gradients that `spoil` may change.
  Requested SendSpoiled(const std::function<void(AnnouncedGradients*)>& change,
                        const std::function<void(std::string*)>& spoil = {}) {
    Requested out;
    const auto newest = sender_->Newest();
    AnnouncedGradients announced = gradients_->For(*newest);
    EXPECT_FALSE(announced.records.empty());
    change(&announced);
    auto connection = os::Connection::Open(server_->address(), std::chrono::seconds(10));
    EXPECT_TRUE(connection);
    const std::string manifest = ToText(newest->manifest);
    const std::string request = "push sender " + std::to_string(manifest.size()) + " " +
                                std::to_string(newest->catalogue.size()) + " 0 " +
                                std::to_string(announced.text.size()) + "\n";
    EXPECT_TRUE(connection->Send(request + manifest + newest->catalogue + announced.text));
    for (int round = 0; round < 2; ++round) {
      const auto list = ReceiveAnswer(*connection);
      if (!list) return {out.gradients, out.states, out.repeated, list.error().message};
      auto text = ReceiveText(*connection, std::stoull(*list));
      EXPECT_TRUE(text);
      std::string gradients;
      Limiter free(0);
      Limiter::Job job(free);
      for (std::string_view rest = *text; !rest.empty();) {
        const std::string_view line = rest.substr(0, rest.find('\n'));
        rest.remove_prefix(line.size() + 1);
        if (line.starts_with("gradients ")) {
          const auto module = static_cast<std::uint32_t>(std::stoul(std::string(line.substr(10))));
          for (const auto& one : announced.records.at(module)) gradients += StoredBytes(*one);
          ++out.gradients;
          continue;
        }
        EXPECT_TRUE(SendBlob(*connection, *newest->blobs.at(*ParseDigest(line)), job));
        ++(round == 0 ? out.states : out.repeated);
      }
      if (spoil && !gradients.empty()) spoil(&gradients);
      (void)connection->Send(gradients);
    }
    const auto answer = ReceiveAnswer(*connection);
    out.answer = answer ? "ok" : answer.error().message;
    return out;
  }

  static std::string StoredBytes(const LoggedRecord& record) {
    std::string bytes(record.payload.bytes, '\0');
    const auto file = os::File::OpenRead(record.path);
    EXPECT_TRUE(file);
    EXPECT_TRUE(
        file->ReadAt(record.payload.offset, std::as_writable_bytes(std::span<char>(bytes))));
    return bytes;
  }

  std::optional<Agent> sender_;
  std::optional<PeerGradients> gradients_;
  AgentCommands commands_;
  std::optional<Agent> peer_;
  std::optional<AgentServer> server_;
  std::optional<AgentClient> client_;
};

/// With and without compression of the gradient log.
class GradientCopyExact : public GradientCopyTest, public ::testing::WithParamInterface<int> {};

TEST_P(GradientCopyExact, ThePeerComputesTheBlobsOfTheSender) {
  handing_.zstd_level = GetParam();
  Train();
  const PushedBytes read = Copy();
  EXPECT_GT(read.gradients, 0U);
  EXPECT_GT(read.repeated, 0U) << "the snapshot's own experts differ from their gradients";
  EXPECT_EQ(read.replaced, 0U);
  ExpectSame();
  ASSERT_TRUE(sender_->Replay());
  ASSERT_EQ(sender_->status().replays.older, 0U);
  const std::uint64_t used = peer_->status().memory_bytes;
  const PushedBytes replayed = Copy();
  EXPECT_EQ(replayed.states, 0U);
  EXPECT_EQ(replayed.repeated, 0U);
  EXPECT_GT(replayed.gradients, 0U);
  std::map<exec::Digest, std::uint64_t> states;
  const auto newest = sender_->Newest();
  for (const auto& [name, from] : newest->replayed) {
    const auto at =
        std::ranges::find(newest->manifest.names, name) - newest->manifest.names.begin();
    for (const auto& part : newest->manifest.modules[static_cast<std::size_t>(at)]) {
      if (part) states[part->blob.digest] = part->blob.bytes;
    }
  }
  std::uint64_t bytes = 0;
  for (const auto& [digest, size] : states) bytes += size;
  EXPECT_EQ(replayed.replaced, bytes);
  ExpectSame();
  EXPECT_LE(peer_->status().memory_bytes, used) << "no gradients are kept";
  // The same once more sends nothing.
  const PushedBytes again = Copy();
  EXPECT_EQ(again.states + again.gradients, 0U);
}

INSTANTIATE_TEST_SUITE_P(Levels, GradientCopyExact, ::testing::Values(0, 3));

TEST_F(GradientCopyTest, ARestartedPeerGetsStates) {
  Train();
  ASSERT_TRUE(sender_->Replay());
  StartPeer();
  const PushedBytes sent = Copy();
  EXPECT_EQ(sent.replaced, 0U);
  EXPECT_EQ(sent.repeated, 0U) << "it has requested no gradients";
  EXPECT_GT(sent.states, 0U);
  ExpectSame();
}

TEST_F(GradientCopyTest, AfterAnErrorTheNextCopyHasStates) {
  Train();
  ASSERT_TRUE(sender_->Replay());
  std::string path;
  {
    const auto newest = sender_->Newest();
    const AnnouncedGradients announced = gradients_->For(*newest);
    ASSERT_FALSE(announced.records.empty());
    path = announced.records.begin()->second.front()->path;
  }
  const auto before = Copied();
  std::filesystem::rename(path, path + ".gone");
  const auto failed = TryCopy();
  ASSERT_FALSE(failed);
  EXPECT_EQ(failed.error().code, Errc::kNotFound) << failed.error().message;
  EXPECT_EQ(Copied(), before) << "the earlier copy is complete";
  const PushedBytes sent = Copy();
  EXPECT_EQ(sent.gradients, 0U);
  EXPECT_GT(sent.states, 0U);
  ExpectSame();
}

TEST_F(GradientCopyTest, GradientsThatHaveChangedInTheLogAreNotSent) {
  Train();
  ASSERT_TRUE(sender_->Replay());
  {
    const AnnouncedGradients announced = gradients_->For(*sender_->Newest());
    const LoggedRecord& record = *announced.records.rbegin()->second.back();
    std::fstream file(record.path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(record.payload.offset)).put('?');
  }
  const auto failed = TryCopy();
  ASSERT_FALSE(failed);
  EXPECT_NE(failed.error().message.find("have changed since"), std::string::npos)
      << failed.error().message;
  EXPECT_EQ(Copy().gradients, 0U);
  ExpectSame();
}

TEST_F(GradientCopyTest, OtherGradientsOrAnotherOrderAreRepeatedAsStates) {
  Train();
  ASSERT_TRUE(sender_->Replay());
  const auto none = [](AnnouncedGradients*) {};
  const auto swap_lines = [](AnnouncedGradients* announced) {
    announced->text.clear();
    for (const auto& [module, records] : announced->records) {
      ASSERT_EQ(records.size(), 2U);
      announced->text += ToText(records[1]->record) + "\n" + ToText(records[0]->record) + "\n";
    }
  };
  const auto swap_iterations = [](AnnouncedGradients* announced) {
    announced->text.clear();
    for (const auto& [module, records] : announced->records) {
      for (const auto& one : records) {
        LogRecord record = one->record;
        record.iteration = 5 - record.iteration;
        announced->text += ToText(record) + "\n";
      }
    }
  };
  const auto flip = [](std::string* bytes) { (*bytes)[bytes->size() / 2] ^= 1; };
  const auto zero = [](std::string* bytes) { bytes->assign(bytes->size(), '\0'); };
  const auto before = Copied();
  // One flipped bit: only that module, and those that the snapshot has read, are sent again.
  StartPeer();
  CopyStates(*before);
  const Requested flipped = SendSpoiled(none, flip);
  EXPECT_EQ(flipped.answer, "ok");
  EXPECT_EQ(flipped.gradients, handing_.modules.size());
  EXPECT_GT(flipped.repeated, 0U);
  ExpectSame();
  for (const auto& [change, spoil] :
       {std::pair<std::function<void(AnnouncedGradients*)>, std::function<void(std::string*)>>(
            none, zero),
        {swap_lines, {}}}) {
    StartPeer();
    CopyStates(*before);
    const Requested found = SendSpoiled(change, spoil);
    EXPECT_EQ(found.answer, "ok");
    EXPECT_EQ(found.gradients, handing_.modules.size());
    EXPECT_GT(found.repeated, flipped.repeated) << "of every module";
    ExpectSame();
  }
  // Step counts out of order make no chain, so no gradients are requested.
  StartPeer();
  CopyStates(*before);
  const Requested unordered = SendSpoiled(swap_iterations);
  EXPECT_EQ(unordered.answer, "ok");
  EXPECT_EQ(unordered.gradients, 0U);
  EXPECT_EQ(unordered.repeated, 0U);
  ExpectSame();
}

TEST_F(GradientCopyTest, MalformedAnnouncementsEndTheCopy) {
  Train();
  ASSERT_TRUE(sender_->Replay());
  const auto before = Copied();
  const std::uint64_t used = peer_->status().memory_bytes;
  const auto refused = [&](const std::string& what,
                           const std::function<void(AnnouncedGradients*)>& change) {
    const Requested found = SendSpoiled(change);
    EXPECT_NE(found.answer.find(what), std::string::npos) << found.answer;
    EXPECT_EQ(Copied(), before);
    EXPECT_EQ(peer_->status().memory_bytes, used);
  };
  refused("gradients of sender", [](AnnouncedGradients* announced) { announced->text = "what\n"; });
  refused("gradients of sender",
          [](AnnouncedGradients* announced) { announced->text.resize(100); });
  refused("gradients of sender",
          [](AnnouncedGradients* announced) { announced->text.insert(0, "\n"); });
  refused("\"iteration\"", [](AnnouncedGradients* announced) { announced->text = "{}"; });
  refused("bytes expected", [](AnnouncedGradients* announced) {
    const std::size_t at = announced->text.find("\"bytes\":") + 8;
    announced->text.insert(at, "9");
  });
}

TEST_F(GradientCopyTest, AnnouncementsThatCannotBeUsedAreIgnored) {
  Train();
  ASSERT_TRUE(sender_->Replay());
  const auto before = Copied();
  const auto ignored = [&](const std::function<void(LogRecord*)>& change) {
    StartPeer();
    CopyStates(*before);
    const Requested found = SendSpoiled([&](AnnouncedGradients* announced) {
      announced->text.clear();
      for (const auto& [module, records] : announced->records) {
        for (const auto& one : records) {
          LogRecord record = one->record;
          change(&record);
          announced->text += ToText(record) + "\n";
        }
      }
    });
    EXPECT_EQ(found.answer, "ok");
    EXPECT_EQ(found.gradients, 0U);
    ExpectSame();
  };
  ignored([](LogRecord* record) { record->module = "../../../etc/passwd"; });
  ignored([](LogRecord* record) { record->iteration += 7; });
  ignored([](LogRecord* record) { record->pieces.pop_back(); });
  ignored([](LogRecord* record) { record->pieces.push_back(record->pieces.front()); });
  ignored([](LogRecord* record) { record->pieces[0].param = "other"; });
  ignored([](LogRecord* record) { record->steps[0].step.count += 1; });
  ignored([](LogRecord* record) { record->steps[0].roots = exec::Digest{}; });
  ignored([](LogRecord* record) { record->steps[0].step.amsgrad = true; });
}

TEST_F(GradientCopyTest, AStreamThatEndsEarlyLeavesTheEarlierCopy) {
  Train();
  ASSERT_TRUE(sender_->Replay());
  const auto before = Copied();
  const auto newest = sender_->Newest();
  const std::string manifest = ToText(newest->manifest);
  const AnnouncedGradients announced = gradients_->For(*newest);
  const std::string request = "push sender " + std::to_string(manifest.size()) + " " +
                              std::to_string(newest->catalogue.size()) + " 0 " +
                              std::to_string(announced.text.size()) + "\n";
  const std::string all = request + manifest + newest->catalogue + announced.text;
  for (const std::size_t bytes :
       {request.size(), all.size() - announced.text.size() / 2, all.size()}) {
    auto connection = os::Connection::Open(server_->address(), std::chrono::seconds(10));
    ASSERT_TRUE(connection);
    ASSERT_TRUE(connection->Send(std::string_view(all).substr(0, bytes)));
  }
  EXPECT_EQ(Copied(), before);
  Copy();
  ExpectSame();
}

TEST_F(GradientCopyTest, RecordsAreKeptForThePeer) {
  Train();
  ASSERT_TRUE(sender_->Replay());
  const std::size_t records = 2 * handing_.modules.size();
  EXPECT_EQ(sender_->logs().KeptRecords().size(), records) << "the peer's copy is older";
  Copy();
  sender_->logs().Forget(3);
  EXPECT_EQ(sender_->logs().KeptRecords().size(), 0U) << "the peer has them";
  HandOver(*sender_, 4);
  sender_->logs().Forget(4);
  EXPECT_EQ(sender_->logs().KeptRecords().size(), records / 2);
  gradients_->Failed();
  sender_->logs().Forget(4);
  EXPECT_EQ(sender_->logs().KeptRecords().size(), 0U) << "a lost peer needs none";
}

TEST_F(GradientCopyTest, RecordsForThePeerMakeRoomForLaterOnes) {
  Train();
  ASSERT_TRUE(sender_->Replay());
  ASSERT_EQ(sender_->logs().KeptRecords().size(), 2 * handing_.modules.size());
  MemoryPool& pool = *sender_->pool();
  pool.Reserve(pool.limit_bytes() - pool.used_bytes());
  HandOver(*sender_, 4);
  const auto kept = sender_->logs().KeptRecords();
  EXPECT_EQ(kept.size(), handing_.modules.size());
  for (const auto& one : kept) EXPECT_EQ(one->record.iteration, 4U);
  EXPECT_EQ(sender_->logs().status().forgotten, "") << "the agent's own chains have no gap";
}

TEST_F(GradientCopyTest, GradientsThatAreMoreBytesThanStatesAreNotAnnounced) {
  for (std::uint64_t i = 2; i <= 12; ++i) HandOver(*sender_, i);
  ASSERT_TRUE(Snapshot(*sender_, 12));
  ASSERT_TRUE(sender_->Replay());
  EXPECT_TRUE(gradients_->For(*sender_->Newest()).records.empty());
}

}  // namespace
}  // namespace shardwright::partial
