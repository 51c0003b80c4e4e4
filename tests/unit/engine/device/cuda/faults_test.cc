// SPDX-License-Identifier: Apache-2.0
// Fails every call of the cuda backend in turn and tests its errors. Also tests that the doubles
// detect wrong programs.

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "device/double/double.h"
#include "engine/device/device.h"
#include "load.h"
#include "machine.h"
#include "support/comm/comm.h"

namespace shardwright::device::cuda {
namespace {

using cuda_double::About;
using cuda_double::Count;
using cuda_double::Violations;

constexpr std::uint64_t kBytes = 6000;

// Does the work of a load on every rank, with every device call. Wrong bytes are kMismatch.
Status Load(Rank& rank, const std::function<void()>& at_end) {
  const auto ranks = static_cast<std::uint64_t>(rank.ranks());
  const auto number = static_cast<std::uint64_t>(rank.number());
  std::vector<std::uint64_t> parts;
  std::vector<std::byte> expected;
  std::uint64_t before = 0;
  for (std::uint64_t r = 0; r < ranks; ++r) {
    if (r == number) before = expected.size();
    parts.push_back(kBytes - 100 * r);
    const auto part = Pattern(parts[r], r);
    expected.insert(expected.end(), part.begin(), part.end());
  }
  std::unique_ptr<Buffer> pinned;
  std::unique_ptr<Buffer> all;
  std::unique_ptr<Stream> stream;
  const auto fill = [&]() -> Status {
    SW_TRY_ASSIGN(pinned, rank.device.Allocate(Place::kPinned, kBytes));
    SW_TRY_ASSIGN(all, rank.device.Allocate(Place::kShared, expected.size() + kBytes * ranks));
    SW_TRY_ASSIGN(stream, rank.device.MakeStream());
    const auto bytes = Pattern(parts[number], number);
    std::memcpy(pinned->data(), bytes.data(), bytes.size());
    SW_TRY(stream->Copy(all->data() + before, pinned->data(), bytes.size()));
    SW_TRY_ASSIGN(const auto copied, stream->Record());
    return copied->Wait();
  };
  SW_TRY(rank.comm.Agree(fill()));
  const std::vector<int> group(ranks, 0);
  SW_TRY_ASSIGN(const auto together, rank.device.MakeCollective(rank.comm, group));
  const auto gather = [&]() -> Status {
    SW_TRY(together->AllGather(*stream, all->data(), all->data() + before, parts));
    const std::vector<std::uint64_t> even(ranks, 50);
    SW_TRY(together->AllGather(*stream, all->data() + expected.size(), pinned->data(), even));
    SW_TRY(stream->Synchronize());
    SW_TRY_ASSIGN(const auto found, Read(rank.device, *stream, all->data(), expected.size()));
    SW_TRY(Same(expected, found, "gathered"));
    std::vector<std::byte> ordinary(40);
    SW_TRY(stream->Copy(ordinary.data(), all->data(), 40));
    return stream->Synchronize();
  };
  SW_TRY(rank.comm.Agree(gather()));
  at_end();
  return {};
}

// Shares memory as a load does: rank 0 allocates memory that the other rank maps.
Status Lend(Rank& rank, const std::function<void()>& at_end) {
  std::unique_ptr<Buffer> own;
  std::unique_ptr<Buffer> mapped;
  std::unique_ptr<Stream> stream;
  Handle handle;
  const auto show = [&]() -> Status {
    SW_TRY_ASSIGN(stream, rank.device.MakeStream());
    if (rank.number() != 0) return {};
    SW_TRY_ASSIGN(own, rank.device.Allocate(Place::kShared, kBytes));
    SW_TRY(Write(rank.device, *stream, own->data(), Pattern(kBytes, 1)));
    SW_TRY_ASSIGN(handle, rank.device.Export(*own));
    return {};
  };
  SW_TRY(rank.comm.Agree(show()));
  const auto shown = std::as_bytes(std::span<const char>(handle.token));
  comm::Bytes bytes(shown.begin(), shown.end());
  SW_TRY(rank.comm.Bcast(bytes));
  const auto map = [&]() -> Status {
    if (rank.number() == 0) return {};
    handle.kind = Kind::kCuda;
    handle.bytes = kBytes;
    handle.token.assign(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    SW_TRY_ASSIGN(mapped, rank.device.Import(handle));
    SW_TRY_ASSIGN(const auto found, Read(rank.device, *stream, mapped->data(), kBytes));
    return Same(Pattern(kBytes, 1), found, "mapped");
  };
  SW_TRY(rank.comm.Agree(map()));
  at_end();
  return {};
}

// Calls with failures that no caller sees: destructors and the queries that they make. The last
// one is a query while a communicator is closed; the bytes were compared after it.
const std::set<std::string> kUnheard = {"cudaFree",
                                        "cudaFreeHost",
                                        "cudaEventDestroy",
                                        "cudaStreamDestroy",
                                        "cudaIpcCloseMemHandle",
                                        "cudaSetDevice",
                                        "ncclCommAbort",
                                        "ncclCommDestroy",
                                        "ncclCommFinalize",
                                        "ncclCommGetAsyncError"};

struct Sweep {
  std::uint64_t failed = 0;
  std::uint64_t told = 0;
  std::map<std::string, std::uint64_t> functions;
  double longest_s = 0;
};

using Body = std::function<Status(Rank& rank, const std::function<void()>& at_end)>;

// Fails each call of `process` once, with `ranks` ranks.
Sweep SweepCalls(int ranks, int process, cudaError_t cuda, ncclResult_t nccl, const Body& body,
                 bool work, std::optional<int> ordinal) {
  Sweep sweep;
  DeviceOptions options;
  options.ordinal = ordinal;
  options.deadline = std::chrono::seconds(60);
  for (std::uint64_t k = 1;; ++k) {
    cuda_double::Reset();
    if (work) {
      cuda_double::FailWork(process, k);
    } else {
      cuda_double::FailCall(process, k, cuda, nccl);
    }
    std::string failed_at_end;
    const auto begun = std::chrono::steady_clock::now();
    const auto outcomes = RunRanks(
        ranks,
        [&](Rank& rank) {
          return body(rank, [&] {
            if (rank.number() == process) failed_at_end = About(process).failed;
          });
        },
        options);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begun;
    sweep.longest_s = std::max(sweep.longest_s, took.count());
    const std::string failed = About(process).failed;
    const std::string what = std::to_string(k) + ", " + failed;
    for (const Status& outcome : outcomes) {
      const bool wrong = !outcome && outcome.error().code == Errc::kMismatch;
      EXPECT_FALSE(wrong) << "wrong bytes after a failure of call " << what << ": "
                          << outcome.error().message;
    }
    const Status& mine = outcomes[static_cast<std::size_t>(process)];
    EXPECT_EQ(Count().All(), 0U) << "left after a failure of call " << what;
    EXPECT_EQ(Violations(), std::vector<std::string>()) << "after a failure of call " << what;
    if (failed.empty()) {
      EXPECT_TRUE(mine) << mine.error().message;
      break;
    }
    ++sweep.failed;
    ++sweep.functions[failed];
    if (!mine) ++sweep.told;
    if (mine && !failed_at_end.empty()) {
      EXPECT_TRUE(kUnheard.contains(failed_at_end)) << "nobody was told of call " << what;
    }
    if (testing::Test::HasFailure()) break;
  }
  std::cout << ranks << " ranks, rank " << process << ", "
            << (work                                ? "queued work"
                : cuda == cudaErrorECCUncorrectable ? "ECC"
                                                    : "no memory")
            << ": " << sweep.failed << " failures, " << sweep.told
            << " told as an error, others in destructors; longest " << sweep.longest_s << " s\n";
  return sweep;
}

TEST(CudaFaults, EveryCallFailsOnce) {
  std::map<std::string, std::uint64_t> functions;
  std::uint64_t failed = 0;
  for (const auto& [ranks, process] : {std::pair(1, 0), {2, 0}, {2, 1}, {4, 1}}) {
    for (const auto& [cuda, nccl] : {std::pair(cudaErrorMemoryAllocation, ncclSystemError),
                                     std::pair(cudaErrorECCUncorrectable, ncclRemoteError)}) {
      if (ranks == 4 && cuda == cudaErrorMemoryAllocation) continue;
      const Sweep sweep = SweepCalls(ranks, process, cuda, nccl, Load, false, {});
      for (const auto& [name, count] : sweep.functions) functions[name] += count;
      failed += sweep.failed;
      ASSERT_FALSE(HasFailure());
    }
  }
  // Processes that share a device.
  for (const int process : {0, 1}) {
    const Sweep sweep =
        SweepCalls(2, process, cudaErrorECCUncorrectable, ncclRemoteError, Lend, false, 0);
    for (const auto& [name, count] : sweep.functions) functions[name] += count;
    failed += sweep.failed;
  }
  std::cout << failed << " failures of " << functions.size() << " functions:";
  for (const auto& [name, count] : functions) std::cout << ' ' << name << ' ' << count;
  std::cout << '\n';
  // All functions that the cuda backend calls and that may fail.
  for (const char* const name : {"cudaEventCreateWithFlags",
                                 "cudaEventDestroy",
                                 "cudaEventQuery",
                                 "cudaEventRecord",
                                 "cudaFree",
                                 "cudaFreeHost",
                                 "cudaGetDeviceCount",
                                 "cudaGetDeviceProperties",
                                 "cudaHostAlloc",
                                 "cudaIpcCloseMemHandle",
                                 "cudaIpcGetMemHandle",
                                 "cudaIpcOpenMemHandle",
                                 "cudaMalloc",
                                 "cudaMemGetInfo",
                                 "cudaMemcpyAsync",
                                 "cudaPointerGetAttributes",
                                 "cudaSetDevice",
                                 "cudaStreamCreateWithFlags",
                                 "cudaStreamDestroy",
                                 "cudaStreamQuery",
                                 "ncclAllGather",
                                 "ncclBroadcast",
                                 "ncclCommDestroy",
                                 "ncclCommFinalize",
                                 "ncclCommGetAsyncError",
                                 "ncclCommInitRankConfig",
                                 "ncclGetUniqueId",
                                 "ncclGetVersion",
                                 "ncclGroupEnd",
                                 "ncclGroupStart"}) {
    EXPECT_GT(functions[name], 0U) << name << " never failed";
  }
}

TEST(CudaFaults, EveryCallOfACheckpointsLoadFailsOnce) {
  for (const auto& [ranks, process] : {std::pair(1, 0), {2, 0}, {4, 1}}) {
    const std::unique_ptr<HostLoad> host = LoadOnHost(ranks);
    const Body load = [&](Rank& rank, const std::function<void()>& at_end) -> Status {
      NullSink sink;
      SW_TRY(LoadOnDevice(rank, *host, sink));
      at_end();
      return {};
    };
    ASSERT_FALSE(HasFailure());
    const Sweep calls =
        SweepCalls(ranks, process, cudaErrorMemoryAllocation, ncclSystemError, load, false, {});
    ASSERT_FALSE(HasFailure());
    const Sweep works =
        SweepCalls(ranks, process, cudaErrorECCUncorrectable, ncclRemoteError, load, true, {});
    EXPECT_EQ(works.told, works.failed);
    EXPECT_GT(works.failed, 0U);
    EXPECT_GT(calls.told, 0U);
  }
}

TEST(CudaFaults, QueuedWorkFails) {
  for (const int ranks : {1, 2}) {
    const Sweep sweep =
        SweepCalls(ranks, ranks - 1, cudaErrorECCUncorrectable, ncclRemoteError, Load, true, {});
    EXPECT_EQ(sweep.told, sweep.failed);
    EXPECT_GT(sweep.failed, 0U);
  }
}

}  // namespace
}  // namespace shardwright::device::cuda
