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

/// Where a process listens: a socket file, or a TCP port.
struct Address {
  std::string path;  ///< of a socket file; empty for TCP
  std::string host;  ///< name or number; of IPv6 without brackets
  std::uint16_t port = 0;
  /// Of a socket file: a user whose process may listen there, besides this process's user and root.
  std::optional<std::uint32_t> trusted_user = {};

  bool is_local() const { return !path.empty(); }
  friend bool operator==(const Address&, const Address&) = default;
};

/// Reads "unix:PATH", "HOST:PORT" or "[HOST]:PORT".
/// \error kUsage  another form, a port above 65535, a path longer than a socket's name may be
/// Pure.
Result<Address> ParseAddress(std::string_view text);

/// The inverse.
std::string ToText(const Address& address);

/// Asked several times a second while a call waits: true ends it with kStopped. Empty: never.
using Stop = std::function<bool()>;

/// What stands between a connection and its socket and turns what is sent into other bytes
/// (support/os/tls.h). No call waits. One thread at a time.
class Channel {
 public:
  /// What a call has done.
  struct Step {
    std::size_t bytes = 0;  ///< of the caller's that have moved
    short wait = 0;         ///< where none has: an event of poll; 0: the other side has closed
  };
  virtual ~Channel() = default;

  /// A step of the handshake over a socket, which stays the same.
  /// \returns an event of poll to wait for; 0: it is done
  /// \error kUsage  the other side speaks something else; kMismatch  it has not proved what it is
  ///        asked to; kBusy  it has closed; kIo
  virtual Result<short> Begin(int fd) = 0;

  /// A call that has moved nothing is made again with the same data.
  /// \error kIo
  virtual Result<Step> Send(std::span<const std::byte> data) = 0;

  /// \error kIo; kBadInput  what comes is not what was sent
  virtual Result<Step> Receive(std::span<std::byte> out) = 0;

  /// Whether something was taken from the socket that Receive has not given yet.
  virtual bool Holds() const = 0;
};

/// A stream to another process. A call fails when less than 64 KiB, or what is left to move, moves
/// within the connection's timeout: whoever trickles is as good as silent.
/// Local; one thread at a time.
class Connection {
 public:
  Connection() = default;
  Connection(Connection&& other) noexcept;
  Connection& operator=(Connection&& other) noexcept;
  ~Connection();

  /// \error kNotFound  nobody listens there, or the host is unknown; kMismatch  a process of
  ///        another user listens at the socket file (CheckPeer, Address::trusted_user); kStopped
  static Result<Connection> Open(const Address& address, std::chrono::milliseconds timeout,
                                 Stop stop = {});

  /// Does the handshake of a channel; all that is sent and received afterwards passes it.
  /// \pre nothing was sent or received
  /// \param within  for the whole handshake
  /// \param stop  asked besides the connection's own
  /// \error as Channel::Begin; kIo  not done in time; kStopped
  Status Secure(std::unique_ptr<Channel> channel, std::chrono::milliseconds within,
                const Stop& stop = {});

  /// \error kIo  the other side is gone or does not read; kStopped
  Status Send(std::span<const std::byte> data);
  Status Send(std::string_view text);

  /// Fills `out`. \error kIo  the other side is gone or silent before; kStopped
  Status Receive(std::span<std::byte> out);

  /// A line without its line feed.
  /// \returns nothing if the other side has closed and no byte of a line has come
  /// \error kLimit  longer than `cap`; kIo  gone or silent before the line's end; kUsage  the other
  ///        side begins with TLS, and this one has no channel; kStopped
  Result<std::optional<std::string>> ReceiveLine(std::size_t cap);

  /// Sends a descriptor, which the other side gets as one of its own: one byte on the way.
  /// \pre is_local()
  /// \error as Send
  Status SendDescriptor(int fd);

  /// Receives one.
  /// \returns a descriptor that the caller closes
  /// \pre is_local(), and the other side has sent nothing else since the last line
  /// \error kBadInput  none has come; as Receive
  Result<int> ReceiveDescriptor();

  /// Waits until ReceiveLine would return at once; what has come of a line is kept.
  /// \returns false after `wait`
  /// \error kIo
  Result<bool> HasLine(std::size_t cap, std::chrono::milliseconds wait);

  /// Whether there is something to receive, or the other side has closed. Does not wait.
  bool Readable() const;

  const std::string& name() const { return name_; }
  /// Whether it came through a socket file.
  bool is_local() const { return local_; }
  /// Of one that was accepted at a port, the other side's host as a number, of IPv6 its /64
  /// network; else empty.
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
  std::unique_ptr<Channel> channel_;  // null: the socket itself
  std::string name_;
  std::string peer_;
  bool local_ = false;
  std::chrono::milliseconds timeout_{0};
  Stop stop_;
  std::string ahead_;  // received after a line
};

/// Where connections come in. Local.
class Listener {
 public:
  Listener() = default;
  Listener(Listener&& other) noexcept;
  Listener& operator=(Listener&& other) noexcept;
  /// A socket file is removed.
  ~Listener();

  /// Port 0 takes any free port. A socket file that nobody listens on any more is replaced; only
  /// its owner may connect to a new one. Another user's socket file is left alone. The lock
  /// `<path>.lock` is held as long as the listener lives, so that of several that start at once one
  /// gets the file, and the others kBusy.
  /// \error kBusy  a process listens there, or the file is another user's: names the user; kIo
  static Result<Listener> Open(const Address& address);

  /// Waits for a connection.
  /// \returns nothing after `wait`
  /// \error kIo; kMismatch  a process that is neither this one's user nor root has connected to the
  ///        socket file, and was cut
  Result<std::optional<Connection>> Accept(std::chrono::milliseconds wait,
                                           std::chrono::milliseconds timeout, Stop stop = {}) const;

  /// Whether somebody has connected and waits to be accepted, after at most `wait`.
  bool Pending(std::chrono::milliseconds wait) const;

  /// With the port that was taken.
  const Address& address() const { return address_; }

 private:
  int fd_ = -1;
  Address address_;
  Lock lock_;  // of a socket file
};

}  // namespace shardwright::os
