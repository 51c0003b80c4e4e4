// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <memory>

#include <nlohmann/json.hpp>

#include "convert/input.h"
#include "support/base/result.h"
#include "support/base/sink.h"
#include "support/comm/comm.h"
#include "support/os/socket.h"

namespace shardwright::cache {

/// Connects to a cache, which may still be starting.
/// \param end  deadline until which failed attempts are repeated
/// \error kNotFound  no cache listens by then; kMismatch  it belongs to another user; kStopped; kIo
/// Local.
Result<os::Connection> Reach(const os::Address& address, std::chrono::steady_clock::time_point end,
                             const os::Stop& stop);

/// A shared-memory cache, opened as a source. Its memory stays mapped until `input` is destroyed.
struct Attached {  // NOLINT(bugprone-exception-escape): JSON's moves do not throw
  std::unique_ptr<convert::Input> input;  ///< its bytes are in memory, the same on all ranks
  nlohmann::json told;                    ///< as trainer::TellSource returns it
  std::shared_ptr<os::Connection> connection;
};

/// Maps the memory of a cache on every rank.
/// \param wait  time to wait until the cache exists and is ready
/// \error kNotFound  the cache is missing, not ready in time, or ending; the error with
///        which it failed to load; kMismatch  it belongs to another user; kBadInput  its
///        description is invalid; kIo  the connection broke; kStopped; as device::OpenDevice
/// Collective.
Result<Attached> Attach(comm::Comm& comm, const os::Address& address,
                        std::chrono::milliseconds wait, const Sink& sink);

/// Disconnects, and verifies that the cache existed until now.
/// \error kIo  the cache ended earlier, so the data read from it may be invalid
/// Collective.
Status Detach(comm::Comm& comm, const Attached& attached);

}  // namespace shardwright::cache
