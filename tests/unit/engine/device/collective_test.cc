// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/device/device.h"
#include "support/comm/threads.h"

// Collectives of the host backend on ranks that are threads.

namespace shardwright::device {
namespace {

std::vector<std::byte> BytesOf(int rank, std::uint64_t count) {
  std::vector<std::byte> out(count);
  for (std::uint64_t i = 0; i < count; ++i) {
    out[i] = static_cast<std::byte>(static_cast<std::uint64_t>(rank) * 50 + i);
  }
  return out;
}

Status Want(bool good, const std::string& what) {
  return good ? Status() : Status(Fail(Errc::kInternal, what));
}

/// The ranks of a test, in groups by rank % groups.
struct Ranks {
  comm::Comm& comm;
  std::unique_ptr<Device> device;
  std::unique_ptr<Stream> stream;
  std::unique_ptr<Collective> all;
  std::vector<int> members;  // of this rank's group

  int global(int member) const { return members[static_cast<std::size_t>(member)]; }
};

void OnRanks(int ranks, int groups, const std::function<Status(Ranks&)>& body) {
  SCOPED_TRACE(std::to_string(ranks) + " ranks, " + std::to_string(groups) + " groups");
  const std::vector<Status> done = comm::RunThreads(ranks, [&](comm::Comm& comm) -> Status {
    SW_TRY_ASSIGN(std::unique_ptr<Device> device, OpenDevice(Kind::kHost, comm));
    SW_TRY_ASSIGN(std::unique_ptr<Stream> stream, device->MakeStream());
    std::vector<int> group;
    std::vector<int> members;
    for (int r = 0; r < ranks; ++r) {
      group.push_back(10 + r % groups);
      if (r % groups == comm.rank() % groups) members.push_back(r);
    }
    SW_TRY_ASSIGN(std::unique_ptr<Collective> all, device->MakeCollective(comm, group));
    SW_TRY(Want(all->size() == static_cast<int>(members.size()), "size"));
    SW_TRY(Want(members[static_cast<std::size_t>(all->rank())] == comm.rank(), "rank"));
    Ranks mine{comm, std::move(device), std::move(stream), std::move(all), std::move(members)};
    return body(mine);
  });
  for (const Status& status : done) EXPECT_TRUE(status.has_value()) << status.error().message;
}

void OnAll(const std::function<Status(Ranks&)>& body) {
  for (const int ranks : {1, 2, 4}) {
    for (const int groups : {1, 2, 3}) {
      if (groups <= ranks) OnRanks(ranks, groups, body);
    }
  }
}

TEST(CollectiveTest, AllGatherOfUnevenPartsAlsoInPlace) {
  OnAll([](Ranks& r) -> Status {
    std::vector<std::uint64_t> bytes;
    std::vector<std::byte> want;
    std::uint64_t mine_at = 0;
    for (int m = 0; m < r.all->size(); ++m) {
      bytes.push_back(static_cast<std::uint64_t>(r.global(m)) * 3000);  // rank 0 has nothing
      if (m == r.all->rank()) mine_at = want.size();
      const auto part = BytesOf(r.global(m), bytes.back());
      want.insert(want.end(), part.begin(), part.end());
    }
    const auto mine = BytesOf(r.comm.rank(), bytes[static_cast<std::size_t>(r.all->rank())]);
    std::vector<std::byte> to(want.size());
    SW_TRY(r.all->AllGather(*r.stream, to.data(), mine.data(), bytes));
    SW_TRY(Want(to == want, "all-gather"));
    std::fill(to.begin(), to.end(), std::byte{0});
    std::copy(mine.begin(), mine.end(), to.begin() + static_cast<std::ptrdiff_t>(mine_at));
    SW_TRY(r.all->AllGather(*r.stream, to.data(), to.data() + mine_at, bytes));
    return Want(to == want, "all-gather in place");
  });
}

TEST(CollectiveTest, SizesThatDisagreeAreToldOnTheRankThatSeesIt) {
  const std::vector<Status> done = comm::RunThreads(2, [](comm::Comm& comm) -> Status {
    SW_TRY_ASSIGN(const auto device, OpenDevice(Kind::kHost, comm));
    SW_TRY_ASSIGN(const auto stream, device->MakeStream());
    SW_TRY_ASSIGN(const auto all, device->MakeCollective(comm, std::vector<int>{0, 0}));
    std::vector<std::byte> data(200);
    const std::vector<std::uint64_t> bytes{comm.rank() == 0 ? 90U : 100U, 100};
    return all->AllGather(*stream, data.data(), data.data() + 100, bytes);
  });
  EXPECT_TRUE(done[0].has_value());
  ASSERT_FALSE(done[1].has_value());
  EXPECT_NE(done[1].error().message.find("sends 90 bytes, 100 are expected"), std::string::npos)
      << done[1].error().message;
}

}  // namespace
}  // namespace shardwright::device
