// SPDX-License-Identifier: Apache-2.0
// lib/support/os/sockets: calls on sockets. They do not pass the fault hook: it counts file
// operations only, and the tests of socket.h and of its users cut real connections.
#pragma once

#include <sys/socket.h>
#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "support/base/result.h"
#include "support/base/stop.h"

namespace shardwright::os::sys {

/// Waits for a poll event, at most until `end`. A signal does not shorten the wait.
/// \returns true if the event has occurred
/// \error kStopped
Result<bool> WaitFor(int fd, short events, std::chrono::steady_clock::time_point end,
                     const StopCheck& stop);
/// Like WaitFor, for data of a connection. Over TCP it also ends after 20 to 25 s in which the
/// peer's host has acknowledged neither data nor probes. A process that does not read does not
/// count.
/// \param name  address of the peer, for the message
/// \error kIo  the host is lost; kStopped
Result<bool> WaitForPeer(int fd, short events, std::chrono::steady_clock::time_point end,
                         const StopCheck& stop, std::string_view name);
/// Checks before a call that sends, which may not wait, whether the peer's host is lost.
/// \error kIo
Status CheckPeerHost(int fd, std::string_view name);
/// \returns true if connected within `timeout`, false with errno otherwise
/// \error kStopped
Result<bool> Connect(int fd, const sockaddr* name, socklen_t bytes,
                     std::chrono::milliseconds timeout, const StopCheck& stop);
/// Makes the kernel probe the peer's host while a TCP connection is idle. If the host is lost,
/// receiving fails with ETIMEDOUT 25 s later. Best effort.
void ProbeHost(int fd);
/// Gets the port that a socket is bound to. \returns false with errno on failure
bool PortOf(int fd, std::uint16_t* port);
/// Returns the numeric addresses of the network interfaces of this machine, without loopback and
/// link-local ones.
std::vector<std::string> OwnAddresses();
/// Sends one byte and a descriptor. \returns 1, or -1 with errno
ssize_t SendDescriptor(int socket, int fd);
/// Receives one byte and possibly a descriptor, which the caller closes.
/// \param fd  receives the descriptor; unchanged if none comes
/// \returns 1, 0 after the end, or -1 with errno
ssize_t ReceiveDescriptor(int socket, int* fd);

}  // namespace shardwright::os::sys
