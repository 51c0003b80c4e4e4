// SPDX-License-Identifier: Apache-2.0
// The doubles detect a wrong program. Without that the tests on them would prove nothing. Also
// tests how the cuda backend handles devices and ranks that never answer.

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "device/double/double.h"
#include "engine/device/cuda_plugin.h"
#include "engine/device/device.h"
#include "machine.h"
#include "support/comm/comm.h"
#include "support/comm/threads.h"

namespace shardwright::device::cuda {
namespace {

using cuda_double::Count;
using cuda_double::Violations;

constexpr std::uint64_t kSome = 4000;

DeviceOptions Deadline(std::chrono::milliseconds deadline) {
  DeviceOptions options;
  options.deadline = deadline;
  return options;
}

TEST(CudaDouble, AMissingWaitShowsOldBytes) {
  OnRanks(1, [](Rank& rank) -> Status {
    SW_TRY_ASSIGN(const auto from, rank.device.Allocate(Place::kPinned, kSome));
    SW_TRY_ASSIGN(const auto middle, rank.device.Allocate(Place::kDevice, kSome));
    SW_TRY_ASSIGN(const auto to, rank.device.Allocate(Place::kPinned, kSome));
    SW_TRY_ASSIGN(const auto stream, rank.device.MakeStream());
    std::memset(from->data(), 1, kSome);
    std::memset(to->data(), 0, kSome);
    SW_TRY(stream->Copy(middle->data(), from->data(), kSome));
    SW_TRY(stream->Copy(to->data(), middle->data(), kSome));
    EXPECT_EQ(to->data()[0], std::byte{0}) << "read too early, and already there";
    std::memset(from->data(), 2, kSome);  // filled again too early
    SW_TRY(stream->Synchronize());
    EXPECT_EQ(to->data()[0], std::byte{2}) << "the source was read before it had to be";
    return {};
  });
}

TEST(CudaDouble, AStreamThatDoesNotWaitForAnotherReadsWhatWasThere) {
  OnRanks(1, [](Rank& rank) -> Status {
    SW_TRY_ASSIGN(const auto from, rank.device.Allocate(Place::kPinned, kSome));
    SW_TRY_ASSIGN(const auto middle, rank.device.Allocate(Place::kDevice, kSome));
    SW_TRY_ASSIGN(const auto stream, rank.device.MakeStream());
    SW_TRY_ASSIGN(const auto other, rank.device.MakeStream());
    std::memset(from->data(), 1, kSome);
    SW_TRY(stream->Copy(middle->data(), from->data(), kSome));
    SW_TRY_ASSIGN(const auto found, Read(rank.device, *other, middle->data(), kSome));
    EXPECT_EQ(found[0], std::byte{0xCB}) << "new memory is filled with this";
    return stream->Synchronize();
  });
}

TEST(CudaDouble, WhatIsPutBehindACommunicatorTooEarlyRunsBeforeIt) {
  cuda_double::Reset();
  // Plain NCCL, without the waits of the cuda backend.
  comm::RunThreads(2, [](comm::Comm& comm) -> Status {
    cuda_double::SetProcess(comm.rank());
    EXPECT_EQ(cudaSetDevice(comm.rank()), cudaSuccess);
    ncclUniqueId id = {};
    comm::Bytes bytes(sizeof id);
    if (comm.rank() == 0) {
      EXPECT_EQ(ncclGetUniqueId(&id), ncclSuccess);
    }
    std::memcpy(bytes.data(), &id, sizeof id);
    SW_TRY(comm.Bcast(bytes));
    std::memcpy(&id, bytes.data(), sizeof id);
    ncclComm_t nccl = nullptr;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    EXPECT_EQ(ncclCommInitRankConfig(&nccl, 2, id, comm.rank(), &config), ncclInProgress);
    ncclResult_t state = ncclInProgress;
    while (state == ncclInProgress) ncclCommGetAsyncError(nccl, &state);
    cudaStream_t stream = nullptr;
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    void* data = nullptr;
    void* host = nullptr;
    EXPECT_EQ(cudaMalloc(&data, kSome), cudaSuccess);
    EXPECT_EQ(cudaHostAlloc(&host, kSome, 0), cudaSuccess);
    std::memset(host, comm.rank() + 1, kSome);
    EXPECT_EQ(cudaMemcpyAsync(data, host, kSome, cudaMemcpyDefault, stream), cudaSuccess);
    EXPECT_EQ(ncclBroadcast(data, data, kSome, ncclInt8, 0, nccl, stream), ncclInProgress);
    // No call has polled the communicator yet.
    EXPECT_EQ(cudaMemcpyAsync(host, data, kSome, cudaMemcpyDefault, stream), cudaSuccess);
    while (cudaStreamQuery(stream) == cudaErrorNotReady) continue;
    EXPECT_EQ(static_cast<char*>(host)[0], comm.rank() + 1);
    SW_TRY(comm.Barrier());
    state = ncclInProgress;
    while (state == ncclInProgress) ncclCommGetAsyncError(nccl, &state);
    EXPECT_EQ(cudaMemcpyAsync(host, data, kSome, cudaMemcpyDefault, stream), cudaSuccess);
    while (cudaStreamQuery(stream) == cudaErrorNotReady) continue;
    EXPECT_EQ(static_cast<char*>(host)[0], 1);
    return {};
  });
}

TEST(CudaDouble, MemoryGivenBackUnderQueuedWorkIsNoticed) {
  cuda_double::Reset();
  const auto outcomes = RunRanks(1, [](Rank& rank) -> Status {
    SW_TRY_ASSIGN(const auto stream, rank.device.MakeStream());
    SW_TRY_ASSIGN(const auto from, rank.device.Allocate(Place::kPinned, kSome));
    {
      SW_TRY_ASSIGN(const auto to, rank.device.Allocate(Place::kDevice, kSome));
      SW_TRY(stream->Copy(to->data(), from->data(), kSome));
    }
    const Status status = stream->Synchronize();
    EXPECT_FALSE(status);
    if (!status) {
      EXPECT_NE(status.error().message.find("cudaErrorIllegalAddress"), std::string::npos);
    }
    return {};
  });
  EXPECT_TRUE(outcomes[0]);
  ASSERT_EQ(Violations().size(), 1U);
  EXPECT_EQ(Violations()[0], "process 0: cudaFree: under queued work");
}

TEST(CudaDoubleDeathTest, TheHostDoesNotReachDeviceMemory) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  cuda_double::Reset();
  void* data = nullptr;
  ASSERT_EQ(cudaMalloc(&data, 100), cudaSuccess);
  EXPECT_DEATH(static_cast<volatile char*>(data)[0] = 1, "");
  EXPECT_EQ(cudaFree(data), cudaSuccess);
  EXPECT_DEATH(static_cast<volatile char*>(data)[0] = 1, "");
}

TEST(CudaDeadline, AStreamThatNeverEndsIsGivenUp) {
  cuda_double::Reset({.hang_streams = true});
  const auto begun = std::chrono::steady_clock::now();
  const auto outcomes = RunRanks(
      1,
      [](Rank& rank) -> Status {
        SW_TRY_ASSIGN(const auto buffer, rank.device.Allocate(Place::kPinned, kSome));
        SW_TRY_ASSIGN(const auto other, rank.device.Allocate(Place::kDevice, kSome));
        SW_TRY_ASSIGN(const auto stream, rank.device.MakeStream());
        SW_TRY(stream->Copy(other->data(), buffer->data(), kSome));
        SW_TRY_ASSIGN(const auto event, stream->Record());
        std::vector<std::byte> ordinary(kSome);
        const Status copy = stream->Copy(ordinary.data(), other->data(), kSome);
        EXPECT_FALSE(copy) << "a copy to ordinary memory has waited for ever";
        EXPECT_FALSE(event->Wait());
        return stream->Synchronize();
      },
      Deadline(std::chrono::milliseconds(300)));
  ASSERT_FALSE(outcomes[0]);
  EXPECT_EQ(outcomes[0].error().code, Errc::kIo);
  EXPECT_NE(outcomes[0].error().message.find("within 300 ms"), std::string::npos);
  EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::minutes(5));
  EXPECT_EQ(Violations(), std::vector<std::string>());
  // The device may still write there: the memory is kept until the process ends.
  EXPECT_EQ(Count().memory, 2U);
  cuda_double::Reset();
}

