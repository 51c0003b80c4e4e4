// SPDX-License-Identifier: Apache-2.0
#include "partial/agent/peers/plan_file.h"

#include <algorithm>
#include <utility>

#include "partial/store/store.h"
#include "support/os/net/answer.h"
#include "support/os/socket.h"

namespace shardwright::partial {
namespace {

std::optional<os::Identity> IdentityOf(const std::string& path) {
  const auto file = os::File::OpenRead(path);
  if (!file) return std::nullopt;
  const auto identity = file->Stat();
  return identity ? std::optional(*identity) : std::nullopt;
}

}  // namespace

Status PlanFile::CheckStoreOf(const AgentPlan& plan) const {
  if (plan.store.empty()) return {};
  SW_TRY_ASSIGN(const bool there, Store::IsStore(store_));
  if (!there) {
    return Fail(Errc::kNotFound, store_, ": no store found, but ", path_, " is for store ",
                plan.store, "; check that the file system is mounted");
  }
  SW_TRY_ASSIGN(const Store store, Store::Open(store_));
  if (store.head().id == plan.store) return {};
  return Fail(Errc::kMismatch, path_, ": a plan for store ", plan.store, ", but ", store_,
              " is store ", store.head().id);
}

Result<AgentPlan> PlanFile::Read() const {
  SW_TRY_ASSIGN(AgentPlan plan, ReadAgentPlan(path_));
  const PlannedAgent* const self = plan.Find(name_);
  if (self == nullptr) {
    return Fail(Errc::kMismatch, path_, ": version ", plan.version, " of the plan has ",
                plan.alive(), " agents, and none of them is \"", name_,
                "\"; give this agent a name of the plan with --name, or make a plan that has it");
  }
  std::vector<std::uint32_t> places = self->peers;
  places.push_back(static_cast<std::uint32_t>(self - plan.agents.data()));
  for (const std::uint32_t place : places) {
    const std::string& text = plan.agents[place].address;
    SW_TRY_ASSIGN(const os::Address address, os::ParseAddress(text));
    if (ports_ || address.is_local()) continue;
    return Fail(Errc::kUsage, path_, ": ", text, " is a port, which requires --key or --insecure");
  }
  SW_TRY(CheckStoreOf(plan));
  return plan;
}

Status PlanFile::Start() {
  seen_ = IdentityOf(path_);
  SW_TRY_ASSIGN(AgentPlan plan, Read());
  const std::lock_guard lock(mutex_);
  plan_ = std::move(plan);
  return {};
}

Status PlanFile::CheckNext(const AgentPlan& next) const {
  const std::lock_guard lock(mutex_);
  if (next.job != plan_.job) {
    return Fail(Errc::kMismatch, path_, ": a plan of job ", next.job, ", but this agent is of job ",
                plan_.job);
  }
  const bool other = next.version == plan_.version && ToText(next) != ToText(plan_);
  if (next.version < plan_.version || other) {
    return Fail(Errc::kMismatch, path_, ": version ", next.version,
                (other ? " of the plan has changed" : " of the plan is stale"),
                "; this agent has version ", plan_.version,
                ". Make a newer version with pec-save replan");
  }
  const std::string& before = plan_.Find(name_)->address;
  const std::string& after = next.Find(name_)->address;
  if (before == after) return {};
  return Fail(Errc::kMismatch, path_, ": this agent moves from ", before, " to ", after,
              "; start it again");
}

bool PlanFile::Look(Sink& sink) {
  const auto now = std::chrono::steady_clock::now();
  if (now < next_look_) return false;
  next_look_ = now + every_;
  const std::optional<os::Identity> identity = IdentityOf(path_);
  const std::string before = state().last_error;
  if (identity == seen_ && before.empty()) return false;
  seen_ = identity;
  Result<AgentPlan> next = Read();
  const Status good = next ? CheckNext(*next) : tl::unexpected<Error>(next.error());
  if (!good && good.error().message != before) {
    sink.Warn("plan not taken: " + good.error().message);
  }
  const std::lock_guard lock(mutex_);
  last_error_ = good ? "" : good.error().message;
  if (!good || next->version == plan_.version) return false;
  plan_ = *std::move(next);
  return true;
}

std::vector<PeerPlace> PlanFile::Peers() const {
  const std::lock_guard lock(mutex_);
  std::vector<PeerPlace> peers;
  for (const std::uint32_t peer : plan_.Find(name_)->peers) {
    const PlannedAgent& agent = plan_.agents[peer];
    peers.push_back({agent.address, agent.name, agent.since});
  }
  return peers;
}

std::string PlanFile::address() const {
  const std::lock_guard lock(mutex_);
  return plan_.Find(name_)->address;
}

std::string PlanFile::Answer() const {
  const std::lock_guard lock(mutex_);
  return StrCat(plan_.job, ' ', plan_.version, ' ', name_);
}

PlanFile::State PlanFile::state() const {
  const std::lock_guard lock(mutex_);
  return {path_, plan_.job, plan_.version, last_error_};
}

Status PlanFile::CheckPeer(const PeerPlace& peer, const std::string& answer) const {
  const std::vector<std::string_view> words = os::WordsOf(answer);
  const std::lock_guard lock(mutex_);
  if (words.size() != 3 || words[0] != plan_.job) {
    return Fail(Errc::kMismatch, peer.address, ": an agent of job ", plan_.job,
                " expected, found \"", answer, '"');
  }
  if (words[2] != peer.name) {
    return Fail(Errc::kMismatch, peer.address, ": agent \"", peer.name, "\" expected, found \"",
                words[2], '"');
  }
  if (words[1] == std::to_string(plan_.version)) return {};
  return Fail(Errc::kBusy, peer.address, ": agent \"", peer.name, "\" has version ", words[1],
              " of the plan, this agent version ", plan_.version,
              "; copies are sent once both have the same version");
}

Status PlanFile::CheckOrigin(std::string_view origin) const {
  const std::lock_guard lock(mutex_);
  if (const PlannedAgent* const sender = plan_.Find(origin); sender != nullptr) {
    const bool here = std::ranges::any_of(
        sender->peers, [&](std::uint32_t peer) { return plan_.agents[peer].name == name_; });
    if (here) return {};
  }
  return Fail(Errc::kMismatch, "push: version ", plan_.version,
              " of the plan assigns no copies of \"", origin, "\" to \"", name_, '"');
}

}  // namespace shardwright::partial
