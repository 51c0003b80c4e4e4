// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/device/device.h"
#include "engine/tensor/convert.h"
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

TEST(CollectiveTest, BroadcastFromEveryRoot) {
  OnAll([](Ranks& r) -> Status {
    // All groups have equally many in a call: the least size of a group is 1.
    for (int root = 0; root < r.comm.size(); ++root) {
      const int in_group = root % r.all->size();
      auto data = BytesOf(r.comm.rank(), 777);
      SW_TRY(r.all->Broadcast(*r.stream, data.data(), data.size(), in_group));
      SW_TRY(Want(data == BytesOf(r.global(in_group), 777), "broadcast"));
    }
    return {};
  });
}

TEST(CollectiveTest, ExchangeOfDifferentSizesAndOfNothing) {
  OnAll([](Ranks& r) -> Status {
    const auto size = [](int from, int to) {
      return std::uint64_t{7} * static_cast<unsigned>(from) * static_cast<unsigned>(to);
    };
    std::vector<std::vector<std::byte>> out;
    std::vector<std::vector<std::byte>> in;
    std::vector<std::span<const std::byte>> from;
    std::vector<std::span<std::byte>> to;
    for (int m = 0; m < r.all->size(); ++m) {
      out.push_back(BytesOf(r.comm.rank(), size(r.comm.rank(), r.global(m))));
      in.emplace_back(size(r.global(m), r.comm.rank()));
    }
    from.reserve(out.size());
    to.reserve(in.size());
    for (const auto& one : out) from.emplace_back(one);
    for (auto& one : in) to.emplace_back(one);
    SW_TRY(r.all->Exchange(*r.stream, from, to));
    for (int m = 0; m < r.all->size(); ++m) {
      const auto& got = in[static_cast<std::size_t>(m)];
      SW_TRY(Want(got == BytesOf(r.global(m), got.size()), "exchange"));
    }
    return {};
  });
}

TEST(CollectiveTest, SumsAreRoundedOnce) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16}) {
    OnAll([dtype](Ranks& r) -> Status {
      const auto size = static_cast<std::uint64_t>(r.all->size());
      constexpr std::uint64_t kElems = 5;
      const auto value = [](int rank, std::uint64_t i) {
        return 0.1F * static_cast<float>(rank + 1) + static_cast<float>(i) * 3.0F;
      };
      const auto stored = [&](const std::vector<float>& values) {
        std::vector<std::byte> out(values.size() * ItemSize(dtype));
        Convert(DType::kF32, std::as_bytes(std::span(values)), dtype, out);
        return out;
      };
      const auto read = [&](const std::vector<std::byte>& bytes) {
        std::vector<double> out(bytes.size() / ItemSize(dtype));
        Convert(dtype, bytes, DType::kF64, std::as_writable_bytes(std::span(out)));
        return out;
      };
      const auto given = [&](int rank) {
        std::vector<float> values;
        for (std::uint64_t i = 0; i < kElems * size; ++i) values.push_back(value(rank, i));
        return stored(values);
      };
      const auto from = given(r.comm.rank());
      std::vector<std::byte> to(kElems * ItemSize(dtype));
      SW_TRY(r.all->ReduceScatter(*r.stream, to.data(), from.data(), kElems, dtype));
      std::vector<float> floats(kElems);
      std::vector<double> doubles(kElems);
      for (int m = 0; m < r.all->size(); ++m) {
        const auto theirs = read(given(r.global(m)));
        for (std::uint64_t i = 0; i < kElems; ++i) {
          const double one = theirs[static_cast<std::uint64_t>(r.all->rank()) * kElems + i];
          floats[i] += static_cast<float>(one);
          doubles[i] += one;
        }
      }
      std::vector<std::byte> want(to.size());
      if (dtype == DType::kF64) {
        std::memcpy(want.data(), doubles.data(), want.size());
      } else {
        want = stored(floats);
      }
      return Want(to == want, "reduce-scatter of " + std::string(Name(dtype)));
    });
  }
}

TEST(CollectiveTest, SizesThatDisagreeAreToldOnTheRankThatSeesIt) {
  const std::vector<Status> done = comm::RunThreads(2, [](comm::Comm& comm) -> Status {
    SW_TRY_ASSIGN(const auto device, OpenDevice(Kind::kHost, comm));
    SW_TRY_ASSIGN(const auto stream, device->MakeStream());
    SW_TRY_ASSIGN(const auto all, device->MakeCollective(comm, std::vector<int>{0, 0}));
    std::vector<std::byte> data(100);
    return all->Broadcast(*stream, data.data(), comm.rank() == 0 ? 90 : 100, 0);
  });
  EXPECT_TRUE(done[0].has_value());
  ASSERT_FALSE(done[1].has_value());
  EXPECT_NE(done[1].error().message.find("sends 90 bytes, 100 are expected"), std::string::npos)
      << done[1].error().message;
}

TEST(CollectiveTest, AbortFreesThoseWhoWait) {
  for (const int ranks : {2, 4}) {
    const std::vector<Status> done = comm::RunThreads(ranks, [&](comm::Comm& comm) -> Status {
      SW_TRY_ASSIGN(const auto device, OpenDevice(Kind::kHost, comm));
      SW_TRY_ASSIGN(const auto stream, device->MakeStream());
      SW_TRY_ASSIGN(const auto all, device->MakeCollective(
                                        comm, std::vector<int>(static_cast<std::size_t>(ranks))));
      std::byte data{};
      SW_TRY(all->Broadcast(*stream, &data, 1, 0));
      if (comm.rank() == 1) all->Abort();
      const Status failed = all->Broadcast(*stream, &data, 1, 0);
      const Status again = all->Broadcast(*stream, &data, 1, 0);
      SW_TRY(Want(!failed && !again, "calls after an abort have to fail"));
      SW_TRY(Want(failed.error().code == Errc::kIo, failed.error().message));
      return comm.Agree({});  // the ranks are in step
    });
    for (const Status& status : done) EXPECT_TRUE(status.has_value()) << status.error().message;
  }
}

}  // namespace
}  // namespace shardwright::device
