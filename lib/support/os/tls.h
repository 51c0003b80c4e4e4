// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <string>

#include "support/base/result.h"
#include "support/os/socket.h"

namespace shardwright::os {

/// A secret that two processes share, and what they make of a connection with it: TLS 1.3 with the
/// secret as its pre-shared key and a fresh Diffie-Hellman exchange each time. Each side proves to
/// the other that it has the key, and nobody between them reads or changes anything. There are no
/// certificates, no resumed sessions and no early data. Thread-safe.
/// Source: RFC 8446, sections 2.2 and 4.2.11; docs/formats/agent.md.
class TlsKey : public std::enable_shared_from_this<TlsKey> {
 public:
  static constexpr std::size_t kBytes = 32;

  /// Writes a new key into a new file that only its owner can read, as hexadecimal digits.
  /// \error kBusy  the file is there; kIo
  static Status Make(const std::string& path);

  /// Reads a key.
  /// \error kNotFound  no such file; kBadInput  not a regular file of this process's user, or one
  ///        that others can read or write, or one that holds anything else: names both sides
  static Result<std::shared_ptr<const TlsKey>> Read(const std::string& path);

  TlsKey(const TlsKey&) = delete;
  TlsKey& operator=(const TlsKey&) = delete;
  virtual ~TlsKey() = default;

  /// What Connection::Secure does the handshake with: of who has accepted a connection, or of who
  /// has opened it. Its handshake ends with kMismatch where the other side has another key, or
  /// something in between changes what is sent.
  /// \error kInternal  the library cannot be used
  virtual Result<std::unique_ptr<Channel>> MakeChannel(bool accepted) const = 0;

 protected:
  TlsKey() = default;
};

}  // namespace shardwright::os
