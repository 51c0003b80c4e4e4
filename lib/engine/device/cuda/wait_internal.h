// SPDX-License-Identifier: Apache-2.0
// Bounded waits for what a device does.

#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <string>

#include "engine/device/cuda/communicator_internal.h"
#include "engine/device/cuda/context_internal.h"
#include "support/base/result.h"

namespace shardwright::device::cuda {

/// How long somebody who asks again and again has been asking.
class Patience {
 public:
  explicit Patience(std::chrono::milliseconds most)
      : most_(most), begun_(std::chrono::steady_clock::now()) {}

  bool Left() const { return std::chrono::steady_clock::now() - begun_ < most_; }

  /// Lets others have the processor: at first as short as can be, then up to half a millisecond.
  void Rest();

  /// "within 300 s".
  std::string Text() const;

 private:
  std::chrono::milliseconds most_;
  std::chrono::steady_clock::time_point begun_;
  unsigned rests_ = 0;
};

/// Something of CUDA that is there or is not yet: a stream whose work has ended, an event.
class Awaited {
 public:
  explicit Awaited(cudaStream_t stream) : stream_(stream) {}
  explicit Awaited(cudaEvent_t event) : event_(event) {}

  /// \error kIo  what it stands for has failed
  Result<bool> Ended() const;

 private:
  cudaStream_t stream_ = nullptr;
  cudaEvent_t event_ = nullptr;
};

/// Waits for it. Whatever of `others` has work before it is watched. If one of them fails, or the
/// deadline passes: Silence.
/// \error kIo  it has failed, or not ended in time
Status Await(Context& context, const Awaited& awaited, const Communicators& others);

/// After a failure: aborts `others`, and waits for the device to become quiet, so that memory may
/// be given back. What is not quiet after a while leaves the device stuck.
/// \param why  that others
/// are told
void Silence(Context& context, const Awaited& awaited, const Communicators& others,
             const std::string& why);

}  // namespace shardwright::device::cuda
