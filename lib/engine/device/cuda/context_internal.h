// SPDX-License-Identifier: Apache-2.0
// The device of this rank, and how calls of the CUDA runtime become results.

#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <string>

#include "support/base/result.h"

namespace shardwright::device::cuda {

/// Success, or kIo "<what>: <name of the error>: <its text>". The error is taken out of the
/// runtime's memory of the last one, where a later launch would take it for its own.
Status Check(cudaError_t code, const std::string& what);

/// What everything that a device has made refers to.
struct Context {
  int ordinal = 0;
  std::string name;  ///< "cuda:3 NVIDIA H100 80GB HBM3"
  std::chrono::milliseconds deadline{};

  /// Work on the device did not end though it was aborted: giving memory back would wait for it,
  /// without a bound, so memory is left to the end of the process.
  std::atomic<bool> stuck = false;

  /// Makes the device that of the calling thread.
  Status Enter() const;
};

}  // namespace shardwright::device::cuda