// Gathers twice on all ranks; runs `then` on rank 1 in between.
Status GatherTwice(Rank& rank, const std::function<void()>& then) {
  const auto ranks = static_cast<std::uint64_t>(rank.ranks());
  SW_TRY_ASSIGN(const auto data, rank.device.Allocate(Place::kDevice, kSome * ranks));
  SW_TRY_ASSIGN(const auto stream, rank.device.MakeStream());
  const std::vector<int> group(ranks, 0);
  SW_TRY_ASSIGN(const auto all, rank.device.MakeCollective(rank.comm, group));
  const std::vector<std::uint64_t> parts(ranks, kSome);
  const std::byte* const own = data->data() + kSome * static_cast<std::uint64_t>(rank.number());
  SW_TRY(all->AllGather(*stream, data->data(), own, parts));
  SW_TRY(stream->Synchronize());
  if (rank.number() == 1) then();
  SW_TRY(all->AllGather(*stream, data->data(), own, parts));
  Status status = stream->Synchronize();
  EXPECT_FALSE(stream->Synchronize()) << "what has failed stays so";
  EXPECT_FALSE(all->AllGather(*stream, data->data(), own, parts));
  return status;
}

void ExpectAllGaveUp(const std::vector<Status>& outcomes, const std::string& words) {
  for (const Status& outcome : outcomes) {
    ASSERT_FALSE(outcome);
    EXPECT_EQ(outcome.error().code, Errc::kIo);
  }
  EXPECT_NE(outcomes[0].error().message.find(words), std::string::npos)
      << outcomes[0].error().message;
  EXPECT_EQ(Count().All(), 0U);
  EXPECT_EQ(Violations(), std::vector<std::string>());
}

