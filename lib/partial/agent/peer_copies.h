// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "partial/agent/agent.h"
#include "partial/agent/agent_client.h"
#include "partial/agent/gradient_copy.h"
#include "partial/agent/peers/peer_status.h"
#include "partial/agent/peers/plan_file.h"
#include "support/base/result.h"
#include "support/base/sink.h"
#include "support/os/socket.h"
#include "support/os/tls.h"

namespace shardwright::partial {

/// Interval at which a thread of the agent looks for work, and for the end of the agent.
inline constexpr std::chrono::milliseconds kAgentTick(50);

/// Delay of the next attempt after a failed persist, copy or replay.
inline constexpr std::chrono::milliseconds kAgentRetry(1000);

/// Sends the newest snapshot of an agent to each of its peers. Each peer has its own thread.
/// status() may be called from any thread, all other methods from one.
class PeerCopies {
 public:
  /// \param self  hello of the agent; used from Start on
  /// \param plan  what peers must agree with; null: peers are taken as given
  /// \pre all references outlive this object
  PeerCopies(Agent& agent, const Hello& self, const PlanFile* plan, Sink& sink)
      : agent_(agent), self_(self), plan_(plan), sink_(sink) {}
  PeerCopies(const PeerCopies&) = delete;
  PeerCopies& operator=(const PeerCopies&) = delete;
  /// As Stop.
  ~PeerCopies() { Stop(); }

  /// Sets the key for peers at ports (null: none) and the user for those at socket files.
  void SetAccess(std::shared_ptr<const os::TlsKey> key, std::optional<std::uint32_t> trusted_user) {
    key_ = std::move(key);
    trusted_user_ = trusted_user;
  }

  /// Makes copies contain gradients in place of states that are more bytes. Call before Start.
  /// \pre the agent replays gradients (AgentOptions::replay)
  void SendGradients() { gradients_ = true; }

  /// Replaces the peers. Unchanged ones keep their state. New ones get the newest snapshot. Copies
  /// to removed ones end. Nothing is sent before Start.
  /// \error kUsage  an invalid address; nothing changes
  Status Set(const std::vector<PeerPlace>& peers);

  /// Starts to send.
  void Start();
  /// Ends all copies without waiting for their threads.
  void End();
  /// Ends all copies and joins their threads.
  void Stop();

  /// Returns the states of all peers, in the order of Set.
  std::vector<PeerStatus> statuses() const;

 private:
  struct Peer {
    PeerPlace place;
    os::Address address;
    PeerStatus status;  // under mutex_
    std::string id;     // of the process there; under mutex_
    std::atomic<bool> ends = false;
    std::atomic<bool> over = false;
    std::thread thread;
  };
  using PeerPtr = std::shared_ptr<Peer>;

  void Launch(const PeerPtr& peer);
  void Reap(bool all);
  Status ExpectOther(Peer& peer, const Hello& agent);
  Result<std::shared_ptr<const MemoryCheckpoint>> PushNewest(Peer& peer, AgentClient& client,
                                                             PeerGradients& gradients);
  void PushLoop(Peer& peer);

  Agent& agent_;
  const Hello& self_;
  const PlanFile* const plan_;
  Sink& sink_;
  std::shared_ptr<const os::TlsKey> key_;
  std::optional<std::uint32_t> trusted_user_;
  bool gradients_ = false;
  bool started_ = false;
  mutable std::mutex mutex_;
  std::vector<PeerPtr> peers_;  // changed by Set, under mutex_
  std::list<PeerPtr> removed_;  // their threads may still run
};

}  // namespace shardwright::partial
