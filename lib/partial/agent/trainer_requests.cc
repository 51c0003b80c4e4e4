// SPDX-License-Identifier: Apache-2.0
// Requests of trainers: they fill snapshots, submit gradients and record idle intervals.
// Also the history of an agent's sends, which idle intervals control: docs/formats/agent.md,
// "Gradients" and "Idle times".

#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include <nlohmann/json.hpp>

#include "partial/agent/agent_client.h"
#include "partial/agent/agent_protocol.h"
#include "partial/agent/agent_server.h"
#include "partial/agent/throttle/handed_memory.h"
#include "partial/store/store.h"
#include "support/base/bytes.h"
#include "support/base/text.h"

namespace shardwright::partial {
namespace {

using OrderedJson = nlohmann::ordered_json;

/// Interval at which a connection that waits for its trainer checks for a stop.
constexpr std::chrono::milliseconds kTrainerTick(100);
/// Time that a trainer has to fill a snapshot once the agent is shutting down.
constexpr std::chrono::milliseconds kFillAtStop(5000);
constexpr std::chrono::milliseconds kStoreTick(20);
/// Duration of the history in an answer.
constexpr std::chrono::minutes kTold(10);

/// Lists the byte ranges that a snapshot reads, one per line: first byte, length and file.
Result<std::string> ByteRangesText(const std::vector<FileByteRange>& stretches) {
  std::string text;
  for (const FileByteRange& one : stretches) {
    if (one.name.find('\n') != std::string::npos) {
      return Fail(Errc::kUnsupported, Quoted(one.name),
                  ": file names with a line feed are not supported");
    }
    text += std::to_string(one.first) + " " + std::to_string(one.bytes) + " " + one.name + "\n";
  }
  if (text.size() <= kAgentTextBytes) return text;
  return Fail(Errc::kLimit, "the list of byte ranges that the snapshot reads has ",
              FormatBytes(text.size()), "; the limit is ", FormatBytes(kAgentTextBytes));
}

/// Returns true if the trainer started from the store's last restore, at the iteration after which
/// it begins, from a checkpoint of that iteration with every module in that state. Otherwise some
/// chains of the log end there. A restore from memory alone proves nothing about the log.
Result<bool> WasRestored(const std::string& path, const Handing& handing) {
  SW_TRY_ASSIGN(const bool there, Store::IsStore(path));
  if (!there) return false;
  SW_TRY_ASSIGN(const Store store, Store::Open(path));
  SW_TRY_ASSIGN(const std::optional<RecoveryRecord> last, store.LastRecovery());
  if (!last || last->sequence != handing.recovery || last->resume != handing.begun) return false;
  if (!last->older || !last->older->empty()) return false;
  SW_TRY_ASSIGN(const std::vector<StoredCheckpoint> all, store.List());
  return std::ranges::any_of(all, [&](const StoredCheckpoint& one) {
    return one.sequence == last->manifest && one.iteration == last->resume;
  });
}

/// Registers a writer, and unregisters it when the trainer's process disconnects.
class Entered {
 public:
  Entered(GradientLogs& logs, const Handing& handing, bool restored)
      : logs_(logs), writer_(handing.writer) {
    logs_.Enter(writer_, handing.begun, restored, handing.every);
  }
  Entered(const Entered&) = delete;
  Entered& operator=(const Entered&) = delete;
  ~Entered() { logs_.Leave(writer_); }