TEST(CudaDeadline, ACommunicatorThatHangsIsAborted) {
  for (const int ranks : {2, 4}) {
    cuda_double::Reset({.hang_nccl = true, .told = false});
    const auto outcomes = RunRanks(
        ranks, [](Rank& rank) { return GatherTwice(rank, [] {}); },
        Deadline(std::chrono::milliseconds(300)));
    ExpectAllGaveUp(outcomes, "within 300 ms");
  }
}

// Rank 1 fails before it joins a gather, or as it joins. The other ranks wait in the gather.
TEST(CudaDeadline, ARankThatFailsIsToldOfOrWaitedForUntilTheDeadline) {
  const std::vector<std::string> calls = {"cudaSetDevice", "ncclAllGather"};
  for (const bool told : {true, false}) {
    for (std::size_t call = 0; call < calls.size(); ++call) {
      cuda_double::Reset({.told = told});
      const auto fail = [&] {
        const std::uint64_t before = cuda_double::About(1).calls;
        cuda_double::FailCall(1, before + call + 1, cudaErrorMemoryAllocation, ncclSystemError);
      };
      const auto outcomes = RunRanks(
          3, [&](Rank& rank) { return GatherTwice(rank, fail); },
          // If the other ranks get an error, no deadline is near.
          Deadline(told ? std::chrono::minutes(5) : std::chrono::milliseconds(500)));
      EXPECT_EQ(cuda_double::About(1).failed, calls[call]);
      ExpectAllGaveUp(outcomes, told ? "a rank is gone" : "within 500 ms");
    }
  }
}

TEST(CudaDeadline, ARankThatDoesNotComeIsNotWaitedForLonger) {
  // One rank fails to enter the communicator, and the other rank gets no error.
  cuda_double::Reset({.told = false});
  {
    const auto outcomes = RunRanks(
        2,
        [&](Rank& rank) -> Status {
          const std::vector<int> group(2, 0);
          // The next call of rank 1 but two: cudaSetDevice, ncclGetVersion, then the communicator.
          const std::uint64_t calls = cuda_double::About(1).calls;
          SW_TRY(rank.comm.Barrier());
          if (rank.number() == 1) {
            cuda_double::FailCall(1, calls + 3, cudaErrorMemoryAllocation, ncclSystemError);
          }
          SW_TRY(rank.device.MakeCollective(rank.comm, group));
          return {};
        },
        Deadline(std::chrono::milliseconds(500)));
    EXPECT_EQ(cuda_double::About(1).failed, "ncclCommInitRankConfig");
    ExpectAllGaveUp(outcomes, "");
  }
}

