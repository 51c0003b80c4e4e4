// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine/plan/plan.h"
#include "support/comm/comm.h"
#include "trainer/cache/staging.h"

// Units go through pinned memory to their final place.

namespace shardwright::cache {
namespace {

TEST(StagingTest, EveryUnitComesToItsPlaceFromManyThreads) {
  const auto comm = comm::MakeSerialComm();
  const auto device = device::OpenDevice(device::Kind::kHost, *comm).value();
  const auto stream = device->MakeStream().value();
  constexpr unsigned kThreads = 4;
  constexpr std::uint64_t kUnits = 64;
  constexpr std::uint64_t kStep = 1000;
  std::vector<std::byte> target(kUnits * kStep);
  const auto staging = Staging::Make(*device, *stream, kThreads, [&](const plan::Unit& unit) {
                         return target.data() + unit.first;
                       }).value();
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (std::uint64_t i = t; i < kUnits; i += kThreads) {
        const plan::Unit unit{0, 0, i * kStep, kStep - i};
        const auto slot = staging->Buffer(unit, unit.bytes).value();
        std::memset(slot.data(), static_cast<int>(i + 1), slot.size());
        ASSERT_TRUE(staging->Put({i, unit, slot}));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_TRUE(staging->Drain());
  for (std::uint64_t i = 0; i < kUnits; ++i) {
    EXPECT_EQ(target[i * kStep], static_cast<std::byte>(i + 1));
    EXPECT_EQ(target[i * kStep + kStep - i - 1], static_cast<std::byte>(i + 1));
    if (i > 0) {
      EXPECT_EQ(target[i * kStep + kStep - i], std::byte{0});
    }
  }
  EXPECT_EQ(Staging::Bytes(kThreads), 8 * plan::kUnitBytes);
  std::vector<std::byte> foreign(8);
  EXPECT_FALSE(staging->Put({0, {0, 0, 0, 8}, foreign}));
}

}  // namespace
}  // namespace shardwright::cache
