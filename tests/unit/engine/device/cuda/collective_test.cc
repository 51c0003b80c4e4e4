// SPDX-License-Identifier: Apache-2.0
// Collectives of the cuda backend over NCCL, on real devices and on doubles.

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "engine/device/device.h"
#include "machine.h"

namespace shardwright::device::cuda {
namespace {

class CudaCollectiveOf : public testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(Ranks, CudaCollectiveOf, testing::Values(1, 2, 4));

std::vector<int> OneGroup(const Rank& rank) {
  return std::vector<int>(static_cast<std::size_t>(rank.ranks()), 0);
}

std::size_t Size(const Collective& collective) {
  return static_cast<std::size_t>(collective.size());
}

TEST_P(CudaCollectiveOf, AllGathersUnevenParts) {
  OnRanks(GetParam(), [](Rank& rank) -> Status {
    SW_TRY_ASSIGN(const auto stream, rank.device.MakeStream());
    SW_TRY_ASSIGN(const auto all, rank.device.MakeCollective(rank.comm, OneGroup(rank)));
    EXPECT_EQ(all->rank(), rank.number());
    EXPECT_EQ(all->size(), rank.ranks());
    for (const std::uint64_t step : {0ULL, 1ULL, 1000ULL}) {
      for (const bool in_place : {false, true}) {
        std::vector<std::uint64_t> bytes(Size(*all));
        std::vector<std::byte> expected;
        std::uint64_t before = 0;
        for (std::size_t r = 0; r < bytes.size(); ++r) {
          bytes[r] = step == 1 && r == 0 ? 0 : 5000 + step * r;
          const auto part = Pattern(bytes[r], r + step);
          if (static_cast<int>(r) == all->rank()) before = expected.size();
          expected.insert(expected.end(), part.begin(), part.end());
        }
        if (expected.empty()) continue;
        const std::uint64_t own = bytes[static_cast<std::size_t>(all->rank())];
        SW_TRY_ASSIGN(const auto to, rank.device.Allocate(Place::kDevice, expected.size()));
        SW_TRY_ASSIGN(const auto from, rank.device.Allocate(Place::kDevice, own + 1));
        std::byte* const source = in_place ? to->data() + before : from->data();
        SW_TRY(Write(rank.device, *stream, source,
                     Pattern(own, static_cast<std::uint64_t>(all->rank()) + step)));
        SW_TRY(all->AllGather(*stream, to->data(), source, bytes));
        SW_TRY_ASSIGN(const auto found, Read(rank.device, *stream, to->data(), expected.size()));
        SW_TRY(Same(expected, found, "all-gather, step " + std::to_string(step)));
      }
    }
    return {};
  });
}

// Two groups, one of every other rank; a collective behind a copy, and a copy behind it.
TEST(CudaCollective, GroupsKeepApart) {
  OnRanks(4, [](Rank& rank) -> Status {
    SW_TRY_ASSIGN(const auto stream, rank.device.MakeStream());
    const std::vector<int> groups = {7, 3, 7, 3};
    SW_TRY_ASSIGN(const auto some, rank.device.MakeCollective(rank.comm, groups));
    EXPECT_EQ(some->size(), 2);
    EXPECT_EQ(some->rank(), rank.number() / 2);
    constexpr std::uint64_t kBytes = 3000;
    SW_TRY_ASSIGN(const auto pinned, rank.device.Allocate(Place::kPinned, kBytes));
    SW_TRY_ASSIGN(const auto back, rank.device.Allocate(Place::kPinned, 2 * kBytes));
    SW_TRY_ASSIGN(const auto own, rank.device.Allocate(Place::kDevice, kBytes));
    SW_TRY_ASSIGN(const auto both, rank.device.Allocate(Place::kDevice, 2 * kBytes));
    const auto number = static_cast<std::uint64_t>(rank.number());
    const auto bytes = Pattern(kBytes, number);
    std::memcpy(pinned->data(), bytes.data(), kBytes);
    SW_TRY(stream->Copy(own->data(), pinned->data(), kBytes));
    const std::vector<std::uint64_t> parts = {kBytes, kBytes};
    SW_TRY(some->AllGather(*stream, both->data(), own->data(), parts));
    SW_TRY(stream->Copy(back->data(), both->data(), 2 * kBytes));
    SW_TRY(stream->Synchronize());
    auto expected = Pattern(kBytes, number % 2);
    const auto second = Pattern(kBytes, number % 2 + 2);
    expected.insert(expected.end(), second.begin(), second.end());
    return Same(expected, {back->data(), 2 * kBytes}, "a group");
  });
}

TEST(CudaCollective, WrongSizesAreRefused) {
  OnRanks(2, [](Rank& rank) -> Status {
    const std::vector<int> short_one = {0};
    const auto none = rank.device.MakeCollective(rank.comm, short_one);
    EXPECT_FALSE(none);
    SW_TRY_ASSIGN(const auto stream, rank.device.MakeStream());
    SW_TRY_ASSIGN(const auto all, rank.device.MakeCollective(rank.comm, OneGroup(rank)));
    const std::vector<std::uint64_t> parts = {1, 2, 3};
    EXPECT_FALSE(all->AllGather(*stream, nullptr, nullptr, parts));
    return {};
  });
}

}  // namespace
}  // namespace shardwright::device::cuda
