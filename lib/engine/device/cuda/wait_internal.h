// SPDX-License-Identifier: Apache-2.0
// Waits for device work with a deadline.

#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <string>

#include "engine/device/cuda/communicator_internal.h"
#include "engine/device/cuda/context_internal.h"
#include "support/base/result.h"

namespace shardwright::device::cuda {

/// Measures how long a polling loop has been waiting.
class Patience {
 public:
  explicit Patience(std::chrono::milliseconds most)
      : most_(most), begun_(std::chrono::steady_clock::now()) {}

  bool Left() const { return std::chrono::steady_clock::now() - begun_ < most_; }

  /// Yields the processor: at first as briefly as possible, later for up to half a millisecond.
  void Rest();

  /// Returns the limit as text: "within 300 s".
  std::string Text() const;

 private:
  std::chrono::milliseconds most_;
  std::chrono::steady_clock::time_point begun_;
  unsigned rests_ = 0;
};

/// A CUDA object to wait for: a stream (the end of its work) or an event.
class Awaited {
 public:
  explicit Awaited(cudaStream_t stream) : stream_(stream) {}
  explicit Awaited(cudaEvent_t event) : event_(event) {}

  /// \error kIo  the stream or event has failed
  Result<bool> Ended() const;

 private:
  cudaStream_t stream_ = nullptr;
  cudaEvent_t event_ = nullptr;
};

/// Waits for `awaited` and checks the communicators in `others`, which have
/// work before it. Calls Silence if one of them fails or the deadline passes.
/// \error kIo  the work failed, or did not end before the deadline
Status Await(Context& context, const Awaited& awaited, const Communicators& others);

/// Cleans up after a failure: aborts the communicators `others`, then waits until `awaited` has
/// ended, so that memory can be freed. If it does not end before
/// the deadline of the context, marks the context as stuck.
/// \param why  reason that later calls on the communicators return
void Silence(Context& context, const Awaited& awaited, const Communicators& others,
             const std::string& why);

}  // namespace shardwright::device::cuda
