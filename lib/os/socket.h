#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/result.h"

namespace shardwright::os {

/// Where a process listens: a socket file, or a TCP port.
struct Address {
  std::string path;  ///< of a socket file; empty for TCP
  std::string host;  ///< name or number; of IPv6 without brackets
  std::uint16_t port = 0;

  bool is_local() const { return !path.empty(); }
  friend bool operator==(const Address&, const Address&) = default;
};

/// Reads "unix:PATH", "HOST:PORT" or "[HOST]:PORT".
/// \error kUsage  another form, a port above 65535, a path longer than a socket's name may be
/// Pure.
Result<Address> ParseAddress(std::string_view text);

/// The inverse.
std::string ToText(const Address& address);

/// A stream to another process. A call fails when nothing moves for the connection's timeout.
/// One thread at a time. Local.
class Connection {
 public:
  Connection() = default;
  Connection(Connection&& other) noexcept;
  Connection& operator=(Connection&& other) noexcept;
  ~Connection();

  /// \error kNotFound  nobody listens there, or the host is unknown
  static Result<Connection> Open(const Address& address, std::chrono::milliseconds timeout);

  /// \error kIo  the other side is gone or does not read
  Status Send(std::span<const std::byte> data);
  Status Send(std::string_view text);

  /// Fills `out`. \error kIo  the other side is gone or silent before
  Status Receive(std::span<std::byte> out);

  /// A line without its line feed.
  /// \returns nothing if the other side has closed and no byte of a line has come
  /// \error kLimit  longer than `cap`; kIo  gone or silent before the line's end
  Result<std::optional<std::string>> ReceiveLine(std::size_t cap);

  /// Waits until there is something to receive, or the other side has closed.
  /// \returns false after `wait`
  bool Readable(std::chrono::milliseconds wait) const;

  const std::string& name() const { return name_; }
  /// Whether it came through a socket file.
  bool is_local() const { return local_; }

 private:
  friend class Listener;
  Connection(int fd, std::string name, bool local, std::chrono::milliseconds timeout)
      : fd_(fd), name_(std::move(name)), local_(local), timeout_(timeout) {}
  Result<std::size_t> Some(std::span<std::byte> out);

  int fd_ = -1;
  std::string name_;
  bool local_ = false;
  std::chrono::milliseconds timeout_{0};
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
  /// its owner may connect to a new one.
  /// \error kBusy  somebody listens there; kIo
  static Result<Listener> Open(const Address& address);

  /// Waits for a connection.
  /// \returns nothing after `wait`
  /// \error kIo
  Result<std::optional<Connection>> Accept(std::chrono::milliseconds wait,
                                           std::chrono::milliseconds timeout) const;

  /// With the port that was taken.
  const Address& address() const { return address_; }

 private:
  int fd_ = -1;
  Address address_;
};

}  // namespace shardwright::os
