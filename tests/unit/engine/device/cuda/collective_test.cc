// SPDX-License-Identifier: Apache-2.0
// Collectives of the cuda backend over NCCL, on real devices and on doubles.

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
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

TEST_P(CudaCollectiveOf, BroadcastsOfEachRoot) {
  OnRanks(GetParam(), [](Rank& rank) -> Status {
    SW_TRY_ASSIGN(const auto stream, rank.device.MakeStream());
    SW_TRY_ASSIGN(const auto all, rank.device.MakeCollective(rank.comm, OneGroup(rank)));
    SW_TRY_ASSIGN(const auto data, rank.device.Allocate(Place::kDevice, 9999));
    for (int root = 0; root < all->size(); ++root) {
      const auto number = static_cast<std::uint64_t>(all->rank());
      SW_TRY(Write(rank.device, *stream, data->data(), Pattern(9999, number)));
      SW_TRY(all->Broadcast(*stream, data->data(), 9999, root));
      SW_TRY_ASSIGN(const auto found, Read(rank.device, *stream, data->data(), 9999));
      SW_TRY(Same(Pattern(9999, static_cast<std::uint64_t>(root)), found, "broadcast"));
    }
    EXPECT_FALSE(all->Broadcast(*stream, data->data(), 1, all->size()));
    return {};
  });
}

// Returns the number of bytes that rank a sends to rank b.
std::uint64_t Sent(int a, int b) {
  return (a + b) % 3 == 0 ? 0 : 1000 + static_cast<std::uint64_t>(a * 10 + b);
}

TEST_P(CudaCollectiveOf, ExchangesAllAtOnce) {
  OnRanks(GetParam(), [](Rank& rank) -> Status {
    SW_TRY_ASSIGN(const auto stream, rank.device.MakeStream());
    SW_TRY_ASSIGN(const auto all, rank.device.MakeCollective(rank.comm, OneGroup(rank)));
    SW_TRY_ASSIGN(const auto out, rank.device.Allocate(Place::kDevice, 1 << 14));
    SW_TRY_ASSIGN(const auto in, rank.device.Allocate(Place::kDevice, 1 << 14));
    for (std::uint64_t round = 0; round < 3; ++round) {
      std::vector<std::span<const std::byte>> sent;
      std::vector<std::span<std::byte>> got;
      std::vector<std::byte> expected;
      std::uint64_t at_out = 0;
      std::uint64_t at_in = 0;
      const int mine = all->rank();
      for (int r = 0; r < all->size(); ++r) {
        const auto part =
            Pattern(Sent(mine, r), round * 100 + static_cast<unsigned>(mine * 10 + r));
        SW_TRY(Write(rank.device, *stream, out->data() + at_out, part));
        sent.emplace_back(out->data() + at_out, part.size());
        at_out += part.size();
        const auto theirs =
            Pattern(Sent(r, mine), round * 100 + static_cast<unsigned>(r * 10 + mine));
        got.emplace_back(in->data() + at_in, theirs.size());
        at_in += theirs.size();
        expected.insert(expected.end(), theirs.begin(), theirs.end());
      }
      SW_TRY(all->Exchange(*stream, sent, got));
      SW_TRY_ASSIGN(const auto found, Read(rank.device, *stream, in->data(), expected.size()));
      SW_TRY(Same(expected, found, "exchange"));
    }
    return {};
  });
}

TEST_P(CudaCollectiveOf, SumsAndScatters) {
  OnRanks(GetParam(), [](Rank& rank) -> Status {
    SW_TRY_ASSIGN(const auto stream, rank.device.MakeStream());
    SW_TRY_ASSIGN(const auto all, rank.device.MakeCollective(rank.comm, OneGroup(rank)));
    constexpr std::uint64_t kElems = 600;
    const std::uint64_t whole = kElems * Size(*all);
    std::vector<float> mine(whole);
    for (std::uint64_t i = 0; i < whole; ++i) {
      mine[i] = static_cast<float>(i % 97) + static_cast<float>(all->rank());
    }
    SW_TRY_ASSIGN(const auto from, rank.device.Allocate(Place::kDevice, whole * 4));
    SW_TRY_ASSIGN(const auto to, rank.device.Allocate(Place::kDevice, kElems * 4));
    SW_TRY(Write(rank.device, *stream, from->data(), std::as_bytes(std::span(mine))));
    SW_TRY(all->ReduceScatter(*stream, to->data(), from->data(), kElems, DType::kF32));
    std::vector<float> expected(kElems);
    const int ranks = all->size();
    const int sum_of_ranks = ranks * (ranks - 1) / 2;
    for (std::uint64_t i = 0; i < kElems; ++i) {
      const std::uint64_t at = static_cast<std::uint64_t>(all->rank()) * kElems + i;
      expected[i] = static_cast<float>(ranks) * static_cast<float>(at % 97) +
                    static_cast<float>(sum_of_ranks);
    }
    SW_TRY_ASSIGN(const auto found, Read(rank.device, *stream, to->data(), kElems * 4));
    SW_TRY(Same(std::as_bytes(std::span(expected)), found, "sums"));
    EXPECT_FALSE(all->ReduceScatter(*stream, to->data(), from->data(), 1, DType::kI64));
    // A type of 16 bits: 1.0 of each.
    std::vector<std::uint16_t> ones(whole, 0x3F80);
    SW_TRY(Write(rank.device, *stream, from->data(), std::as_bytes(std::span(ones))));
    SW_TRY(all->ReduceScatter(*stream, to->data(), from->data(), kElems, DType::kBF16));
    const std::uint16_t sum = ranks == 1 ? 0x3F80 : ranks == 2 ? 0x4000 : 0x4080;
    const std::vector<std::uint16_t> sums(kElems, sum);
    SW_TRY_ASSIGN(const auto halves, Read(rank.device, *stream, to->data(), kElems * 2));
    return Same(std::as_bytes(std::span(sums)), halves, "sums of bfloat16");
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

TEST(CudaCollective, AnAbortedOneSaysSo) {
  OnRanks(1, [](Rank& rank) -> Status {
    SW_TRY_ASSIGN(const auto stream, rank.device.MakeStream());
    SW_TRY_ASSIGN(const auto all, rank.device.MakeCollective(rank.comm, OneGroup(rank)));
    SW_TRY_ASSIGN(const auto data, rank.device.Allocate(Place::kDevice, 100));
    all->Abort();
    EXPECT_FALSE(all->Broadcast(*stream, data->data(), 100, 0));
    const std::vector<std::uint64_t> part = {50};
    EXPECT_FALSE(all->AllGather(*stream, data->data(), data->data() + 50, part));
    return {};
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