 private:
  GradientLogs& logs_;
  const std::uint32_t writer_;
};

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

/// Takes a snapshot directly from a trainer, with headers of a checkpoint in the folder.
/// Sends the byte ranges to fill, waits for them, and answers again when they are in memory.
Status AgentServer::HandOver(os::Connection& connection, const std::string& tag) {
  std::optional<Status> sent;
  bool told = false;
  const auto fill = [&](const std::vector<FileByteRange>& stretches) -> Status {
    SW_TRY_ASSIGN(const std::string text, ByteRangesText(stretches));
    told = true;
    SW_TRY(SendText(connection, text));
    return AwaitFilled(connection);
  };
  const auto answer = [&](std::uint64_t iteration) {
    sent = SendAnswer(connection, {}, std::to_string(iteration));
  };
  const Result<std::uint64_t> iteration = commands_.snapshot(tag, answer, fill);
  if (!iteration) {
    if (sent) sink_.Warn(StrCat("snapshot: ", iteration.error().message));
    return sent ? *std::move(sent) : Status(tl::unexpected<Error>(iteration.error()));
  }
  if (!told) SW_TRY(fill({}));  // all bytes are already in memory
  if (!sent) answer(*iteration);
  return *std::move(sent);
}

/// \error kStopped  the trainer cannot fill it; kIo  connection lost, or timeout
Status AgentServer::AwaitFilled(os::Connection& connection) {
  Clock::time_point end = Clock::now() + kAgentPatience;
  bool ends = false;
  while (!stop_.load() && Clock::now() < end) {
    if (!ends && commands_.stopping && commands_.stopping()) {
      ends = true;
      end = std::min(end, Clock::now() + kFillAtStop);
    }
    SW_TRY_ASSIGN(const bool there, connection.HasLine(os::kLineBytes, kTrainerTick));
    if (!there) continue;
    SW_TRY_ASSIGN(const std::optional<std::string> line, connection.ReceiveLine(os::kLineBytes));
    if (!line)
      return Fail(Errc::kIo, connection.name(),
                  ": the trainer closed the connection before it had filled the snapshot");
    if (*line == "filled") return {};
    return Fail(Errc::kStopped, connection.name(), ": the trainer cancelled the snapshot");
  }
  return Fail(Errc::kIo, connection.name(), ": the trainer did not fill the snapshot in time");
}

Status AgentServer::SendExperts(os::Connection& connection) {
  SW_TRY_ASSIGN(const std::vector<ExpertParam> params, agent_.ExpertParams());
  nlohmann::json list = nlohmann::json::array();
  for (const ExpertParam& one : params) list.push_back({one.module, one.name, one.elems});
  // The store's last restore: the trainer was filled before this request.
  std::uint64_t recovery = 0;
  const std::string& path = agent_.options().save.store;
  SW_TRY_ASSIGN(const bool there, Store::IsStore(path));
  if (there) {
    SW_TRY_ASSIGN(const Store store, Store::Open(path));
    SW_TRY_ASSIGN(const auto last, store.LastRecoveryFile());
    if (last) recovery = last->sequence;
  }
  const nlohmann::json out = {{"recovery", recovery}, {"params", std::move(list)}};
  const std::string text = out.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  return SendText(connection, text);
}

/// Receives a table of the trainer's square roots in shared memory.
Status AgentServer::TakeRoots(os::Connection& connection, std::string_view last) {
  SW_TRY_ASSIGN(const std::uint64_t bits, ParseNumber(last, ~std::uint32_t{0}, "last"));
  SW_TRY(SendAnswer(connection, {}));
  SW_TRY_ASSIGN(const int descriptor, connection.ReceiveDescriptor());
  constexpr std::uint64_t kBytes = optimizer_steps::RootTable::kRoots * sizeof(float);
  SW_TRY_ASSIGN(const HandedMemory memory, HandedMemory::Map(descriptor, kBytes));
  const std::span<const float> roots(reinterpret_cast<const float*>(memory.bytes().data()),
                                     optimizer_steps::RootTable::kRoots);
  SW_TRY_ASSIGN(optimizer_steps::RootTable table,
                optimizer_steps::RootTable::FromRoots(roots, static_cast<std::uint32_t>(bits)));
  SW_TRY_ASSIGN(const auto digest, agent_.logs().AddRoots(std::move(table)));
  return SendAnswer(connection, {}, digest ? exec::Hex(*digest) : "none");
}

/// Serves a trainer's process that submits gradients until it disconnects.
Status AgentServer::TakeGradients(os::Connection& connection,
                                  const std::vector<std::string_view>& words) {
  SW_TRY_ASSIGN(const std::uint64_t number, ParseNumber(words[1], ~std::uint32_t{0}, "writer"));
  SW_TRY_ASSIGN(const std::uint64_t bytes, ParseNumber(words[2], kAgentTextBytes, "bytes"));
  const auto writer = static_cast<std::uint32_t>(number);
  const std::string where = StrCat("gradients of writer ", writer);
  SW_TRY_ASSIGN(const std::string text, ReceiveText(connection, bytes));
  SW_TRY_ASSIGN(const Handing handing, ParseHanding(text, writer, where));
  SW_TRY(SendAnswer(connection, {}));
  SW_TRY_ASSIGN(const int descriptor, connection.ReceiveDescriptor());
  SW_TRY_ASSIGN(const HandedMemory memory,
                HandedMemory::Map(descriptor, handing.places * handing.place_bytes));
  SW_TRY_ASSIGN(const bool restored, WasRestored(agent_.options().save.store, handing));
  const Entered entered(agent_.logs(), handing, restored);
  agent_.PlanLogs();
  SW_TRY(SendAnswer(connection, {}));
  for (;;) {
    SW_TRY_ASSIGN(const std::string line, NextLine(connection, where));
    const std::vector<std::string_view> step = WordsOf(line);
    if (step.size() != 4 || step[0] != "step") {
      return BadInput(where, ": step ITERATION PLACE BYTES expected");
    }
    SW_TRY_ASSIGN(const std::uint64_t iteration,
                  ParseNumber(step[1], ~std::uint64_t{0}, "iteration"));
    SW_TRY_ASSIGN(const std::uint64_t place, ParseNumber(step[2], handing.places - 1, "place"));
    SW_TRY_ASSIGN(const std::uint64_t length, ParseNumber(step[3], kAgentTextBytes, "bytes"));
    SW_TRY_ASSIGN(const std::string told, ReceiveText(connection, length));
    SW_TRY_ASSIGN(const std::vector<LogStep> steps, ParseLogSteps(told, where));
    SW_TRY(AwaitStore());
    SW_TRY_ASSIGN(const Store store, Store::Open(agent_.options().save.store));
    SW_TRY(store.CheckPast(handing.recovery, iteration, where));
    const auto gradients = memory.bytes().subspan(place * handing.place_bytes, handing.place_bytes);
    SW_TRY_ASSIGN(const std::uint64_t done,
                  agent_.logs().Append(handing, iteration, gradients, steps));
    SW_TRY(SendAnswer(
        connection, {},
        std::to_string(iteration) + " " + std::to_string(place) + " " + std::to_string(done)));
  }
}

/// Waits for the next line of a trainer.
/// \param where  names the connection in errors
/// \error kIo  the trainer closed the connection; kStopped  the agent is shutting down
Result<std::string> AgentServer::NextLine(os::Connection& connection, const std::string& where) {
  while (!stop_.load()) {
    SW_TRY_ASSIGN(const bool there, connection.HasLine(os::kLineBytes, kTrainerTick));
    if (!there) continue;
    SW_TRY_ASSIGN(std::optional<std::string> line, connection.ReceiveLine(os::kLineBytes));
    if (!line) return Fail(Errc::kIo, where, ": the trainer closed the connection");
    return *std::move(line);
  }
  return Fail(Errc::kStopped, where, ": the agent is shutting down");
}

/// Waits for the first checkpoint to reach the store, because a log requires it.
Status AgentServer::AwaitStore() {
  const std::string& path = agent_.options().save.store;
  for (;;) {
    SW_TRY_ASSIGN(const bool there, Store::IsStore(path));
    if (there) return {};
    if (stop_.load())
      return Fail(Errc::kStopped, path, ": the agent is shutting down before the first checkpoint");
    std::this_thread::sleep_for(kStoreTick);
  }
}

/// Serves a trainer's process that records idle intervals until it disconnects.
Status AgentServer::TakeMarks(os::Connection& connection, std::string_view rank) {
  SW_TRY_ASSIGN(const std::uint64_t number, ParseNumber(rank, ~std::uint32_t{0}, "rank"));
  const std::string where = StrCat("idle times of rank ", number);
  SW_TRY(SendAnswer(connection, {}, std::to_string(kIdleMarks)));
  SW_TRY_ASSIGN(const int descriptor, connection.ReceiveDescriptor());
  SW_TRY_ASSIGN(HandedMemory memory, HandedMemory::Map(descriptor, kIdleMarkBytes));
  const Marking marking(agent_.limiter().idle(), static_cast<std::uint32_t>(number),
                        std::move(memory));
  SW_TRY(SendAnswer(connection, {}));
  SW_TRY(NextLine(connection, where));
  return Fail(Errc::kBadInput, where, ": this connection accepts no further requests");
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
    for (const IdleRanks::Interval& one : rank.idle) {
      idle.push_back({Nanoseconds(one.begin), Nanoseconds(one.end)});
    }
    out["ranks"].push_back({{"rank", rank.number}, {"idle", std::move(idle)}});
  }
  const std::string text = out.dump();
  return SendText(connection, text);
}

}  // namespace shardwright::partial
