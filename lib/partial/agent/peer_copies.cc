// SPDX-License-Identifier: Apache-2.0
#include "partial/agent/peer_copies.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "support/base/bytes.h"
#include "support/base/text.h"

namespace shardwright::partial {
namespace {

using PeerClock = std::chrono::steady_clock;

/// Time that copies wait for gradients that trainers have not submitted yet.
constexpr std::chrono::seconds kLateGradients(10);

}  // namespace

Status PeerCopies::Set(const std::vector<PeerPlace>& peers) {
  std::vector<PeerPtr> next;
  for (const PeerPlace& place : peers) {
    const auto same =
        std::ranges::find_if(peers_, [&](const PeerPtr& one) { return one->place == place; });
    if (same != peers_.end()) {
      next.push_back(*same);
      continue;
    }
    const PeerPtr& peer = next.emplace_back(std::make_shared<Peer>());
    peer->place = place;
    SW_TRY_ASSIGN(peer->address, os::ParseAddress(place.address));
    peer->address.trusted_user = trusted_user_;
    peer->status.address = os::ToText(peer->address);
  }
  {
    const std::lock_guard lock(mutex_);
    std::swap(peers_, next);
  }
  for (const PeerPtr& peer : next) {
    if (std::ranges::find(peers_, peer) != peers_.end()) continue;
    peer->ends.store(true);
    removed_.push_back(peer);
  }
  Reap(false);
  if (started_) Start();
  return {};
}

void PeerCopies::Start() {
  started_ = true;
  for (const PeerPtr& peer : peers_) {
    if (!peer->thread.joinable()) Launch(peer);
  }
}

void PeerCopies::Launch(const PeerPtr& peer) {
  peer->thread = std::thread([this, one = peer.get()] {
    PushLoop(*one);
    one->over.store(true);
  });
}

void PeerCopies::End() {
  for (const PeerPtr& peer : peers_) peer->ends.store(true);
}

void PeerCopies::Stop() {
  End();
  for (const PeerPtr& peer : peers_) {
    if (peer->thread.joinable()) peer->thread.join();
  }
  Reap(true);
}

void PeerCopies::Reap(bool all) {
  for (auto peer = removed_.begin(); peer != removed_.end();) {
    const bool runs = (*peer)->thread.joinable();
    if (runs && !all && !(*peer)->over.load()) {
      ++peer;
      continue;
    }
    if (runs) (*peer)->thread.join();
    peer = removed_.erase(peer);
  }
}

std::vector<PeerStatus> PeerCopies::statuses() const {
  const std::lock_guard lock(mutex_);
  std::vector<PeerStatus> out;
  out.reserve(peers_.size());
  for (const PeerPtr& peer : peers_) out.push_back(peer->status);
  return out;
}

/// Checks that two peers are two agents, because a proxy could lead both connections to one.
Status PeerCopies::ExpectOther(Peer& peer, const Hello& agent) {
  const std::lock_guard lock(mutex_);
  peer.status.agent = agent.name;
  peer.id.clear();
  for (const PeerPtr& other : peers_) {
    if (other->id != agent.id) continue;
    return Fail(Errc::kMismatch, peer.status.address, ": the same agent as at ",
                other->status.address, ", \"", agent.name, "\"; give each peer once with --peer");
  }
  peer.id = agent.id;
  return {};
}

/// Copies the newest snapshot to a peer and records the state of the copy.
/// \returns the copied snapshot; null if there is none any more
Result<std::shared_ptr<const MemoryCheckpoint>> PeerCopies::PushNewest(Peer& peer,
                                                                       AgentClient& client,
                                                                       PeerGradients& gradients) {
  // The peer may have been away for long, and a restore may have rolled back its copy.
  SW_TRY(agent_.CatchUp());
  std::shared_ptr<const MemoryCheckpoint> newest = agent_.Newest();
  if (!newest) return newest;
  if (plan_ != nullptr) {
    SW_TRY_ASSIGN(const std::string answer, client.Ask("plan"));
    SW_TRY(plan_->CheckPeer(peer.place, answer));
  }
  const std::uint64_t iteration = newest->manifest.iteration;
  {
    const std::lock_guard lock(mutex_);
    peer.status.copying = iteration;
  }
  const PeerClock::time_point start = PeerClock::now();
  const AnnouncedGradients announced = gradients_ ? gradients.For(*newest) : AnnouncedGradients();
  const Result<PushedBytes> sent = client.Push(*newest, agent_.limiter(), announced);
  if (sent && gradients_) gradients.Sent(*newest, sent->replays);
  const std::chrono::duration<double> taken = PeerClock::now() - start;
  const std::lock_guard lock(mutex_);
  peer.status.copying.reset();
  if (!sent) return tl::unexpected<Error>(sent.error());
  const std::uint64_t bytes = sent->states + sent->gradients;
  peer.status.iteration = iteration;
  if (bytes > 0) peer.status.copied_seconds += taken.count();
  peer.status.copied_bytes += bytes;
  peer.status.gradient_bytes += sent->gradients;
  peer.status.replaced_bytes += sent->replaced;
  peer.status.failures = 0;
  peer.status.last_error.clear();
  sink_.Note(
      StrCat("copied iteration ", iteration, " to ", peer.status.address, ": ", bytes, " bytes"),
      0);
  if (sent->repeated > 0) {
    sink_.Warn(StrCat("copy to ", peer.status.address,
                      ": the replay of gradients failed there, so ", FormatBytes(sent->repeated),
                      " of states were sent"));
  }
  return newest;
}

void PeerCopies::PushLoop(Peer& peer) {
  AgentClient client(
      peer.address, key_, [&peer] { return peer.ends.load(); }, kAgentPatience, self_,
      [this, &peer](const Hello& agent) { return ExpectOther(peer, agent); });
  PeerGradients gradients(agent_.logs());
  std::shared_ptr<const MemoryCheckpoint> last;
  PeerClock::time_point late{};  // when a copy no longer waits for gradients
  PeerClock::time_point next{};
  while (!peer.ends.load()) {
    std::this_thread::sleep_for(kAgentTick);
    const std::shared_ptr<const MemoryCheckpoint> newest = agent_.Newest();
    if (!newest || newest == last || PeerClock::now() < next) continue;
    if (late == PeerClock::time_point{}) late = PeerClock::now() + kLateGradients;
    const bool waits = gradients_ && PeerClock::now() < late;
    if (waits && !agent_.logs().AllAt(newest->manifest.iteration)) continue;
    auto sent = PushNewest(peer, client, gradients);
    if (sent) {
      late = {};
      if (*sent) last = *std::move(sent);
      continue;
    }
    gradients.Failed();  // the logs keep nothing for a peer that cannot be reached
    if (peer.ends.load()) return;
    const std::string what =
        StrCat("copy to ", os::ToText(peer.address), ": ", sent.error().message);
    // A new plan reaches the agents at slightly different times.
    if (plan_ != nullptr && sent.error().code == Errc::kBusy) {
      sink_.Note(what, 1);
    } else {
      sink_.Warn(what);
    }
    const std::lock_guard lock(mutex_);
    ++peer.status.failures;
    peer.status.last_error = sent.error().message;
    next = PeerClock::now() + kAgentRetry;
  }
}

}  // namespace shardwright::partial
