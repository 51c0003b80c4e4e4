// SPDX-License-Identifier: Apache-2.0
// Ranks that each see one file exchange byte ranges: by messages, or in shared memory.

#include "engine/exec/exchange.h"

#include <gtest/gtest.h>

#include <array>
#include <numeric>

#include "memory_bytes.h"
#include "support/comm/threads.h"
#include "unit/engine/plan/small_maps.h"

namespace shardwright::exec {
namespace {

constexpr int kRanks = 3;
constexpr std::uint64_t kElems = 4096;
constexpr std::uint64_t kBytes = kElems * 4;

/// Parameter: true if memory is shared.
class Exchanges : public testing::TestWithParam<bool> {
 protected:
  Exchanges() {
    for (int rank = 0; rank < kRanks; ++rank) {
      maker_.Array(DType::kF32, kElems);
      std::string& file = files_.emplace_back(kBytes, '\0');
      std::iota(file.begin(), file.end(), static_cast<char>(17 * rank));
    }
    std::iota(owners_.begin(), owners_.end(), 0);
  }

  /// Runs `work` on each rank. Returns the results by rank.
  template <class Work>
  std::vector<Status> Go(Work work) {
    return comm::RunThreads(kRanks, [&](comm::Comm& comm) -> Status {
      std::vector<std::string> own(kRanks);
      own[static_cast<std::size_t>(comm.rank())] = files_[static_cast<std::size_t>(comm.rank())];
      MemoryBytes local(std::move(own));
      Exchange exchange(comm, maker_.map, local, {owners_.begin(), owners_.end()});
      if (GetParam()) SW_TRY(exchange.ShareMemory(1 << 20, kBytes));
      return work(comm, exchange, local);
    });
  }

  Status Expect(Exchange& exchange, const ByteRange& stretch) const {
    std::string found(stretch.bytes, '?');
    SW_TRY(exchange.Read(stretch.member, stretch.offset, std::as_writable_bytes(std::span(found))));
    EXPECT_EQ(found, files_[stretch.member].substr(stretch.offset, stretch.bytes));
    return {};
  }

  plan::MapMaker maker_;
  std::vector<std::string> files_;
  std::array<int, kRanks> owners_ = {};
};

INSTANTIATE_TEST_SUITE_P(, Exchanges, testing::Bool(),
                         [](const auto& one) { return one.param ? "shared" : "sent"; });

// A round overwrites the bytes of the one before. Ranks ask for the same, for nothing or for parts.
TEST_P(Exchanges, GiveWhatWasAskedFor) {
  const std::vector<Status> done =
      Go([&](comm::Comm& comm, Exchange& exchange, MemoryBytes& local) -> Status {
        for (std::uint64_t round = 0; round < 20; ++round) {
          std::vector<ByteRange> wanted;
          for (std::uint32_t member = 0; member < kRanks; ++member) {
            const auto rank = static_cast<std::uint64_t>(comm.rank());
            if (round % 4 == 3 && rank == 1) continue;
            const std::uint64_t first = round % 2 == 0 ? 64 * round : 100 * rank + round;
            wanted.push_back({member, first, 500 + 8 * round});
          }
          SW_TRY(exchange.Round(wanted));
          Status all;
          for (const ByteRange& stretch : wanted) {
            if (all) all = Expect(exchange, stretch);
          }
          SW_TRY(comm.Agree(std::move(all)));
        }
        // In every second round all ranks want the same, which is read once.
        EXPECT_LT(local.bytes_read(), 20 * 3 * 660U);
        return {};
      });
  for (const Status& one : done) EXPECT_TRUE(one) << one.error().message;
}

// The file that contains a member does not matter then.
TEST_P(Exchanges, ReadWhatTheyWereGiven) {
  const std::vector<Status> done = comm::RunThreads(kRanks, [&](comm::Comm& comm) -> Status {
    MemoryBytes local(files_);
    Exchange exchange(comm, maker_.map, local, {});
    EXPECT_FALSE(exchange.sends());
    exchange.ReadBy({1, 1, 0});
    EXPECT_TRUE(exchange.sends());
    if (GetParam()) SW_TRY(exchange.ShareMemory(1 << 20, kBytes));
    const std::vector<ByteRange> wanted = {{0, 0, 640}, {1, 64, 640}, {2, 128, 640}};
    SW_TRY(exchange.Round(wanted));
    Status all;
    for (const ByteRange& stretch : wanted) {
      if (all) all = Expect(exchange, stretch);
    }
    const std::array<std::uint64_t, kRanks> read = {640, 1280, 0};
    const auto rank = static_cast<std::size_t>(comm.rank());
    EXPECT_EQ(local.bytes_read(), read[rank]);
    for (std::uint32_t member = 0; member < kRanks; ++member) {
      EXPECT_EQ(exchange.Mine(member), comm.rank() == (member == 2 ? 0 : 1));
    }
    return comm.Agree(std::move(all));
  });
  for (const Status& one : done) EXPECT_TRUE(one) << one.error().message;
}

TEST_P(Exchanges, FailOnAllRanksWhereOneCannotRead) {
  const std::vector<Status> done =
      Go([&](comm::Comm& comm, Exchange& exchange, MemoryBytes& local) -> Status {
        if (comm.rank() == 2) local.members()[2].resize(100);
        const std::vector<ByteRange> wanted = {{0, 0, 64}, {2, 64, 64}};
        return exchange.Round(wanted);
      });
  for (const Status& one : done) {
    ASSERT_FALSE(one);
    EXPECT_EQ(one.error().code, Errc::kBadInput);
  }
}

}  // namespace
}  // namespace shardwright::exec
