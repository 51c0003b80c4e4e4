// SPDX-License-Identifier: Apache-2.0
#include "partial/agent/agent_client.h"

#include <algorithm>
#include <cerrno>
#include <thread>
#include <utility>

#include <nlohmann/json.hpp>

#include "partial/agent/agent_protocol.h"
#include "support/base/crc32.h"
#include "support/json/json.h"

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

/// Returns the reason why a peer closed the connection: the error it has sent, or else `sent`.
tl::unexpected<Error> Refusal(os::Connection& connection, const Error& sent) {
  if (sent.sys == EPIPE || sent.sys == ECONNRESET) {
    const Result<std::string> answer = ReceiveAnswer(connection);
    if (!answer && answer.error().code != Errc::kIo) {
      return tl::unexpected<Error>(answer.error());
    }
  }
  return tl::unexpected<Error>(sent);
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

Result<std::uint64_t> AgentClient::Push(const MemoryCheckpoint& checkpoint, Limiter& limiter) {
  bool lay_idle = false;
  SW_TRY_ASSIGN(os::Connection connection, Borrow(&lay_idle));
  const std::string manifest = ToText(checkpoint.manifest);
  const auto send = [&]() -> Status {
    SW_TRY(connection.Send("push " + self_.name + " " + std::to_string(manifest.size()) + " " +
                           std::to_string(checkpoint.catalogue.size()) + " " +
                           std::to_string(checkpoint.recovery) + "\n"));
    SW_TRY(connection.Send(manifest));
    return connection.Send(checkpoint.catalogue);
  };
  if (const Status sent = send(); !sent) return Refusal(connection, sent.error());
  SW_TRY_ASSIGN(const std::string rest, ReceiveAnswer(connection));
  SW_TRY_ASSIGN(const std::string need, TextBehind(connection, rest));
  std::vector<BlobPtr> blobs;
  std::uint64_t bytes = 0;
  for (std::size_t at = 0; at < need.size();) {
    const std::size_t end = std::min(need.find('\n', at), need.size());
    SW_TRY_ASSIGN(const exec::Digest digest, ParseDigest(need.substr(at, end - at)));
    const auto found = checkpoint.blobs.find(digest);
    if (found == checkpoint.blobs.end()) {
      return Fail(Errc::kBadInput, connection.name(), ": the agent requests blob ",
                  exec::Hex(digest), ", which is not part of the copy");
    }
    blobs.push_back(found->second);
    bytes += found->second->ref().bytes;
    at = end + 1;
  }
  Limiter::Job job(limiter, bytes);
  for (const BlobPtr& blob : blobs) {
    const Status put = SendBlob(connection, *blob, job);
    if (!put) return Refusal(connection, put.error());
  }
  SW_TRY(ReceiveAnswer(connection));
  Return(std::move(connection));
  return bytes;
}

}  // namespace shardwright::partial
