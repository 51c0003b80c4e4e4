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
  /// Ends by itself so long after it was ready. Nothing: never.
  std::optional<std::chrono::seconds> deadline;
};

enum class End : std::uint8_t { kAsked, kSignal, kDeadline };

/// What a load was, once it is over.
struct Served {
  Loaded loaded;
  std::string target;  ///< JSON, as checkpoints::Layout::Json
  std::uint64_t attaches = 0;
  End end = End::kAsked;
};

/// TokenCounts a source into memory and serves it until it is told to stop: by a request, by a stop
/// of the sink, or by its deadline. It listens from the beginning on, so that trainers may come
/// while it loads, and answers for two seconds at least, so that they hear why it failed. Trainers
/// that are attached get a few seconds to let go. All ranks are on one node, where rank 0 answers
/// for all.
/// \error kUsage  an address that is no socket file; kBusy  somebody listens there; kUnsupported
///        ranks on several nodes; kStopped  asked to stop while it loads; kIo  another rank is
///        gone; as convert::OpenInput, device::OpenDevice and Load
/// Collective.
Result<Served> Serve(comm::Comm& comm, const ServeOptions& options,
                     const checkpoints::TargetSpec& spec, const checkpoints::Format& format,
                     Sink& sink);

/// What a load says of itself: docs/formats/resident.md.
/// \param wait  for it to be there and ready; zero: as it is now
/// \error kNotFound  nobody listens, or not ready in time; what it has failed with; kStopped; kIo
/// Local.
Result<nlohmann::json> AskStatus(const os::Address& address, std::chrono::milliseconds wait,
                                 const os::Stop& stop);

/// Ends a load, one that is under way when it has loaded, and waits until its address is free
/// again.
/// \error kNotFound  nobody listens; kIo; kStopped
/// Local.
Status AskStop(const os::Address& address, const os::Stop& stop);

}  // namespace shardwright::cache
