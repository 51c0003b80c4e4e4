// SPDX-License-Identifier: Apache-2.0
// The launches of lib/engine/device/cuda/launch.h: the same bodies, in a loop.

#include "engine/device/cuda/launch.h"

#include <utility>
#include <vector>

#include "device/double/world.h"
#include "engine/device/kernels/convert.h"

namespace shardwright::device::cuda {

using namespace shardwright::cuda_double;

namespace {

// A launch itself returns nothing. The caller reads its outcome as the last error, which may come
// from an earlier call if no call has read that error yet.
cudaError_t LastError() { return std::exchange(Mine().last, cudaSuccess); }

}  // namespace

cudaError_t LaunchConvert(DType to_type, std::byte* to, DType from_type, const std::byte* from,
                          std::uint64_t elems, cudaStream_t stream) {
  const std::lock_guard lock(TheWorld().mutex);
  if (const cudaError_t code = Begin(__func__)) return End(code);
  const auto on = FindStream(stream);
  if (on == nullptr) return End(cudaErrorInvalidResourceHandle);
  const int process = ThisProcess();
  const bool known = kernels::ForConversion(from_type, to_type, [&](auto in, auto out) {
    using In = decltype(in);
    using Out = decltype(out);
    const std::uint64_t to_bytes = elems * sizeof(typename Out::Bits);
    const std::uint64_t from_bytes = elems * sizeof(typename In::Bits);
    Work work;
    work.touches.push_back({to, to_bytes});
    work.touches.push_back({from, from_bytes});
    work.run = [=] {
      auto* const target = reinterpret_cast<typename Out::Bits*>(Reach(process, to, to_bytes));
      const auto* const source =
          reinterpret_cast<const typename In::Bits*>(Reach(process, from, from_bytes));
      if (target == nullptr || source == nullptr) return false;
      const auto aligned = [](const void* at, std::size_t bytes) {
        return reinterpret_cast<std::uintptr_t>(at) % bytes == 0;
      };
      const bool wide = aligned(target, alignof(kernels::Group<typename Out::Bits>)) &&
                        aligned(source, alignof(kernels::Group<typename In::Bits>));
      for (std::uint64_t i = 0; i * kernels::kConvertGroup < elems; ++i) {
        kernels::ConvertGroup<In, Out>(target, source, elems, wide, i);
      }
      return true;
    };
    Push(*on, std::move(work));
  });
  return known ? LastError() : cudaErrorInvalidValue;
}

cudaError_t LaunchRuns(std::byte* to, const std::byte* from, const kernels::MovedRun* runs,
                       unsigned count, cudaStream_t stream) {
  const std::lock_guard lock(TheWorld().mutex);
  if (const cudaError_t code = Begin(__func__)) return End(code);
  const auto on = FindStream(stream);
  if (on == nullptr) return End(cudaErrorInvalidResourceHandle);
  if (count == 0 || count > kRunsOfLaunch) return End(cudaErrorInvalidValue);
  const int process = ThisProcess();
  Work work;
  // Copied, as the arguments of a kernel are.
  const std::vector<kernels::MovedRun> moved(runs, runs + count);
  for (const kernels::MovedRun& run : moved) {
    work.touches.push_back({to + run.to, run.bytes});
    work.touches.push_back({from + run.from, run.bytes});
  }
  work.run = [=] {
    for (const kernels::MovedRun& run : moved) {
      std::byte* const target = Reach(process, to + run.to, run.bytes);
      const std::byte* const source = Reach(process, from + run.from, run.bytes);
      if (target == nullptr || source == nullptr) return false;
      const kernels::MovedRun here = {0, 0, run.bytes};
      for (std::uint64_t i = 0; i < kernels::RunPieces(target, here); ++i) {
        kernels::MovePiece(target, source, here, i);
      }
    }
    return true;
  };
  Push(*on, std::move(work));
  return LastError();
}

}  // namespace shardwright::device::cuda
