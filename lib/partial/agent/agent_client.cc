// SPDX-License-Identifier: Apache-2.0
#include "partial/agent/agent_client.h"

#include <algorithm>
#include <cerrno>
#include <set>
#include <thread>
#include <utility>

#include <nlohmann/json.hpp>

#include "partial/agent/agent_protocol.h"
#include "support/base/crc32.h"
#include "support/base/text.h"
#include "support/json/json.h"
#include "support/os/file.h"

namespace shardwright::partial {
namespace {

using Json = nlohmann::json;

/// Timeout of a handshake, after which the agent counts as not answering.
constexpr std::chrono::milliseconds kHandshakeWait(30'000);
/// Number of attempts for a connection that the agent closes in the handshake, the
/// delay between attempts, and the interval at which a stop is checked meanwhile.
constexpr int kOpenTries = 5;
constexpr std::chrono::milliseconds kTriedAgain(1'200);
constexpr std::chrono::milliseconds kStopTick(100);

Result<std::string> TextBehind(os::Connection& connection, const std::string& rest) {
  SW_TRY_ASSIGN(const std::uint64_t bytes,
                ParseNumber(rest, kAgentTextBytes, connection.name() + ": length"));
  return ReceiveText(connection, bytes);
}

/// Bytes of gradients that are read and sent at once.
constexpr std::uint64_t kPieceOfGradients = 16 * kLogSumBytes;

/// The first word of a line that requests gradients.
constexpr std::string_view kGradients = "gradients ";

/// Returns the reason why a peer closed the connection: the error it has sent, or else `failed`.
Error RefusalOr(os::Connection& connection, const Error& failed) {
  if (failed.sys != EPIPE && failed.sys != ECONNRESET) return failed;
  const Result<std::string> answer = ReceiveAnswer(connection);
  return answer || answer.error().code == Errc::kIo ? failed : answer.error();
}

/// Sends the gradients of a record from its segment, as they were logged.
/// \error kBadInput  they have changed since; kNotFound, kIo
Status SendGradients(os::Connection& connection, const LoggedRecord& record, Limiter::Job& job) {
  const LogPayload& payload = record.payload;
  if (payload.bytes == 0) return {};
  SW_TRY_ASSIGN(const os::File file, os::File::OpenRead(record.path));
  std::vector<std::byte> room(std::min(kPieceOfGradients, payload.bytes));
  for (std::uint64_t at = 0; at < payload.bytes; at += room.size()) {
    room.resize(std::min<std::uint64_t>(room.size(), payload.bytes - at));
    SW_TRY(file.ReadAt(payload.offset + at, room));
    for (std::uint64_t begin = 0; begin < room.size(); begin += kLogSumBytes) {
      const auto part = std::span(room).subspan(begin).first(
          std::min<std::uint64_t>(kLogSumBytes, room.size() - begin));
      if (exec::DigestOf(part) == payload.sums[(at + begin) / kLogSumBytes]) continue;
      return BadInput(record.path, ": gradients of ", Quoted(record.record.module),
                      " have changed since they were logged");
    }
    job.Spend(room.size());
    SW_TRY(connection.Send(room));
  }
  return {};
}

/// Parts of a copy that an agent requests.
struct CopyRequest {
  std::vector<BlobPtr> blobs;
  std::vector<std::uint32_t> modules;  ///< their gradients
  std::uint64_t state_bytes = 0;
  std::uint64_t gradient_bytes = 0;
};

/// Receives the text that follows "ok BYTES", a line per blob or module.
/// \error kBadInput  a blob that is not part of the copy, or gradients that were not announced
Result<CopyRequest> ReceiveRequest(os::Connection& connection, const MemoryCheckpoint& checkpoint,
                                   const AnnouncedGradients& announced) {
  SW_TRY_ASSIGN(const std::string rest, ReceiveAnswer(connection));
  SW_TRY_ASSIGN(const std::string text, TextBehind(connection, rest));
  CopyRequest out;
  std::set<std::uint32_t> requested;
  std::string_view list = text;
  while (!list.empty()) {
    const std::string_view line = list.substr(0, list.find('\n'));
    list.remove_prefix(std::min(line.size() + 1, list.size()));
    if (line.starts_with(kGradients)) {
      SW_TRY_ASSIGN(const std::uint64_t module,
                    ParseNumber(line.substr(kGradients.size()), ~std::uint32_t{0},
                                connection.name() + ": module"));
      const auto found = announced.records.find(static_cast<std::uint32_t>(module));
      if (found == announced.records.end()) {
        return Fail(Errc::kBadInput, connection.name(), ": the agent requests gradients of module ",
                    module, ", which were not announced");
      }
      if (!requested.insert(found->first).second) {
        return Fail(Errc::kBadInput, connection.name(), ": the agent requests gradients of module ",
                    module, " twice");
      }
      out.modules.push_back(found->first);
      for (const auto& one : found->second) out.gradient_bytes += one->payload.bytes;
      continue;
    }
    SW_TRY_ASSIGN(const exec::Digest digest, ParseDigest(line));
    const auto found = checkpoint.blobs.find(digest);
    if (found == checkpoint.blobs.end()) {
      return Fail(Errc::kBadInput, connection.name(), ": the agent requests blob ",
                  exec::Hex(digest), ", which is not part of the copy");
    }
    out.blobs.push_back(found->second);
    out.state_bytes += found->second->ref().bytes;
  }
  return out;
}

/// Sends what an agent has requested: blobs, then gradients.
Status SendRequested(os::Connection& connection, const CopyRequest& request,
                     const AnnouncedGradients& announced, Limiter& limiter) {
  Limiter::Job job(limiter, request.state_bytes + request.gradient_bytes);
  for (const BlobPtr& blob : request.blobs) SW_TRY(SendBlob(connection, *blob, job));
  for (const std::uint32_t module : request.modules) {
    for (const auto& one : announced.records.at(module))
      SW_TRY(SendGradients(connection, *one, job));
  }
  return {};
}

}  // namespace

/// Returns an idle connection, or a new one.
Result<os::Connection> AgentClient::Borrow(bool* lay_idle) {
  {
    const std::lock_guard lock(mutex_);
    while (!idle_.empty()) {
      os::Connection connection = std::move(idle_.back());
      idle_.pop_back();
      // No request is pending, so readable data means that the peer closed it.
      *lay_idle = !connection.Readable();
      if (*lay_idle) return connection;
    }
  }
  *lay_idle = false;
  return OpenPatiently();
}

Result<os::Connection> AgentClient::Open() const {
  SW_TRY_ASSIGN(os::Connection connection, os::Connection::Open(address_, patience_, stop_));
  if (key_) {
    SW_TRY_ASSIGN(auto channel, key_->MakeChannel(false));
    SW_TRY(connection.Secure(std::move(channel), std::min(patience_, kHandshakeWait)));
  }
  if (address_.is_local()) return connection;
  const Result<Hello> agent = Greet(connection, self_);
  if (!agent) {
    // A crowded agent may close a connection before it sees the end of the handshake.
    const int error = agent.error().sys;
    const bool crowded = key_ && (error == ECONNRESET || error == EPIPE);
    return FailErrno(crowded ? Errc::kBusy : agent.error().code, error, agent.error().message);
  }
  if (accepts_) SW_TRY(accepts_(*agent));
  return connection;
}

/// Opens a connection with retries: a crowded agent closes those without a proven key.
Result<os::Connection> AgentClient::OpenPatiently() const {
  for (int i = 1;; ++i) {
    auto connection = Open();
    if (connection || connection.error().code != Errc::kBusy || i == kOpenTries) return connection;
    for (auto waited = kStopTick; waited <= kTriedAgain; waited += kStopTick) {
      if (stop_ && stop_()) return Fail(Errc::kStopped, "stopped on request");
      std::this_thread::sleep_for(kStopTick);
    }
  }
}

void AgentClient::Return(os::Connection connection) {
  const std::lock_guard lock(mutex_);
  idle_.push_back(std::move(connection));
}

/// Sends a request and receives the line that answers it. If the agent closes an idle
/// connection at the moment of the request, repeats the request on another connection.
Result<std::string> AgentClient::Exchange(const std::string& request, os::Connection* connection) {
  for (;;) {
    bool lay_idle = false;
    SW_TRY_ASSIGN(*connection, Borrow(&lay_idle));
    const Status sent = connection->Send(request + "\n");
    Result<std::string> answer =
        sent ? ReceiveAnswer(*connection) : tl::unexpected<Error>(sent.error());
    const int error = answer ? 0 : answer.error().sys;
    if (!lay_idle || (error != ECONNRESET && error != EPIPE)) return answer;
  }
}

Result<std::string> AgentClient::Ask(const std::string& request) {
  os::Connection connection;
  SW_TRY_ASSIGN(std::string rest, Exchange(request, &connection));
  Return(std::move(connection));
  return rest;
}

Result<std::string> AgentClient::AskText(const std::string& request) {
  os::Connection connection;
  SW_TRY_ASSIGN(const std::string rest, Exchange(request, &connection));
  SW_TRY_ASSIGN(std::string text, TextBehind(connection, rest));
  Return(std::move(connection));
  return text;
}

Result<std::vector<AgentClient::Listed>> ParseAgentList(std::string_view text,
                                                        const std::string& where) {
  SW_TRY_ASSIGN(const Json list, json::Parse(text, where));
  if (!list.is_array()) {
    return Fail(Errc::kBadInput, where, ": list of checkpoints expected, found ",
                json::KindOf(list));
  }
  std::vector<AgentClient::Listed> out;
  for (const Json& one : list) {
    const auto state = one.is_object() ? one.find("state") : one.end();
    const auto manifest = one.is_object() ? one.find("manifest") : one.end();
    if (!one.is_object() || state == one.end() || manifest == one.end() || !state->is_string() ||
        !manifest->is_string()) {
      return Fail(Errc::kBadInput, where,
                  ": each checkpoint requires the texts \"state\" and \"manifest\"");
    }
    AgentClient::Listed& listed = out.emplace_back();
    listed.state = state->get<std::string>();
    if (const auto recovery = one.find("recovery"); recovery != one.end()) {
      if (!recovery->is_number_unsigned()) {
        return Fail(Errc::kBadInput, where, ": \"recovery\": a whole number expected, found ",
                    recovery->is_number() ? recovery->dump() : json::KindOf(*recovery));
      }
      listed.recovery = recovery->get<std::uint64_t>();
    }
    if (const auto replayed = one.find("replayed"); replayed != one.end()) {
      for (const auto& [name, from] : replayed->items()) {
        if (!replayed->is_object() || !from.is_number_unsigned()) {
          return Fail(Errc::kBadInput, where,
                      ": \"replayed\" must map names of modules to iterations");
        }
        listed.replayed[name] = from.get<std::uint64_t>();
      }
    }
    SW_TRY_ASSIGN(listed.manifest, ParseManifest(manifest->get<std::string>(), where));
  }
  return out;
}

Result<std::vector<AgentClient::Listed>> AgentClient::List() {
  SW_TRY_ASSIGN(const std::string text, AskText("list"));
  return ParseAgentList(text, os::ToText(address_));
}

Status AgentClient::Read(const exec::Digest& digest, std::uint64_t offset,
                         std::span<std::byte> out) {
  while (!out.empty()) {
    const std::span<std::byte> part = out.first(std::min<std::size_t>(out.size(), kAgentReadBytes));
    os::Connection connection;
    SW_TRY_ASSIGN(const std::string rest,
                  Exchange("read " + exec::Hex(digest) + " " + std::to_string(offset) + " " +
                               std::to_string(part.size()),
                           &connection));
    const std::vector<std::string_view> words = WordsOf(rest);
    const std::string where = connection.name() + ": blob " + exec::Hex(digest);
    if (words.size() != 2 || words[0] != std::to_string(part.size())) {
      return Fail(Errc::kBadInput, where, ": answer with ", part.size(),
                  " bytes and their CRC-32 expected, found \"", rest, '"');
    }
    SW_TRY_ASSIGN(const std::uint64_t crc, ParseNumber(words[1], 0xffffffff, where));
    SW_TRY(connection.Receive(part));
    if (const std::uint32_t found = Crc32(part); found != crc) {
      return Fail(Errc::kBadInput, where, ": CRC-32 ", crc, " expected, found ", found);
    }
    Return(std::move(connection));
    offset += part.size();
    out = out.subspan(part.size());
  }
  return {};
}

Result<PushedBytes> AgentClient::Push(const MemoryCheckpoint& checkpoint, Limiter& limiter,
                                      const AnnouncedGradients& announced) {
  bool lay_idle = false;
  SW_TRY_ASSIGN(os::Connection connection, Borrow(&lay_idle));
  const std::string manifest = ToText(checkpoint.manifest);
  const bool announces = !announced.records.empty();
  const auto send = [&]() -> Status {
    SW_TRY(connection.Send("push " + self_.name + " " + std::to_string(manifest.size()) + " " +
                           std::to_string(checkpoint.catalogue.size()) + " " +
                           std::to_string(checkpoint.recovery) +
                           (announces ? " " + std::to_string(announced.text.size()) : "") + "\n"));
    SW_TRY(connection.Send(manifest));
    SW_TRY(connection.Send(checkpoint.catalogue));
    return connection.Send(announced.text);
  };
  if (const Status sent = send(); !sent) {
    return tl::unexpected<Error>(RefusalOr(connection, sent.error()));
  }
  PushedBytes out;
  out.gradients = announced.text.size();
  std::map<exec::Digest, std::uint64_t> replaced;
  // With announced gradients, a second request has the states of modules with a failed replay.
  for (int i = 0; i < (announces ? 2 : 1); ++i) {
    SW_TRY_ASSIGN(const CopyRequest request, ReceiveRequest(connection, checkpoint, announced));
    const Status sent = SendRequested(connection, request, announced, limiter);
    if (!sent) return tl::unexpected<Error>(RefusalOr(connection, sent.error()));
    out.states += request.state_bytes;
    out.gradients += request.gradient_bytes;
    if (i == 1) out.repeated = request.state_bytes;
    for (const std::uint32_t module : request.modules) {
      for (const auto& part : checkpoint.manifest.modules[module]) {
        if (part) replaced.emplace(part->blob.digest, part->blob.bytes);
      }
    }
    for (const BlobPtr& blob : request.blobs) replaced.erase(blob->ref().digest);
  }
  for (const auto& [digest, bytes] : replaced) out.replaced += bytes;
  SW_TRY_ASSIGN(const std::string rest, ReceiveAnswer(connection));
  out.replays = rest == kReplaysGradients;
  Return(std::move(connection));
  return out;
}

}  // namespace shardwright::partial
