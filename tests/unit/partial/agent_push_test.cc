// SPDX-License-Identifier: Apache-2.0
// Copies that agents receive from their peers.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "partial/agent/agent_client.h"
#include "partial/agent/agent_protocol.h"
#include "unit/partial/agent_protocol_fixture.h"

namespace shardwright::partial {
namespace {

using test::ClientOf;
using test::ProtocolTest;

/// Sends a checkpoint as a peer would, with hostile changes.
class PushTest : public ProtocolTest {
 protected:
  void SetUp() override {
    ProtocolTest::SetUp();
    AgentOptions options = Options();
    options.save.store = At("other-store");
    other_.emplace(options);
    ASSERT_TRUE(Snapshot(*other_, 3));
    checkpoint_ = other_->Newest();
  }
  void TearDown() override {
    checkpoint_.reset();
    other_.reset();
    ProtocolTest::TearDown();
  }

  /// Sends manifest and catalogue; then `change` may spoil every blob that the agent requests.
  std::string Push(const std::string& manifest, const std::string& catalogue,
                   const std::function<void(std::string*)>& change) {
    os::Connection connection = Connect(1, "peer");
    EXPECT_TRUE(connection.Send("push peer " + std::to_string(manifest.size()) + " " +
                                std::to_string(catalogue.size()) + "\n" + manifest + catalogue));
    auto answer = ReceiveAnswer(connection);
    if (!answer) return answer.error().message;
    const auto need = ReceiveText(connection, std::stoull(*answer));
    EXPECT_TRUE(need);
    for (std::size_t at = 0; at < need->size(); at += 33) {
      const BlobPtr blob = other_->Find(*ParseDigest(need->substr(at, 32)));
      const std::vector<std::uint32_t>& units = blob->unit_bytes();
      std::string text =
          "ok " + std::to_string(blob->ref().bytes) + " " + std::to_string(units.size()) + "\n";
      text.append(reinterpret_cast<const char*>(units.data()), 4 * units.size());
      text.append(reinterpret_cast<const char*>(blob->bytes().data()), blob->ref().bytes);
      change(&text);
      if (!connection.Send(text)) break;
    }
    answer = ReceiveAnswer(connection);
    return answer ? "ok" : answer.error().message;
  }

  std::size_t Copies() const {
    std::size_t count = 0;
    for (const AgentEntry& entry : agent_->Entries()) count += entry.state == "copy" ? 1 : 0;
    return count;
  }

