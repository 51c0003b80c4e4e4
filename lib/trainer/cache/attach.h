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

/// Connects to a load, also to one that is about to start.
/// \param end  of the patience
/// \error kNotFound  nobody listens by then; kMismatch  somebody else's; kStopped; kIo
/// Local.
Result<os::Connection> Reach(const os::Address& address, std::chrono::steady_clock::time_point end,
                             const os::Stop& stop);

/// A load as a source. The memory stays mapped as long as `input`.
struct Attached {  // NOLINT(bugprone-exception-escape): JSON's moves do not throw
  std::unique_ptr<convert::Input> input;  ///< its bytes are memory, the same on all ranks
  nlohmann::json told;                    ///< as trainer::TellSource has it
  std::shared_ptr<os::Connection> connection;
};

/// Maps the memory of a load, on every rank.
/// \param wait  for it to be there and ready
/// \error kNotFound  it is not there or not ready in time, or about to end; what the load has
///        failed with; kMismatch  it is another user's; kBadInput  what it says makes no sense;
///        kIo  it is gone; kStopped; as device::OpenDevice
/// Collective.
Result<Attached> Attach(comm::Comm& comm, const os::Address& address,
                        std::chrono::milliseconds wait, const Sink& sink);

/// Lets go, and proves that the load was there until now.
/// \error kIo  it was not: what was read is not to be trusted
/// Collective.
Status Detach(comm::Comm& comm, const Attached& attached);

}  // namespace shardwright::cache
