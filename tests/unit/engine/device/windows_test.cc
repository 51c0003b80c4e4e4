// SPDX-License-Identifier: Apache-2.0
#include "engine/device/windows.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "support/comm/threads.h"

namespace shardwright::device {
namespace {

void Put(std::span<std::byte> to, const std::string& text) {
  std::memcpy(to.data(), text.data(), text.size());
}

std::string Text(std::span<const std::byte> from, std::size_t count) {
  return {reinterpret_cast<const char*>(from.data()), count};
}

TEST(WindowsTest, RanksSeeWhatTheOthersPutThere) {
  const auto done = comm::RunThreads(3, [](comm::Comm& comm) -> Status {
    const auto bytes = static_cast<std::uint64_t>(comm.rank()) * 10'000;
    SW_TRY_ASSIGN(const std::unique_ptr<Windows> windows, Windows::Open(comm, bytes));
    EXPECT_NE(windows, nullptr);
    if (windows == nullptr) return {};
    EXPECT_GE(windows->mine().size(), bytes);
    Put(windows->mine(), "of " + std::to_string(comm.rank()));
    SW_TRY(comm.Barrier());
    for (int rank = 0; rank < comm.size(); ++rank) {
      EXPECT_EQ(Text(windows->of(rank), 4), "of " + std::to_string(rank));
      EXPECT_GE(windows->of(rank).size(), static_cast<std::uint64_t>(rank) * 10'000);
    }
    return comm.Barrier();
  });
  for (const Status& status : done) EXPECT_TRUE(status.has_value()) << status.error().message;
}

TEST(WindowsTest, NobodyHasThemWhereOneHasNoMemory) {
  const auto done = comm::RunThreads(2, [](comm::Comm& comm) -> Status {
    constexpr std::uint64_t kTooMuch = std::uint64_t{1} << 60;
    SW_TRY_ASSIGN(const std::unique_ptr<Windows> windows,
                  Windows::Open(comm, comm.rank() == 1 ? kTooMuch : 1));
    EXPECT_EQ(windows, nullptr);
    return comm.Barrier();
  });
  for (const Status& status : done) EXPECT_TRUE(status.has_value()) << status.error().message;
}

}  // namespace
}  // namespace shardwright::device
