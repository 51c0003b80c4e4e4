// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "partial/agent/agent_hello.h"
#include "partial/agent/memory.h"
#include "partial/agent/throttle/limiter.h"
#include "partial/store/manifest.h"
#include "support/base/result.h"
#include "support/os/socket.h"
#include "support/os/tls.h"

namespace shardwright::partial {

/// How long a client waits for an answer: a flush may write for long before it answers.
inline constexpr std::chrono::milliseconds kAgentPatience(600'000);

/// Decides whether the agent at the other end of a port is one that is expected there.
using AcceptsAgent = std::function<Status(const Hello& agent)>;

/// Speaks to an agent. Thread-safe: threads that ask at once have connections of their own.
class AgentClient {
 public:
  /// \param key  that both sides have, at a port; null: it is spoken to without TLS
  /// \param stop  true ends every call with kStopped, also one that waits
  /// \param self  what this process states of itself at a port
  /// \param accepts  asked once for each connection to a port; an error of it is that of the call
  explicit AgentClient(os::Address address, std::shared_ptr<const os::TlsKey> key = {},
                       os::Stop stop = {}, std::chrono::milliseconds patience = kAgentPatience,
                       Hello self = Hello::OfClient(), AcceptsAgent accepts = {})
      : address_(std::move(address)),
        key_(address_.is_local() ? nullptr : std::move(key)),
        stop_(std::move(stop)),
        patience_(patience),
        self_(std::move(self)),
        accepts_(std::move(accepts)) {}

  const os::Address& address() const { return address_; }

  /// Sends a request.
  /// \returns what follows "ok", and where that is a length, the text behind it
  /// \error what the agent answers; kNotFound  nobody listens; kMismatch  who listens has not the
  ///        key, or is another agent than expected; kBusy  it closes connections before they are
  ///        of use; kIo; kStopped; as Greet
  Result<std::string> Ask(const std::string& request);
  Result<std::string> AskText(const std::string& request);

  /// Checkpoints in its memory.
  struct Listed {
    std::string state;
    std::uint64_t recovery = 0;  ///< as MemoryCheckpoint; 0 too where the agent does not say
    /// As MemoryCheckpoint; empty where the agent does not say.
    std::map<std::string, std::uint64_t> replayed;
    Manifest manifest;
  };
  /// \error kBadInput  no such list; as Ask
  Result<std::vector<Listed>> List();

  /// A part of a blob, its checksum compared.
  /// \error kBadInput  another length or checksum; as Ask
  Status Read(const exec::Digest& digest, std::uint64_t offset, std::span<std::byte> out);

  /// Brings the agent a copy of a checkpoint of `self`: only what it has not yet.
  /// \pre self is an agent
  /// \returns bytes of blobs sent
  /// \error as Ask
  Result<std::uint64_t> Push(const MemoryCheckpoint& checkpoint, Limiter& limiter);

 private:
  Result<os::Connection> Borrow(bool* lay_idle);
  Result<os::Connection> Open() const;
  Result<os::Connection> OpenPatiently() const;
  void Return(os::Connection connection);
  Result<std::string> Exchange(const std::string& request, os::Connection* connection);

  const os::Address address_;
  const std::shared_ptr<const os::TlsKey> key_;
  const os::Stop stop_;
  const std::chrono::milliseconds patience_;
  const Hello self_;
  const AcceptsAgent accepts_;
  std::mutex mutex_;
  std::vector<os::Connection> idle_;
};

/// Parses the answer to "list".
/// \error kBadInput
/// Pure.
Result<std::vector<AgentClient::Listed>> ParseAgentList(std::string_view text,
                                                        const std::string& where);

}  // namespace shardwright::partial
