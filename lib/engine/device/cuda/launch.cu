// SPDX-License-Identifier: Apache-2.0
// Implements the launches of launch.h: computes the number of indexes and starts the kernels.

#include <cstring>

#include "engine/device/cuda/launch.h"
#include "engine/device/kernels/convert.h"

namespace shardwright::device::cuda {

namespace {

constexpr unsigned kThreads = 256;
constexpr std::uint64_t kBlocks = 1U << 20;  // maximum; threads loop if there is more work

// The runs of one launch; each is a row of the grid.
struct Runs {
  kernels::MovedRun run[kRunsOfLaunch];
};
static_assert(sizeof(Runs) + 2 * sizeof(void*) <= 4096, "arguments of a kernel");

template <class In, class Out>
__global__ void ConvertKernel(typename Out::Bits* to, const typename In::Bits* from,
                              std::uint64_t elems, bool wide, std::uint64_t groups) {
  const std::uint64_t step = std::uint64_t{gridDim.x} * blockDim.x;
  for (std::uint64_t i = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < groups;
       i += step) {
    kernels::ConvertGroup<In, Out>(to, from, elems, wide, i);
  }
}

// Moves run y with row y of the grid.
__global__ void RunsKernel(std::byte* to, const std::byte* from, const Runs runs) {
  const kernels::MovedRun run = runs.run[blockIdx.y];
  const std::uint64_t pieces = kernels::RunPieces(to, run);
  const std::uint64_t step = std::uint64_t{gridDim.x} * blockDim.x;
  for (std::uint64_t i = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < pieces;
       i += step) {
    kernels::MovePiece(to, from, run, i);
  }
}

unsigned BlocksFor(std::uint64_t indexes, std::uint64_t most) {
  const std::uint64_t blocks = (indexes + kThreads - 1) / kThreads;
  return static_cast<unsigned>(blocks < most ? blocks : most);
}

}  // namespace

cudaError_t LaunchConvert(DType to_type, std::byte* to, DType from_type, const std::byte* from,
                          std::uint64_t elems, cudaStream_t stream) {
  if (elems == 0) return cudaSuccess;
  const std::uint64_t groups = (elems + kernels::kConvertGroup - 1) / kernels::kConvertGroup;
  const bool known = kernels::ForConversion(from_type, to_type, [&](auto in, auto out) {
    using In = decltype(in);
    using Out = decltype(out);
    const auto aligned = [](const void* at, std::size_t bytes) {
      return reinterpret_cast<std::uintptr_t>(at) % bytes == 0;
    };
    const bool wide = aligned(to, alignof(kernels::Group<typename Out::Bits>)) &&
                      aligned(from, alignof(kernels::Group<typename In::Bits>));
    ConvertKernel<In, Out><<<BlocksFor(groups, kBlocks), kThreads, 0, stream>>>(
        reinterpret_cast<typename Out::Bits*>(to),
        reinterpret_cast<const typename In::Bits*>(from), elems, wide, groups);
  });
  return known ? cudaGetLastError() : cudaErrorInvalidValue;
}

cudaError_t LaunchRuns(std::byte* to, const std::byte* from, const kernels::MovedRun* runs,
                       unsigned count, cudaStream_t stream) {
  if (count == 0 || count > kRunsOfLaunch) return cudaErrorInvalidValue;
  Runs all;
  std::memcpy(all.run, runs, count * sizeof *runs);
  std::uint64_t most = 0;
  for (unsigned i = 0; i < count; ++i) {
    const std::uint64_t pieces = kernels::RunPieces(to, runs[i]);
    if (pieces > most) most = pieces;
  }
  if (most == 0) return cudaSuccess;
  // Use enough blocks to fill a device with one long run, but do not launch millions of idle ones.
  const dim3 grid(BlocksFor(most, 4096 / count + 64), count);
  RunsKernel<<<grid, kThreads, 0, stream>>>(to, from, all);
  return cudaGetLastError();
}

}  // namespace shardwright::device::cuda