TEST(CudaDevice, RanksThatShareADeviceAreRefused) {
  cuda_double::Reset({.devices = 1});
  const auto outcomes = RunRanks(2, [](Rank& rank) -> Status {
    const std::vector<int> apart = {0, 1};
    SW_TRY_ASSIGN(const auto alone, rank.device.MakeCollective(rank.comm, apart));
    const std::vector<int> group(2, 0);
    const auto all = rank.device.MakeCollective(rank.comm, group);
    EXPECT_FALSE(all);
    if (!all) {
      EXPECT_EQ(all.error().code, Errc::kUnsupported);
      EXPECT_NE(all.error().message.find("ranks 0 and 1 share a device"), std::string::npos);
    }
    return {};
  });
  for (const Status& outcome : outcomes) EXPECT_TRUE(outcome);
}

TEST(CudaDevice, NoDeviceIsNotFound) {
  cuda_double::Reset({.devices = 0});
  const auto outcomes = RunRanks(2, [](Rank&) { return Status(); });
  for (const Status& outcome : outcomes) {
    ASSERT_FALSE(outcome);
    EXPECT_EQ(outcome.error().code, Errc::kNotFound);
    EXPECT_NE(outcome.error().message.find("cudaErrorNoDevice"), std::string::npos);
  }
}

TEST(CudaDevice, WithoutNcclOneRankGoesOn) {
  cuda_double::Reset();
  const std::string file = std::getenv("SHARDWRIGHT_NCCL");
  setenv("SHARDWRIGHT_NCCL", "/nowhere/libnccl.so.2", 1);
  const auto make = [](Rank& rank) -> Status {
    const std::vector<int> group(static_cast<std::size_t>(rank.ranks()), 0);
    SW_TRY(rank.device.MakeCollective(rank.comm, group));
    return {};
  };
  EXPECT_TRUE(RunRanks(1, make)[0]);
  for (const Status& outcome : RunRanks(2, make)) {
    ASSERT_FALSE(outcome);
    EXPECT_EQ(outcome.error().code, Errc::kNotFound);
    EXPECT_NE(outcome.error().message.find("/nowhere/libnccl.so.2"), std::string::npos);
  }
  setenv("SHARDWRIGHT_NCCL", file.c_str(), 1);
}

TEST(CudaPlugin, IsOpenedWhereItIsNamed) {
  cuda_double::Reset();
  const auto comm = comm::MakeSerialComm();
  setenv("SHARDWRIGHT_CUDA", "/nowhere/shardwright_cuda.so", 1);
  const auto none = OpenCudaDevice(*comm, {});
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error().code, Errc::kNotFound);
  setenv("SHARDWRIGHT_CUDA", SW_CUDA_DOUBLE, 1);
  const auto other = OpenCudaDevice(*comm, {});
  ASSERT_FALSE(other);
  EXPECT_NE(other.error().message.find("not a Shardwright plugin"), std::string::npos);
  setenv("SHARDWRIGHT_CUDA", SW_CUDA_PLUGIN, 1);
  {
    const auto device = OpenCudaDevice(*comm, {});
    ASSERT_TRUE(device) << device.error().message;
    EXPECT_EQ((*device)->name(), "cuda:0 double");
    const auto stream = (*device)->MakeStream();
    ASSERT_TRUE(stream);
    const auto buffer = (*device)->Allocate(Place::kDevice, 100);
    ASSERT_TRUE(buffer);
    const auto bytes = Pattern(100, 1);
    EXPECT_TRUE(Write(**device, **stream, (*buffer)->data(), bytes));
    const auto found = Read(**device, **stream, (*buffer)->data(), 100);
    ASSERT_TRUE(found);
    EXPECT_TRUE(Same(bytes, *found, "by way of the plugin"));
  }
  EXPECT_EQ(Count().All(), 0U);
  unsetenv("SHARDWRIGHT_CUDA");
}

}  // namespace
}  // namespace shardwright::device::cuda
