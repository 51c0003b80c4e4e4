// SPDX-License-Identifier: Apache-2.0
// Queues the kernels of lib/engine/device/kernels on a stream. This header must
// compile with nvcc and with the test doubles of CUDA, so it does not use Result.

#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "engine/device/kernels/runs.h"
#include "engine/tensor/dtype.h"

namespace shardwright::device::cuda {

/// Implements Stream::Convert.
/// \returns cudaErrorInvalidValue if the types are
///        equal or CanConvert returns false for them
cudaError_t LaunchConvert(DType to_type, std::byte* to, DType from_type, const std::byte* from,
                          std::uint64_t elems, cudaStream_t stream);

/// Maximum number of runs per launch. Runs are passed as kernel arguments,
/// which the launch copies from the host; old drivers limit them to 4 KiB.
inline constexpr unsigned kRunsOfLaunch = 160;

/// Implements Stream::CopyRuns for one launch. \pre 0 < count <= kRunsOfLaunch
cudaError_t LaunchRuns(std::byte* to, const std::byte* from, const kernels::MovedRun* runs,
                       unsigned count, cudaStream_t stream);

}  // namespace shardwright::device::cuda
