// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <string>

#include "support/base/result.h"
#include "support/os/socket.h"

namespace shardwright::os {

/// A secret key that two processes share, and the TLS 1.3 connections they authenticate with it.
/// The secret is the pre-shared key, with a new Diffie-Hellman exchange for each connection.
/// Each process proves that it has the key, and no process between them can read or change data.
/// Does not use certificates, resumed sessions or early data. Thread-safe.
/// Source: RFC 8446, sections 2.2 and 4.2.11; docs/formats/agent.md.
class TlsKey : public std::enable_shared_from_this<TlsKey> {
 public:
  static constexpr std::size_t kBytes = 32;

  /// Writes a new key as hexadecimal digits to a new file that only its owner can read.
  /// \error kBusy  the file exists; kIo
  static Status Make(const std::string& path);

  /// Reads a key from a file.
  /// \error kNotFound  no such file; kBadInput  not a regular file of this process's user, readable
  ///        or writable by others, or with other contents (names the expected and the actual value)
  static Result<std::shared_ptr<const TlsKey>> Read(const std::string& path);

  TlsKey(const TlsKey&) = delete;
  TlsKey& operator=(const TlsKey&) = delete;
  virtual ~TlsKey() = default;

  /// Makes the channel for Connection::Secure. `accepted` is true for the process that accepted
  /// the connection, false for the process that opened it. The handshake fails with kMismatch
  /// if the peer has another key, or if the data is changed on its way.
  /// \error kInternal  OpenSSL failed
  virtual Result<std::unique_ptr<Channel>> MakeChannel(bool accepted) const = 0;

 protected:
  TlsKey() = default;
};

}  // namespace shardwright::os
