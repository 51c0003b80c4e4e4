// SPDX-License-Identifier: Apache-2.0
// Checkpoints loaded into device memory, with parts that ranks gather from each other, on real
// devices and on doubles.

#include <gtest/gtest.h>

#include <atomic>
#include <vector>

#include "load.h"
#include "machine.h"

namespace shardwright::device::cuda {
namespace {

class CudaLoadOf : public testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(Ranks, CudaLoadOf, testing::Values(1, 2, 4));

TEST_P(CudaLoadOf, HoldsTheBytesOfALoadOnTheHost) {
  const auto host = LoadOnHost(GetParam());
  ASSERT_FALSE(HasFailure());
  EXPECT_EQ(host->loaded[0].bytes_gathered > 0, GetParam() > 1);
  OnRanks(GetParam(), [&](Rank& rank) {
    NullSink sink;
    return LoadOnDevice(rank, *host, sink);
  });
}

/// Requests a stop after some units.
class StopAfter final : public NullSink {
 public:
  explicit StopAfter(int units) : left_(units) {}
  void Progress(std::uint64_t, std::uint64_t) override { --left_; }
  bool stop_requested() const override { return left_ <= 0; }

 private:
  std::atomic<int> left_;
};

// Copies of earlier units are still queued when a load stops. Their memory stays until they ended.
TEST_P(CudaLoadOf, AStoppedLoadFreesNoMemoryUnderItsCopies) {
  const auto host = LoadOnHost(GetParam());
  ASSERT_FALSE(HasFailure());
  for (const int units : {1, 2}) {
    OnRanks(GetParam(), [&](Rank& rank) -> Status {
      StopAfter sink(units);
      const Status stopped = LoadOnDevice(rank, *host, sink);
      EXPECT_FALSE(stopped);
      return stopped || stopped.error().code == Errc::kStopped ? Status() : stopped;
    });
  }
}

}  // namespace
}  // namespace shardwright::device::cuda
