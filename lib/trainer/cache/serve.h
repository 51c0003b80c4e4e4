// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include <nlohmann/json_fwd.hpp>

#include "checkpoints/model/format.h"
#include "convert/input.h"
#include "engine/device/device.h"
#include "support/base/result.h"
#include "support/base/sink.h"
#include "support/comm/comm.h"
#include "support/os/socket.h"
#include "trainer/cache/cache.h"

namespace shardwright::cache {

struct ServeOptions {
  os::Address address;  ///< a socket file
  convert::InputOptions input;
  device::Kind kind = device::Kind::kHost;
  LoadOptions load;
  /// Time after which a ready cache ends by itself. Empty: never.
  std::optional<std::chrono::seconds> deadline;
};

enum class End : std::uint8_t { kAsked, kSignal, kDeadline };

/// Summary of a cache after it ended.
struct Served {
  Loaded loaded;
  std::string target;  ///< JSON, as checkpoints::Layout::Json
  std::uint64_t attaches = 0;
  End end = End::kAsked;
};

/// Loads a source into memory and serves it until a request, the sink or the deadline stops
/// it. It listens from the start, so that trainers can connect while it loads, and answers for
/// at least two seconds, so that they receive the error if loading fails. At the end, attached
/// trainers get a few seconds to disconnect. All ranks must be on one node, where rank 0
/// answers for all.
/// \error kUsage  the address is not a socket file; kBusy  a process listens there already;
///        kUnsupported  ranks on several nodes; kStopped  a stop was requested while it loads;
///        kIo  another rank ended early; as convert::OpenInput, device::OpenDevice and Load
/// Collective.
Result<Served> Serve(comm::Comm& comm, const ServeOptions& options,
                     const checkpoints::TargetSpec& spec, const checkpoints::Format& format,
                     Sink& sink);

/// Requests the status of a cache: docs/formats/cache.md.
/// \param wait  time to wait until it is ready; zero: report the current state
/// \error kNotFound  no cache listens, or not ready in time; its own load error; kStopped; kIo
/// Local.
Result<nlohmann::json> AskStatus(const os::Address& address, std::chrono::milliseconds wait,
                                 const os::Stop& stop);

/// Ends a cache, after it has finished loading, and
/// waits until its address is free again.
/// \error kNotFound  no cache listens; kIo; kStopped
/// Local.
Status AskStop(const os::Address& address, const os::Stop& stop);

}  // namespace shardwright::cache
