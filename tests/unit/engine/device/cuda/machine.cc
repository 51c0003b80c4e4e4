// SPDX-License-Identifier: Apache-2.0
#include "machine.h"

#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cstring>

#include "engine/device/cuda/open.h"
#include "support/comm/threads.h"

namespace shardwright::device::cuda {

namespace {

#ifdef SW_CUDA_DOUBLE
// The library of the doubles is that of NCCL too.
const bool kNcclNamed = setenv("SHARDWRIGHT_NCCL", SW_CUDA_DOUBLE, 1) == 0;
#endif

void ExpectClean() {
#ifdef SW_CUDA_DOUBLE
  EXPECT_EQ(cuda_double::Count().All(), 0U) << "something was not given back";
  EXPECT_EQ(cuda_double::Violations(), std::vector<std::string>());
#endif
}

}  // namespace

int Devices() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

std::vector<Status> RunRanks(int ranks, const std::function<Status(Rank&)>& body,
                             const DeviceOptions& options) {
  return comm::RunThreads(ranks, [&](comm::Comm& comm) -> Status {
#ifdef SW_CUDA_DOUBLE
    cuda_double::SetProcess(comm.rank());
#endif
    SW_TRY_ASSIGN(const auto device, Open(comm, options));
    Rank rank{comm, *device};
    return body(rank);
  });
}

void OnRanks(int ranks, const std::function<Status(Rank&)>& body, const DeviceOptions& options) {
#ifdef SW_CUDA_DOUBLE
  ASSERT_TRUE(kNcclNamed);
  cuda_double::Reset();
#endif
  if (Devices() < ranks) {
    GTEST_SKIP() << ranks << " devices needed, there are " << Devices();
  }
  const std::vector<Status> outcomes = RunRanks(ranks, body, options);
  for (std::size_t r = 0; r < outcomes.size(); ++r) {
    EXPECT_TRUE(outcomes[r]) << "rank " << r << ": " << outcomes[r].error().message;
  }
  ExpectClean();
}

std::vector<std::byte> Pattern(std::uint64_t bytes, std::uint64_t seed) {
  std::vector<std::byte> pattern(bytes);
  std::uint64_t state = seed * 0x9E3779B97F4A7C15U + 1;
  for (std::byte& each : pattern) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    each = static_cast<std::byte>(state >> 56);
  }
  return pattern;
}

Result<std::vector<std::byte>> Read(Device& device, Stream& stream, const std::byte* from,
                                    std::uint64_t bytes) {
  if (bytes == 0) return std::vector<std::byte>();
  SW_TRY_ASSIGN(const auto pinned, device.Allocate(Place::kPinned, bytes));
  SW_TRY(stream.Copy(pinned->data(), from, bytes));
  SW_TRY(stream.Synchronize());
  return std::vector<std::byte>(pinned->data(), pinned->data() + bytes);
}

Status Write(Device& device, Stream& stream, std::byte* to, std::span<const std::byte> bytes) {
  if (bytes.empty()) return {};
  SW_TRY_ASSIGN(const auto pinned, device.Allocate(Place::kPinned, bytes.size()));
  std::memcpy(pinned->data(), bytes.data(), bytes.size());
  SW_TRY(stream.Copy(to, pinned->data(), bytes.size()));
  return stream.Synchronize();
}

Status Same(std::span<const std::byte> expected, std::span<const std::byte> found,
            const std::string& what) {
  if (expected.size() != found.size()) {
    return Fail(Errc::kMismatch, what, ": ", expected.size(), " bytes expected, found ",
                found.size());
  }
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (expected[i] == found[i]) continue;
    return Fail(Errc::kMismatch, what, ": byte ", i, ": ", std::to_integer<int>(expected[i]),
                " expected, found ", std::to_integer<int>(found[i]));
  }
  return {};
}

}  // namespace shardwright::device::cuda
