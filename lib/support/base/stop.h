// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>

#include "support/base/result.h"
#include "support/base/sink.h"

namespace shardwright {

/// Returns true once the caller wants a long computation to end, and then keeps returning true.
/// Callable from any thread, and cheap enough to be called every microsecond. An empty StopCheck
/// never stops.
///
/// After a stop, a function that takes a StopCheck and does not return a Result ends early with an
/// undefined result. Its caller checks for the stop again and returns kStopped.
using StopCheck = std::function<bool()>;

/// Returns true once `stop` asks to end.
inline bool Stopped(const StopCheck& stop) { return stop && stop(); }

/// Fails after a stop. \error kStopped  `stop` asks to end
inline Status CheckStop(const StopCheck& stop) {
  if (!Stopped(stop)) return {};
  return Fail(Errc::kStopped, "stopped on request");
}

/// Returns the stop check of a sink. The sink must outlive it.
inline StopCheck StopOf(const Sink& sink) {
  return [&sink] { return sink.stop_requested(); };
}

}  // namespace shardwright