  std::optional<Agent> other_;
  std::shared_ptr<const MemoryCheckpoint> checkpoint_;
};

TEST_F(PushTest, TakesACopyAndOnlyWhatIsNew) {
  AgentClient client = ClientOf("peer", servers_[1]->address());
  Limiter limiter(0);
  const auto sent = client.Push(*checkpoint_, limiter);
  ASSERT_TRUE(sent) << sent.error().message;
  EXPECT_GT(sent->states, 0U);
  EXPECT_EQ(client.Push(*checkpoint_, limiter)->states, 0U);
  ASSERT_EQ(Copies(), 1U);
  // The other node is lost: its snapshot is made durable, and can be restored.
  EXPECT_EQ(*client.Ask("flush"), "3");
  EXPECT_EQ(Stored()->iteration, 3U);
}

TEST_F(PushTest, RefusesACopyThatARestoreGivesUpOnItsWay) {
  const std::string manifest = ToText(checkpoint_->manifest);
  bool restored = false;
  const std::string answer = Push(manifest, checkpoint_->catalogue, [&](std::string*) {
    if (restored) return;
    restored = true;
    Restore(1);
    // The agent has since answered another client.
    EXPECT_TRUE(Say("list").starts_with("ok "));
  });
  EXPECT_TRUE(restored);
  EXPECT_NE(answer.find("made before recovery 1"), std::string::npos) << answer;
  EXPECT_EQ(Copies(), 0U);
  EXPECT_EQ(Say("flush"), "ok 1");
  EXPECT_EQ(Stored()->iteration, 1U);
}

TEST_F(PushTest, ACopyWithoutARecoveryIsFromBeforeAll) {
  Restore(1);
  os::Connection connection = Connect();
  const std::string manifest = ToText(checkpoint_->manifest);
  const std::string& catalogue = checkpoint_->catalogue;
  const std::string none = Push(manifest, catalogue, [](std::string*) {});
  EXPECT_NE(none.find("made before recovery 1"), std::string::npos) << none;
  AgentClient client = ClientOf("peer", servers_[1]->address());
  Limiter limiter(0);
  MemoryCheckpoint now = *checkpoint_;
  now.recovery = 2;
  EXPECT_EQ(client.Push(now, limiter).error().code, Errc::kNotFound);
  now.recovery = 1;
  const auto sent = client.Push(now, limiter);
  EXPECT_TRUE(sent) << sent.error().message;
  const auto list = client.List();
  ASSERT_TRUE(list) << list.error().message;
  EXPECT_EQ(list->back().recovery, 1U);
}

TEST_F(PushTest, RefusesSpoiledBlobs) {
  const std::string manifest = ToText(checkpoint_->manifest);
  const std::string& catalogue = checkpoint_->catalogue;
  const std::uint64_t used = agent_->status().memory_bytes;
  const auto refused = [&](const std::string& what, const std::function<void(std::string*)>& how) {
    const std::string answer = Push(manifest, catalogue, how);
    EXPECT_NE(answer.find(what), std::string::npos) << answer;
    EXPECT_EQ(Copies(), 0U);
    EXPECT_EQ(agent_->status().memory_bytes, used) << answer;
    EXPECT_TRUE(Alive());
  };
  refused("found digest", [](std::string* text) { text->back() ^= 1; });
  refused("bytes expected", [](std::string* text) { text->insert(3, "1"); });
  refused("units", [](std::string* text) {
    text->replace(text->find(' ', 3), text->find('\n') - text->find(' ', 3), " 0");
  });
  refused("unit of 1 to",
          [](std::string* text) { std::memset(&(*text)[text->find('\n') + 1], 0, 4); });
  refused("unit of 1 to",
          [](std::string* text) { std::memset(&(*text)[text->find('\n') + 1], 0xff, 4); });
  refused("unexpected answer", [](std::string* text) { text->insert(0, "what\n"); });
}

TEST_F(PushTest, RefusesContradictions) {
  const auto none = [](std::string*) {};
  const std::string manifest = ToText(checkpoint_->manifest);
  EXPECT_NE(Push("{}", checkpoint_->catalogue, none), "ok");
  EXPECT_NE(Push(manifest, "no catalogue", none), "ok");
  Manifest renamed = checkpoint_->manifest;
  renamed.names[0] = "../../../etc/passwd";
  EXPECT_NE(Push(ToText(renamed), checkpoint_->catalogue, none), "ok");
  Manifest fewer = checkpoint_->manifest;
  fewer.names.pop_back();
  fewer.modules.pop_back();
  EXPECT_NE(Push(ToText(fewer), checkpoint_->catalogue, none), "ok");
  Manifest swapped = checkpoint_->manifest;
  std::swap(swapped.modules.front(), swapped.modules.back());
  EXPECT_NE(Push(ToText(swapped), checkpoint_->catalogue, none), "ok");
  Manifest huge = checkpoint_->manifest;
  huge.modules[0][0]->blob.digest[0] ^= 1;
  huge.modules[0][0]->blob.bytes = std::uint64_t{1} << 60;
  EXPECT_NE(Push(ToText(huge), checkpoint_->catalogue, none).find("the limit is"),
            std::string::npos);
  EXPECT_EQ(Copies(), 0U);
  EXPECT_TRUE(Alive());
}

}  // namespace
}  // namespace shardwright::partial
