// SPDX-License-Identifier: Apache-2.0
// Idle marks of trainers, and the history of an
// agent's sends: docs/formats/agent.md, "Idle times".

#include <chrono>
#include <utility>

#include <nlohmann/json.hpp>

#include "partial/agent/agent_protocol.h"
#include "partial/agent/agent_server.h"
#include "partial/agent/throttle/handed_memory.h"

namespace shardwright::partial {
namespace {

using OrderedJson = nlohmann::ordered_json;

constexpr std::chrono::milliseconds kMarkTick(100);
/// Duration of the history in an answer.
constexpr std::chrono::minutes kTold(10);

/// Registers a rank, and unregisters it when the trainer's process disconnects.
class Marking {
 public:
  Marking(IdleRanks& ranks, std::uint32_t rank, HandedMemory memory)
      : ranks_(ranks), rank_(rank), entered_(ranks.Enter(rank, std::move(memory))) {}
  Marking(const Marking&) = delete;
  Marking& operator=(const Marking&) = delete;
  ~Marking() { ranks_.Leave(rank_, entered_); }

 private:
  IdleRanks& ranks_;
  const std::uint32_t rank_;
  const std::uint64_t entered_;
};

std::int64_t Nanoseconds(IdleRanks::Time time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

}  // namespace

/// Serves a trainer's process that records idle intervals until it disconnects.
Status AgentServer::TakeMarks(os::Connection& connection, std::string_view rank) {
  SW_TRY_ASSIGN(const std::uint64_t number, ParseNumber(rank, ~std::uint32_t{0}, "rank"));
  const std::string where = "idle times of rank " + std::to_string(number);
  SW_TRY(SendAnswer(connection, {}, std::to_string(kIdleMarks)));
  SW_TRY_ASSIGN(const int descriptor, connection.ReceiveDescriptor());
  SW_TRY_ASSIGN(HandedMemory memory, HandedMemory::Map(descriptor, kIdleMarkBytes));
  const Marking marking(agent_.limiter().idle(), static_cast<std::uint32_t>(number),
                        std::move(memory));
  SW_TRY(SendAnswer(connection, {}));
  while (!stop_.load()) {
    SW_TRY_ASSIGN(const bool there, connection.HasLine(os::kLineBytes, kMarkTick));
    if (!there) continue;
    SW_TRY_ASSIGN(const std::optional<std::string> line, connection.ReceiveLine(os::kLineBytes));
    if (!line) return Fail(Errc::kIo, where, ": the trainer has closed the connection");
    return Fail(Errc::kBadInput, where, ": nothing more is said on this connection");
  }
  return Fail(Errc::kStopped, where, ": the agent is about to end");
}

/// Answers with the times and sizes of sends, and the idle intervals of ranks.
Status AgentServer::SendSends(os::Connection& connection) const {
  const Limiter& limiter = agent_.limiter();
  const IdleRanks::Time now = limiter.now();
  const IdleRanks::Time first = now - kTold;
  OrderedJson out = OrderedJson::object();
  out["now"] = Nanoseconds(now);
  out["kinds"] = OrderedJson::array();
  for (std::size_t i = 0; i < kSentKinds; ++i) out["kinds"].push_back(Name(static_cast<Sent>(i)));
  out["snapshots"] = OrderedJson::array();
  for (const SnapshotTime& one : limiter.Snapshots()) {
    if (one.time >= first) out["snapshots"].push_back({one.iteration, Nanoseconds(one.time)});
  }
  out["sends"] = OrderedJson::array();
  for (const SentBytes& one : limiter.History()) {
    if (one.time < first) continue;
    out["sends"].push_back({Nanoseconds(one.time), one.bytes, static_cast<int>(one.kind)});
  }
  out["ranks"] = OrderedJson::array();
  for (const IdleRanks::Rank& rank : limiter.idle().Between(first, now)) {
    OrderedJson idle = OrderedJson::array();
    for (const IdleRanks::Stretch& one : rank.idle) {
      idle.push_back({Nanoseconds(one.begin), Nanoseconds(one.end)});
    }
    out["ranks"].push_back({{"rank", rank.number}, {"idle", std::move(idle)}});
  }
  const std::string text = out.dump();
  SW_TRY(SendAnswer(connection, {}, std::to_string(text.size())));
  return connection.Send(text);
}

}  // namespace shardwright::partial
