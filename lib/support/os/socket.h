// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "support/base/result.h"
#include "support/os/lock.h"

namespace shardwright::os {

/// Address of a server: a socket file, or a TCP host and port.
struct Address {
  std::string path;  ///< path of a socket file; empty for TCP
  std::string host;  ///< name or number; IPv6 without brackets
  std::uint16_t port = 0;
  /// For socket files: a user who may run the server, in addition to this process's user and root.
  std::optional<std::uint32_t> trusted_user = {};

  bool is_local() const { return !path.empty(); }
  friend bool operator==(const Address&, const Address&) = default;
};

/// Reads "unix:PATH", "HOST:PORT" or "[HOST]:PORT".
/// \error kUsage  wrong syntax, a port above 65535, or a path that is too long for a socket
/// Pure.
Result<Address> ParseAddress(std::string_view text);

/// Inverse of ParseAddress.
std::string ToText(const Address& address);

/// Called several times a second by waiting calls. If it returns true, they end with kStopped.
using Stop = std::function<bool()>;

/// A layer between a connection and its socket that encodes the data it sends, such as TLS
/// (support/os/tls.h). Its calls never block. Use it from one thread at a time.
class Channel {
 public:
  /// Result of a call.
  struct Step {
    std::size_t bytes = 0;  ///< bytes of the caller's that were moved
    short wait = 0;         ///< poll event to wait for if none moved; 0: the peer has closed
  };
  virtual ~Channel() = default;

  /// Continues the handshake over the same socket.
  /// \returns a poll event to wait for, or 0 when the handshake is complete
  /// \error kUsage  the peer uses another protocol; kMismatch  it failed to authenticate;
  ///        kBusy it has closed the connection; kIo
  virtual Result<short> Begin(int fd) = 0;

  /// Sends data. If a call moves nothing, call it again with the same data.
  /// \error kIo
  virtual Result<Step> Send(std::span<const std::byte> data) = 0;

  /// Receives data. \error kIo; kBadInput the data was modified on its way
  virtual Result<Step> Receive(std::span<std::byte> out) = 0;

  /// Returns whether the channel has read data from the socket that Receive has not returned yet.
  virtual bool Holds() const = 0;
};

/// A stream to another process. A call fails if less than 64 KiB, or less than the remaining
/// data, moves within the timeout. A peer that sends too slowly is treated as idle. At a port
/// every waiting call also fails 20 to 25 s after the peer's host was lost.
/// Local; one thread at a time.
class Connection {
 public:
  Connection() = default;
  Connection(Connection&& other) noexcept;
  Connection& operator=(Connection&& other) noexcept;
  ~Connection();

  /// \error kNotFound  no process listens there, or the host is unknown; kMismatch  another user's
  ///        process listens at the socket file (CheckPeer, Address::trusted_user); kStopped
  static Result<Connection> Open(const Address& address, std::chrono::milliseconds timeout,
                                 Stop stop = {});

  /// Performs the handshake of a channel, which then encodes all data of the connection.
  /// \pre nothing was sent or received before
  /// \param within  time limit for the whole handshake
  /// \param stop  checked in addition to the connection's own
  /// \error as Channel::Begin; kIo  the handshake took too long; kStopped
  Status Secure(std::unique_ptr<Channel> channel, std::chrono::milliseconds within,
                const Stop& stop = {});

  /// \error kIo  the peer has closed or does not read; kStopped
  Status Send(std::span<const std::byte> data);
  Status Send(std::string_view text);

  /// Fills `out`. \error kIo the peer closed or was silent before it was full; kStopped
  Status Receive(std::span<std::byte> out);

  /// Receives a line and returns it without its line feed.
  /// \returns nullopt if the peer has closed before the first byte of a line
  /// \error kLimit  longer than `cap` bytes; kIo  the peer closed or was silent within the line;
  ///        kUsage the peer starts a TLS handshake, but this connection has no channel; kStopped
  Result<std::optional<std::string>> ReceiveLine(std::size_t cap);

  /// Sends a copy of a descriptor to the peer, together with one byte.
  /// \pre is_local()
  /// \error as Send
  Status SendDescriptor(int fd);

  /// Receives a descriptor.
  /// \returns a descriptor, which the caller closes
  /// \pre is_local(), and the peer has sent nothing else since the last line
  /// \error kBadInput  the peer sent no descriptor; as Receive
  Result<int> ReceiveDescriptor();

  /// Waits until ReceiveLine would return immediately, and keeps a partial line.
  /// \returns false if that takes longer than `wait`
  /// \error kIo
  Result<bool> HasLine(std::size_t cap, std::chrono::milliseconds wait);

  /// Returns without waiting if there is data to receive or the peer has closed.
  bool Readable() const;

  const std::string& name() const { return name_; }
  /// Returns whether the connection uses a socket file.
  bool is_local() const { return local_; }
  /// Returns the peer's host for connections accepted at a port: the number of an IPv4 host,
  /// or the /64 network of an IPv6 host. Otherwise empty.
  const std::string& peer() const { return peer_; }

 private:
  friend class Listener;
  class Pace;
  Connection(int fd, std::string name, bool local, std::chrono::milliseconds timeout, Stop stop)
      : fd_(fd), name_(std::move(name)), local_(local), timeout_(timeout), stop_(std::move(stop)) {}
  Result<Channel::Step> TrySend(std::span<const std::byte> data);
  Result<Channel::Step> TryReceive(std::span<std::byte> out);
  Result<std::size_t> Some(std::span<std::byte> out, Pace* pace);
  bool MeetsTls() const;

  int fd_ = -1;
  std::unique_ptr<Channel> channel_;  // null: plain socket
  std::string name_;
  std::string peer_;
  bool local_ = false;
  std::chrono::milliseconds timeout_{0};
  Stop stop_;
  std::string ahead_;  // received after a line
};

/// Accepts connections at an address. Local.
class Listener {
 public:
  Listener() = default;
  Listener(Listener&& other) noexcept;
  Listener& operator=(Listener&& other) noexcept;
  /// Closes the listener and removes its socket file.
  ~Listener();

  /// Listens at an address. Port 0 selects any free port. Replaces a socket file without a
  /// listening process, but not another user's. Only the owner may connect to a new socket
  /// file. The listener has the lock `<path>.lock` for its lifetime. If several start at
  /// once, one gets the socket file and the others fail with kBusy.
  /// \error kBusy  a process listens there, or the file is another user's (names the user); kIo
  static Result<Listener> Open(const Address& address);

  /// Waits for a connection.
  /// \returns nullopt if none arrives within `wait`
  /// \error kIo; kMismatch  a process of a user other than this one and root connected to
  ///        the socket file, and was disconnected
  Result<std::optional<Connection>> Accept(std::chrono::milliseconds wait,
                                           std::chrono::milliseconds timeout, Stop stop = {}) const;

  /// Waits at most `wait` and returns whether a connection is ready to be accepted.
  bool Pending(std::chrono::milliseconds wait) const;

  /// Returns the address, with the port that was chosen.
  const Address& address() const { return address_; }

 private:
  int fd_ = -1;
  Address address_;
  Lock lock_;  // for a socket file
};

}  // namespace shardwright::os
