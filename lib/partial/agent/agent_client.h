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

#include "partial/agent/memory/memory.h"
#include "partial/agent/peers/agent_hello.h"
#include "partial/agent/throttle/limiter.h"
#include "partial/gradient_log/log_reader.h"
#include "partial/store/manifest.h"
#include "support/base/result.h"
#include "support/os/socket.h"
#include "support/os/tls.h"

namespace shardwright::partial {

/// Default time limit for an answer. A flush may write for minutes before it answers.
inline constexpr std::chrono::milliseconds kAgentPatience(600'000);

/// Checks that the agent at the other end of a connection to a port is an expected one.
using AcceptsAgent = std::function<Status(const Hello& agent)>;

/// Logged gradients that may replace the states of modules in a copy.
struct AnnouncedGradients {
  /// Records by the index of their module in the manifest, each list in the order of `text`.
  std::map<std::uint32_t, std::vector<std::shared_ptr<const LoggedRecord>>> records;
  std::string text;  ///< a line per record (ToText), module by module
};

/// Bytes that a copy has sent.
struct PushedBytes {
  std::uint64_t states = 0;     ///< blobs
  std::uint64_t gradients = 0;  ///< gradients and their descriptions
  std::uint64_t replaced = 0;   ///< size of the blobs that the agent has computed from gradients
  std::uint64_t repeated = 0;   ///< blobs sent because the replay of their gradients failed
  bool replays = false;         ///< the agent can replay gradients onto this copy
};

/// Client of an agent. Thread-safe: concurrent requests use separate connections.
class AgentClient {
 public:
  /// \param key  key that client and agent share, for ports; null: connect without TLS
  /// \param stop  if it returns true, every call ends with kStopped, also a waiting one
  /// \param self  hello that this process sends when it connects to a port
  /// \param accepts  called once per connection to a port; the call fails with its error
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
  /// \returns the text after "ok"; if that is a length, AskText returns the text that follows it
  /// \error as the agent answers; kNotFound  no agent is listening; kMismatch  the
  ///        peer lacks the key, or is not the expected agent; kBusy  the agent
  ///        closes connections before it serves them; kIo; kStopped; as Greet
  Result<std::string> Ask(const std::string& request);
  Result<std::string> AskText(const std::string& request);

  /// A checkpoint in the agent's memory.
  struct Listed {
    std::string state;
    std::uint64_t recovery = 0;  ///< as MemoryCheckpoint; 0 if the agent does not report it
    /// As MemoryCheckpoint; empty if the agent does not report it.
    std::map<std::string, std::uint64_t> replayed;
    Manifest manifest;
  };
  /// \error kBadInput  malformed list; as Ask
  Result<std::vector<Listed>> List();

  /// Reads a byte range of a blob and verifies the checksum of the transfer.
  /// \error kBadInput  wrong length or checksum; as Ask
  Status Read(const exec::Digest& digest, std::uint64_t offset, std::span<std::byte> out);

  /// Sends the agent a copy of a checkpoint of `self`. Skips blobs that the agent already has.
  /// \param announced  gradients that the agent may replay onto its previous copy
  /// \pre self is an agent
  /// \error kBadInput, kNotFound  logged gradients have changed or are gone; as Ask
  Result<PushedBytes> Push(const MemoryCheckpoint& checkpoint, Limiter& limiter,
                           const AnnouncedGradients& announced = {});

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
