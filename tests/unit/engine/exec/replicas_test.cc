// SPDX-License-Identifier: Apache-2.0
// Replicas that must repeat their owner. Errors name the place of a difference, except in padding.

#include "engine/exec/replicas.h"

#include <gtest/gtest.h>

#include "memory_bytes.h"
#include "support/comm/threads.h"

namespace shardwright::exec {
namespace {

using plan::AsFloats;
using plan::Floats;
using plan::MapMaker;

/// A tensor of two columns, which each shard stores padded to three, over several blocks.
class Replicas : public testing::Test {
 protected:
  static constexpr std::uint64_t kRows = 250'000;  // 3 MB of fp32: three blocks of 1 MiB

  Replicas() {
    layout::LogicalTensor tensor{"w", "fp32", DType::kF32, {kRows, 2}, {}};
    const auto cut = layout::Cut::Make({kRows, 2}, {kRows, 3}, {{{0, 0}, {0, 0}, {kRows, 2}}});
    EXPECT_TRUE(cut.has_value());
    for (int holder = 0; holder < 2; ++holder) {
      const std::uint32_t array = source_.Array(DType::kF32, kRows * 3);
      tensor.fragments.push_back({MapMaker::Cut(*cut),
                                  {array},
                                  holder == 0 ? layout::Role::kOwner : layout::Role::kReplica});
    }
    source_.map.tensors.push_back(std::move(tensor));
    std::vector<float> values(kRows * 3);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
    members_ = {Floats(values), Floats(values)};
  }

  void Change(std::uint64_t row, std::uint64_t column) { members_[1][(row * 3 + column) * 4] ^= 1; }

  Status Compare(int ranks) {
    const auto answers = comm::RunThreads(ranks, [&](comm::Comm& comm) -> Status {
      MemoryBytes bytes(members_);
      Exchange exchange(comm, source_.map, bytes, {});
      NullSink sink;
      return CompareReplicas(comm, exchange, 2, 64 << 20, sink);
    });
    for (const Status& answer : answers) {
      EXPECT_EQ(answer.has_value(), answers[0].has_value()) << "ranks agree";
    }
    return answers[0];
  }

  MapMaker source_;
  std::vector<std::string> members_;
};

TEST_F(Replicas, ThatRepeatTheirOwnerPassAndPaddingIsNotLookedAt) {
  EXPECT_TRUE(Compare(1));
  for (const std::uint64_t row : {std::uint64_t{0}, kRows / 2, kRows - 1}) Change(row, 2);
  for (const int ranks : {1, 2, 3}) {
    const Status same = Compare(ranks);
    EXPECT_TRUE(same) << same.error().message;
  }
}

TEST_F(Replicas, ThatDifferAreNamedWhereverItIs) {
  for (const std::uint64_t row : {std::uint64_t{0}, kRows / 2, kRows - 1}) {
    for (const int ranks : {1, 2}) {
      Change(row, 1);
      const Status differ = Compare(ranks);
      ASSERT_FALSE(differ) << row;
      EXPECT_EQ(differ.error().code, Errc::kBadInput);
      EXPECT_NE(differ.error().message.find("tensor \"w\" fp32: replicas differ at element " +
                                            std::to_string(row * 2 + 1) + ": file0 and file1"),
                std::string::npos)
          << differ.error().message;
      Change(row, 1);
    }
  }
}

TEST_F(Replicas, ThatCannotBeReadAreNotTakenForEqual) {
  members_[1].resize(members_[1].size() / 2);
  EXPECT_FALSE(Compare(2));
}

}  // namespace
}  // namespace shardwright::exec
