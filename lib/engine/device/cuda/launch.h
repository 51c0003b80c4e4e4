// SPDX-License-Identifier: Apache-2.0
// Queues the kernels of lib/engine/device/kernels on a stream. Nothing here but what nvcc and the
// doubles of the tests compile too: no Result.

#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "engine/device/kernels/runs.h"
#include "engine/tensor/dtype.h"

namespace shardwright::device::cuda {

/// As Stream::Convert.
/// \returns cudaErrorInvalidValue for a pair that CanConvert denies, or equal
/// types
cudaError_t LaunchConvert(DType to_type, std::byte* to, DType from_type, const std::byte* from,
                          std::uint64_t elems, cudaStream_t stream);

/// So many runs at most are one launch: they are arguments of the kernel, which leave the host with
/// the launch and may be 4 KiB where drivers are old.
inline constexpr unsigned kRunsOfLaunch = 160;

/// As Stream::CopyRuns. \pre 0 < count <= kRunsOfLaunch
cudaError_t LaunchRuns(std::byte* to, const std::byte* from, const kernels::MovedRun* runs,
                       unsigned count, cudaStream_t stream);

}  // namespace shardwright::device::cuda
