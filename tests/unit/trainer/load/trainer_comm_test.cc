// SPDX-License-Identifier: Apache-2.0
#include "trainer/load/trainer_comm.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "support/comm/threads.h"

// Ranks that communicate through a C function, here over the threads' own Comm.

namespace shardwright::trainer {
namespace {

using comm::Bytes;

/// State of a rank, which is a thread. A C function has no other place for its state.
struct Mine {
  comm::Comm* comm = nullptr;
  Bytes received;
  std::vector<std::uint64_t> sizes;
  bool fails = false;
};
thread_local Mine mine;

int Swap(std::int32_t what, std::int32_t root, const void* sent, const std::uint64_t* sent_bytes,
         const void** received, const std::uint64_t** received_bytes) {
  if (mine.fails) return 1;
  const auto* at = static_cast<const std::byte*>(sent);
  std::vector<Bytes> got;
  const auto ranks = static_cast<std::size_t>(mine.comm->size());
  if (what == static_cast<std::int32_t>(Transport::kEachToEach)) {
    std::vector<Bytes> pieces(ranks);
    for (std::size_t i = 0; i < ranks; ++i) {
      pieces[i].assign(at, at + sent_bytes[i]);
      at += sent_bytes[i];
    }
    got = mine.comm->AllToAll(pieces).value();
  } else if (what == static_cast<std::int32_t>(Transport::kToAll)) {
    got = mine.comm->AllGather({at, at + sent_bytes[0]}).value();
  } else {
    Bytes bytes(at, at + sent_bytes[0]);
    if (!mine.comm->Bcast(bytes, root)) return 1;
    got = {std::move(bytes)};
  }
  mine.received.clear();
  mine.sizes.clear();
  for (const Bytes& one : got) {
    mine.received.insert(mine.received.end(), one.begin(), one.end());
    mine.sizes.push_back(one.size());
  }
  *received = mine.received.data();
  *received_bytes = mine.sizes.data();
  return 0;
}

Bytes Text(const std::string& text) {
  Bytes out(text.size());
  if (!text.empty()) std::memcpy(out.data(), text.data(), text.size());
  return out;
}

void ForRanks(int ranks, const std::function<Status(comm::Comm&)>& body) {
  const auto done = comm::RunThreads(ranks, [&](comm::Comm& below) -> Status {
    mine = {};
    mine.comm = &below;
    const auto comm = MakeTrainerComm(below.rank(), below.size(), Swap);
    return body(*comm);
  });
  for (const Status& status : done) EXPECT_TRUE(status.has_value()) << status.error().message;
}

TEST(TrainerCommTest, DoesWhatEveryCommDoes) {
  ForRanks(3, [](comm::Comm& comm) -> Status {
    const std::string me = std::to_string(comm.rank());
    SW_TRY(comm.Barrier());
    Bytes bytes = Text(comm.rank() == 1 ? "root" : "");
    SW_TRY(comm.Bcast(bytes, 1));
    EXPECT_EQ(bytes, Text("root"));
    SW_TRY_ASSIGN(const auto all,
                  comm.AllGather(Text(std::string(static_cast<std::size_t>(me[0] - '0'), 'x'))));
    EXPECT_EQ(all, (std::vector<Bytes>{Text(""), Text("x"), Text("xx")}));
    SW_TRY_ASSIGN(const auto root, comm.Gather(Text(me), 2));
    EXPECT_EQ(root.size(), comm.rank() == 2 ? 3U : 0U);
    SW_TRY_ASSIGN(const auto each, comm.AllToAll({Text(me + "to0"), Text(""), Text(me + "to2")}));
    const std::string end = comm.rank() == 1 ? "" : "to" + me;
    EXPECT_EQ(each[1], end.empty() ? Text("") : Text("1" + end));
    SW_TRY_ASSIGN(const std::uint64_t sum, comm.AllReduceSum(5));
    EXPECT_EQ(sum, 15U);
    SW_TRY_ASSIGN(const std::uint64_t most,
                  comm.AllReduceMax(static_cast<std::uint64_t>(comm.rank())));
    EXPECT_EQ(most, 2U);
    const Status failed = comm.Agree(comm.rank() == 1 ? Status(BadInput("broken")) : Status());
    EXPECT_FALSE(failed.has_value());
    EXPECT_EQ(failed.error().rank, 1);
    const std::vector<Bytes> pieces(3, Text("12345"));
    const std::vector<std::span<const std::byte>> spans(pieces.begin(), pieces.end());
    const auto capped = comm.AllToAll(std::span(spans), 10);
    EXPECT_FALSE(capped.has_value());
    EXPECT_EQ(capped.error().code, Errc::kLimit);
    return {};
  });
}

TEST(TrainerCommTest, AFailureStaysOne) {
  ForRanks(1, [](comm::Comm& comm) -> Status {
    mine.fails = true;
    EXPECT_EQ(comm.Barrier().error().code, Errc::kIo);
    mine.fails = false;
    EXPECT_FALSE(comm.Barrier().has_value()) << "the others may be anywhere";
    return {};
  });
}

}  // namespace
}  // namespace shardwright::trainer
