// SPDX-License-Identifier: Apache-2.0
#include "partial/agent/agent_server.h"

#include <unistd.h>

#include <utility>

#include <nlohmann/json.hpp>

#include "partial/agent/agent_protocol.h"
#include "support/base/crc32.h"

namespace shardwright::partial {
namespace {

using OrderedJson = nlohmann::ordered_json;

constexpr std::chrono::milliseconds kAcceptTick(100);
/// Interval at which a connection checks for a free session slot.
constexpr std::chrono::milliseconds kRoomTick(10);

OrderedJson PeersJson(const AgentCommands& commands) {
  OrderedJson out = OrderedJson::array();
  if (!commands.peers) return out;
  for (const PeerStatus& peer : commands.peers()) {
    out.push_back({{"address", peer.address},
                   {"agent", peer.agent},
                   {"state", StateOf(peer)},
                   {"iteration", peer.iteration ? OrderedJson(*peer.iteration) : OrderedJson()},
                   {"copying", peer.copying ? OrderedJson(*peer.copying) : OrderedJson()},
                   {"copied_bytes", peer.copied_bytes},
                   {"copied_seconds", peer.copied_seconds},
                   {"gradient_bytes", peer.gradient_bytes},
                   {"replaced_bytes", peer.replaced_bytes},
                   {"failures", peer.failures},
                   {"last_error", peer.last_error}});
  }
  return out;
}

std::string StatusText(const Agent& agent, const AgentCommands& commands) {
  const AgentStatus status = agent.status();
  OrderedJson buffers = OrderedJson::array();
  for (std::size_t i = 0; i < status.states.size(); ++i) {
    OrderedJson one = {{"state", Name(status.states[i])}};
    if (status.states[i] != BufferState::kIdle) one["iteration"] = status.iterations[i];
    buffers.push_back(std::move(one));
  }
  OrderedJson copies = OrderedJson::array();
  for (const AgentEntry& entry : agent.Entries()) {
    if (entry.state != "copy") continue;
    copies.push_back(
        {{"origin", entry.origin}, {"iteration", entry.checkpoint->manifest.iteration}});
  }
  OrderedJson out = OrderedJson::object();
  out["pid"] = ::getpid();
  out["buffers"] = std::move(buffers);
  out["copies"] = std::move(copies);
  out["peers"] = PeersJson(commands);
  if (commands.plan != nullptr) {
    const PlanFile::State plan = commands.plan->state();
    out["plan"] = {{"file", plan.file},
                   {"job", plan.job},
                   {"version", plan.version},
                   {"last_error", plan.last_error}};
  }
  out["newest"] = status.newest ? OrderedJson(*status.newest) : OrderedJson(nullptr);
  out["persisted"] = status.persisted ? OrderedJson(*status.persisted) : OrderedJson(nullptr);
  out["snapshots"] = status.snapshots;
  out["snapshots_failed"] = status.snapshots_failed;
  out["snapshots_skipped"] = status.snapshots_skipped;
  out["persists"] = status.persists;
  out["persists_failed"] = status.persists_failed;
  out["snapshot_bytes"] = status.snapshot_bytes;
  out["snapshot_seconds"] = status.snapshot_seconds;
  out["memory_bytes"] = status.memory_bytes;
  out["memory_limit_bytes"] = status.memory_limit_bytes;
  out["store"] = agent.options().save.store;
  out["checkpoints"] = commands.checkpoints;
  out["policy"] = Name(agent.options().save.policy);
  out["k"] = agent.options().save.k_snapshot;
  out["tokens"] = agent.options().tokens_path;
  const GradientLogStatus logged = agent.logs().status();
  out["logs"] = {{"writers", logged.writers},
                 {"records", logged.records},
                 {"gradient_bytes", logged.gradient_bytes},
                 {"cut_bytes", logged.cut_bytes},
                 {"held_bytes", logged.held_bytes},
                 {"dropped_bytes", logged.dropped_bytes},
                 {"newest", logged.newest ? OrderedJson(*logged.newest) : OrderedJson()},
                 {"persisted", logged.persisted ? OrderedJson(*logged.persisted) : OrderedJson()}};
  if (agent.options().replay) {
    out["replays"] = {{"modules", status.replays.modules},
                      {"gradient_bytes", status.replays.gradient_bytes},
                      {"seconds", status.replays.seconds},
                      {"older", status.replays.older},
                      {"refused", status.replays.refused}};
  }
  OrderedJson sent = OrderedJson::object();
  for (std::size_t i = 0; i < kSentKinds; ++i) sent[Name(static_cast<Sent>(i))] = status.sent[i];
  out["sent"] = std::move(sent);
  out["sends_due"] = status.sends_due;
  out["ranks_marking"] = status.ranks_marking;
  out["last_error"] = status.last_error;
  return out.dump(-1, ' ', false, OrderedJson::error_handler_t::replace);
}

}  // namespace

AgentServer::AgentServer(Agent& agent, const AgentCommands& commands, os::Listener listener,
                         Sink& sink, std::shared_ptr<const os::TlsKey> key, ServerLimits limits)
    : agent_(agent),
      commands_(commands),
      listener_(std::move(listener)),
      sink_(sink),
      key_(listener_.address().is_local() ? nullptr : std::move(key)),
      limits_(limits) {
  thread_ = std::thread([this] { Accept(); });
}

AgentServer::~AgentServer() {
  stop_.store(true);
  thread_.join();
}

void AgentServer::Reap(bool all) {
  for (auto session = sessions_.begin(); session != sessions_.end();) {
    if (!all && !session->over.load()) {
      ++session;
      continue;
    }
    session->thread.join();
    session = sessions_.erase(session);
  }
}

void AgentServer::Accept() {
  while (!stop_.load()) {
    Reap(false);
    if (waiting_.load() > 0) MakeRoom();
    const std::size_t admitted = admitted_.load();
    const bool full = key_ ? sessions_.size() >= admitted + limits_.handshakes
                           : sessions_.size() >= limits_.sessions;
    if (full) {
      if (!listener_.Pending(kAcceptTick)) continue;
      if (key_) {
        EndHandshakes();
      } else {
        MakeRoom();
      }
      std::this_thread::sleep_for(kRoomTick);
      continue;
    }
    auto connection = listener_.Accept(kAcceptTick, limits_.idle, [this] { return stop_.load(); });
    if (!connection) {
      sink_.Warn(connection.error().message);
      std::this_thread::sleep_for(kAcceptTick);
      continue;
    }
    if (!*connection) continue;
    Session& session = sessions_.emplace_back();
    if (key_) {
      session.proven.store(false);
      session.state.store(State::kWaits);
    } else {
      session.admitted.store(true);
      ++admitted_;
    }
    session.thread = std::thread([this, &session, one = std::move(**connection)]() mutable {
      Serve(session, std::move(one));
      if (session.admitted.exchange(false)) --admitted_;
      session.over.store(true);
    });
  }
  Reap(true);
}

/// Ends the session that has been idle longest, unless another one is already ending.
void AgentServer::MakeRoom() {
  Session* longest = nullptr;
  const Clock::time_point now = Clock::now();
  for (Session& session : sessions_) {
    if (!session.admitted.load()) continue;
    const State state = session.state.load();
    const Clock::time_point since = session.since.load();
    if (state == State::kLeaves) return;  // a slot becomes free in a moment
    if (state == State::kWaits && since <= now - limits_.grace &&
        (longest == nullptr || since < longest->since.load())) {
      longest = &session;
    }
  }
  State waits = State::kWaits;
  if (longest != nullptr) longest->state.compare_exchange_strong(waits, State::kLeaves);
}

/// Ends all handshakes without a proven key that exceed the grace time.
void AgentServer::EndHandshakes() {
  const Clock::time_point now = Clock::now();
  for (Session& session : sessions_) {
    if (session.proven.load() || session.since.load() > now - limits_.unproven_grace) continue;
    State waits = State::kWaits;
    session.state.compare_exchange_strong(waits, State::kLeaves);
  }
}

/// Takes a session slot for a connection that has proved the key. Only
/// such connections wait for slots, so that others cannot block them.
/// \returns false: no slot became free in time
bool AgentServer::Enter(Session& session) {
  const Clock::time_point end = Clock::now() + limits_.idle;
  ++waiting_;
  bool entered = false;
  while (!entered && !stop_.load() && Clock::now() < end) {
    std::size_t taken = admitted_.load();
    entered = taken < limits_.sessions && admitted_.compare_exchange_strong(taken, taken + 1);
    if (!entered) std::this_thread::sleep_for(kRoomTick);
  }
  --waiting_;
  session.admitted.store(entered);
  return entered;
}

/// Verifies that the peer has the key. \returns false: the connection ends
bool AgentServer::Prove(Session& session, os::Connection& connection) {
  const auto leaves = [&] { return session.state.load() == State::kLeaves; };
  auto channel = key_->MakeChannel(true);
  Status done = channel ? connection.Secure(*std::move(channel), limits_.idle, leaves)
                        : tl::unexpected<Error>(channel.error());
  if (done) {
    session.proven.store(true);
    session.state.store(State::kAsks);  // no longer to be ended as a late handshake
    return true;
  }
  if (done.error().code == Errc::kStopped) return false;
  SendError(connection, done.error());
  if (done.error().code == Errc::kUsage) {
    // The peer speaks the protocol without a key, and gets an error.
    // Reads its message first, because the error would be lost otherwise.
    (void)connection.HasLine(os::kLineBytes, kAcceptTick);
    (void)SendAnswer(connection,
                     Fail(Errc::kUsage, "this port requires the agent's key; pass --key FILE"));
  }
  return false;
}

/// Reports a failed handshake to the user: a warning at most once per minute and host.
void AgentServer::SendError(const os::Connection& connection, const Error& error) {
  std::string what = StrCat(error.message, ": a connection from ", connection.peer());
  const auto failures = failed_.Report(connection.peer());
  if (!failures) return sink_.Note(StrCat("agent: ", what), 1);
  if (*failures > 1) what += StrCat(", ", *failures, " failures since the last warning");
  sink_.Warn(what);
}

/// Waits for a complete request. \returns false: the connection ends
bool AgentServer::Await(Session& session, os::Connection& connection) const {
  const Clock::time_point start = Clock::now();
  session.since.store(start);
  if (session.state.exchange(State::kWaits) == State::kLeaves) return false;
  while (session.state.load() == State::kWaits && Clock::now() - start < limits_.idle) {
    const Result<bool> line = connection.HasLine(os::kLineBytes, kAcceptTick);
    if (!line) return false;
    State waits = State::kWaits;
    if (*line) return session.state.compare_exchange_strong(waits, State::kAsks);
  }
  return false;
}

void AgentServer::Serve(Session& session, os::Connection connection) {
  if (key_ && !(Prove(session, connection) && Enter(session))) return;
  std::optional<Hello> client;  // for connections to a port
  while (Await(session, connection)) {
    const auto line = connection.ReceiveLine(os::kLineBytes);
    if (!line) {
      sink_.Note(StrCat("agent: ", line.error().message), 1);
      (void)SendAnswer(connection, tl::unexpected<Error>(line.error()));
      return;
    }
    if (!*line) return;
    Status status;
    const bool first = !connection.is_local() && !client;
    if (first) {
      Result<Hello> hello = Welcome(connection, **line);
      if (hello) {
        client = *std::move(hello);
        status = SendAnswer(connection, {}, ToText(commands_.self));
      } else {
        status = tl::unexpected<Error>(std::move(hello).error());
      }
    } else {
      status = Answer(connection, **line, client ? &*client : nullptr);
    }
    if (status) continue;
    sink_.Note(StrCat("agent: ", status.error().message), 1);
    (void)SendAnswer(connection, status);
    if (first) return;
    // After an interrupted transfer the beginning of the next request is unknown.
    const Errc code = status.error().code;
    if (code == Errc::kIo || code == Errc::kBadInput || code == Errc::kLimit) return;
  }
}

/// Reads the hello of a connection to a port.
Result<Hello> AgentServer::Welcome(os::Connection& connection, const std::string& line) const {
  constexpr std::string_view kHello = "hello ";
  if (!line.starts_with(kHello)) {
    return Fail(Errc::kUsage,
                "a client of an older version: \"hello VERSION ROLE NAME ID\" is expected first; "
                "use the same release of Shardwright on both sides");
  }
  SW_TRY_ASSIGN(Hello client,
                ParseHello(std::string_view(line).substr(kHello.size()), connection.peer()));
  if (client.id != commands_.self.id || client.role != Hello::Role::kAgent) return client;
  return Fail(Errc::kMismatch,
              "hello: the connection comes from this agent itself: --peer names its own address, "
              "or there is a relay in between");
}

/// \param client  hello of the client of a port; null: connection to a socket file
Status AgentServer::Answer(os::Connection& connection, const std::string& line,
                           const Hello* client) {
  const std::vector<std::string_view> words = WordsOf(line);
  const std::string_view verb = words.empty() ? std::string_view() : words[0];
  const auto is = [&](std::string_view name, std::size_t count) {
    return verb == name && words.size() == count + 1;
  };
  if (is("status", 0)) return SendText(connection, StatusText(agent_, commands_));
  if (is("list", 0)) return List(connection);
  if (is("sends", 0)) return SendSends(connection);
  if (is("get", 1)) {
    SW_TRY_ASSIGN(const exec::Digest digest, ParseDigest(words[1]));
    const BlobPtr blob = agent_.Find(digest);
    if (!blob) return Fail(Errc::kNotFound, "blob ", exec::Hex(digest), " is not in memory");
    Limiter::Job job(agent_.limiter());  // a client waits
    return SendBlob(connection, *blob, job);
  }
  if (is("read", 3)) {
    SW_TRY_ASSIGN(const exec::Digest digest, ParseDigest(words[1]));
    SW_TRY_ASSIGN(const std::uint64_t offset, ParseNumber(words[2], ~std::uint64_t{0}, "offset"));
    SW_TRY_ASSIGN(const std::uint64_t bytes, ParseNumber(words[3], kAgentReadBytes, "bytes"));
    return Read(connection, digest, offset, bytes);
  }
  if (is("catalogue", 1)) {
    SW_TRY_ASSIGN(const exec::Digest digest, ParseDigest(words[1]));
    for (const AgentEntry& entry : agent_.Entries()) {
      if (entry.checkpoint->manifest.catalogue == digest) {
        return SendText(connection, entry.checkpoint->catalogue);
      }
    }
    return Fail(Errc::kNotFound, "catalogue ", exec::Hex(digest), " is not in memory");
  }
  if (is("plan", 0)) {
    if (commands_.plan != nullptr) return SendAnswer(connection, {}, commands_.plan->Answer());
    return Fail(Errc::kMismatch, "this agent follows no plan; start it with --plan");
  }
  // Without the recovery number it comes from an older version.
  if (is("push", 3) || is("push", 4) || is("push", 5)) return Push(connection, words, client);
  if (is("flush", 0)) {
    SW_TRY_ASSIGN(const std::optional<std::uint64_t> stored, commands_.flush());
    return SendAnswer(connection, {}, stored ? std::to_string(*stored) : "none");
  }
  if (is("snapshot", 0) || is("snapshot", 1) || is("offer", 1) || is("stop", 0) ||
      is("experts", 0) || is("roots", 1) || is("gradients", 2) || is("marks", 1)) {
    if (!connection.is_local()) {
      return Fail(Errc::kUsage, verb, ": this request requires a socket file (unix:PATH)");
    }
    if (verb == "stop") {
      SW_TRY(commands_.stop());
      return SendAnswer(connection, {});
    }
    if (verb == "experts") return SendExperts(connection);
    if (verb == "roots") return TakeRoots(connection, words[1]);
    if (verb == "gradients") return TakeGradients(connection, words);
    if (verb == "marks") return TakeMarks(connection, words[1]);
    if (verb == "offer") return HandOver(connection, std::string(words[1]));
    return Snapshot(connection, words.size() > 1 ? std::string(words[1]) : std::string());
  }
  return Fail(
      Errc::kUsage,
      "no such request; at a port hello VERSION ROLE NAME ID comes first; the requests are "
      "status, list, get DIGEST, read DIGEST OFFSET BYTES, "
      "catalogue DIGEST, push NAME BYTES BYTES RECOVERY [BYTES], flush, snapshot [TAG], "
      "offer TAG, experts, roots LAST, gradients WRITER BYTES, marks RANK, sends, plan and stop");
}

/// Answers as soon as training may resume.
Status AgentServer::Snapshot(os::Connection& connection, const std::string& tag) {
  std::optional<Status> sent;
  const auto answer = [&](std::uint64_t iteration) {
    sent = SendAnswer(connection, {}, std::to_string(iteration));
  };
  const Result<std::uint64_t> iteration = commands_.snapshot(tag, answer, {});
  if (iteration && !sent) answer(*iteration);
  if (sent) {
    if (!iteration) sink_.Warn(StrCat("snapshot: ", iteration.error().message));
    return *std::move(sent);
  }
  return tl::unexpected<Error>(iteration.error());
}

Status AgentServer::List(os::Connection& connection) const {
  SW_TRY(agent_.CatchUp());
  // The client may resume from a state that is only in memory.
  if (const Status appended = agent_.logs().AppendBuffered(); !appended) {
    sink_.Warn(StrCat("gradient log: ", appended.error().message));
  }
  OrderedJson list = OrderedJson::array();
  for (const AgentEntry& entry : agent_.Entries()) {
    const Manifest& manifest = entry.checkpoint->manifest;
    std::string text;
    if (entry.origin.empty() && manifest.store.empty()) {
      // The first snapshot may be older than the store.
      Manifest named = manifest;
      named.store = agent_.store_id();
      text = ToText(named);
    } else {
      text = ToText(manifest);
    }
    list.push_back({{"state", entry.state},
                    {"origin", entry.origin},
                    {"recovery", entry.checkpoint->recovery},
                    {"replayed", entry.checkpoint->replayed},
                    {"manifest", std::move(text)}});
  }
  return SendText(connection, list.dump(-1, ' ', false, OrderedJson::error_handler_t::replace));
}

Status AgentServer::Read(os::Connection& connection, const exec::Digest& digest,
                         std::uint64_t offset, std::uint64_t bytes) {
  const BlobPtr blob = agent_.Find(digest);
  if (!blob) return Fail(Errc::kNotFound, "blob ", exec::Hex(digest), " is not in memory");
  const std::uint64_t size = blob->ref().bytes;
  if (offset > size || bytes > size - offset) {
    return Fail(Errc::kUsage, "read: ", bytes, " bytes at offset ", offset, " exceed the blob of ",
                size, " bytes");
  }
  const std::span<const std::byte> part = blob->bytes().subspan(offset, bytes);
  Limiter::Job(agent_.limiter()).Spend(bytes);
  SW_TRY(SendAnswer(connection, {}, std::to_string(bytes) + " " + std::to_string(Crc32(part))));
  return connection.Send(part);
}

}  // namespace shardwright::partial
