// SPDX-License-Identifier: Apache-2.0
#include "support/comm/comm.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <limits>

#include "collectives.h"
#include "support/comm/threads.h"

namespace shardwright::comm {
namespace {

void ExpectAllOk(const std::vector<Status>& outcomes) {
  for (std::size_t r = 0; r < outcomes.size(); ++r) {
    EXPECT_TRUE(outcomes[r]) << "rank " << r << ": " << outcomes[r].error().message;
  }
}

TEST(CommTest, SerialPassesTheSameChecksAsManyRanks) {
  const auto comm = MakeSerialComm();
  const Status status = CheckCollectives(*comm);
  EXPECT_TRUE(status) << status.error().message;
}

TEST(CommTest, ThreadsPassTheSameChecks) {
  for (const int ranks : {1, 2, 3, 4, 8}) {
    ExpectAllOk(RunThreads(ranks, [](Comm& comm) { return CheckCollectives(comm); }));
  }
}

TEST(CommTest, AReceiveCapFailsOnAllRanks) {
  const auto serial = MakeSerialComm();
  const Status capped = CheckReceiveCap(*serial);
  EXPECT_TRUE(capped) << capped.error().message;
  for (const int ranks : {1, 2, 4}) {
    const auto outcomes = RunThreads(ranks, [](Comm& comm) { return CheckReceiveCap(comm); });
    ExpectAllOk(outcomes);
  }
}

TEST(CommTest, MisuseIsAnErrorOnAllRanks) {
  ExpectAllOk(RunThreads(3, [](Comm& comm) { return CheckMisuse(comm); }));
  const auto serial = MakeSerialComm();
  EXPECT_TRUE(CheckMisuse(*serial));
}

TEST(CommTest, RanksInDifferentCollectivesDoNotWaitForEver) {
  const auto outcomes = RunThreads(3, [](Comm& comm) -> Status {
    if (comm.rank() == 1) {
      SW_TRY(comm.AllReduceSum(1));
      return {};
    }
    return comm.Barrier();
  });
  for (const Status& outcome : outcomes) EXPECT_EQ(outcome.error().code, Errc::kInternal);
}

TEST(CommTest, ARankThatLeavesDoesNotKeepOthersWaiting) {
  const auto outcomes = RunThreads(3, [](Comm& comm) -> Status {
    if (comm.rank() == 2) return {};
    SW_TRY(comm.Barrier());
    return comm.Barrier();
  });
  EXPECT_EQ(outcomes[0].error().code, Errc::kInternal);
  EXPECT_EQ(outcomes[1].error().code, Errc::kInternal);
  EXPECT_TRUE(outcomes[2]);
}

class LauncherTest : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const char* const name : kNames) ::unsetenv(name);
  }
  void TearDown() override { SetUp(); }

  static constexpr const char* kNames[] = {"OMPI_COMM_WORLD_SIZE",
                                           "PMI_SIZE",
                                           "PMI_RANK",
                                           "PMIX_RANK",
                                           "SLURM_PROCID",
                                           "SLURM_MPI_TYPE",
                                           "SLURM_STEP_NUM_TASKS",
                                           "PMIX_NAMESPACE",
                                           "SHARDWRIGHT_MPI"};
};

TEST_F(LauncherTest, NoLauncherMeansSerialWithoutMpi) {
  EXPECT_FALSE(UnderLauncher());
  const auto comm = MakeComm();
  ASSERT_TRUE(comm);
  EXPECT_EQ((*comm)->size(), 1);
  EXPECT_TRUE(MakeComm());  // MPI would start only once
}

TEST_F(LauncherTest, EveryLauncherIsSeen) {
  const auto seen = [&](std::initializer_list<std::pair<const char*, const char*>> variables) {
    SetUp();
    for (const auto& [name, value] : variables) ::setenv(name, value, 1);
    return UnderLauncher();
  };
  EXPECT_TRUE(seen({{"OMPI_COMM_WORLD_SIZE", "4"}}));
  EXPECT_FALSE(seen({{"OMPI_COMM_WORLD_SIZE", "1"}, {"PMIX_RANK", "0"}}));
  EXPECT_TRUE(seen({{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}}));
  EXPECT_FALSE(seen({{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}}));
  EXPECT_TRUE(seen({{"PMIX_RANK", "0"}}));
  EXPECT_FALSE(seen({{"SLURM_PROCID", "0"}}));  // srun in a batch script, or salloc's shell
  EXPECT_FALSE(seen({{"SLURM_PROCID", "0"}, {"SLURM_MPI_TYPE", "none"}}));
  EXPECT_TRUE(seen({{"SLURM_PROCID", "0"}, {"SLURM_MPI_TYPE", "pmix"}}));
  EXPECT_FALSE(seen({{"SLURM_MPI_TYPE", "pmix"},
                     {"SLURM_PROCID", "0"},
                     {"SLURM_STEP_NUM_TASKS", "1"},
                     {"PMIX_RANK", "0"},
                     {"PMIX_NAMESPACE", "slurm.pmix.7.0"}}));
  EXPECT_TRUE(seen(
      {{"SLURM_STEP_NUM_TASKS", "1"}, {"PMIX_RANK", "0"}, {"PMIX_NAMESPACE", "prterun-n1-77@1"}}))
      << "ranks that another launcher has started within a step of one task";
  EXPECT_FALSE(seen({{"OMPI_COMM_WORLD_SIZE", "4"}, {"SHARDWRIGHT_MPI", "none"}}));
}

TEST_F(LauncherTest, TasksThatDoNotMeetAreCounted) {
  EXPECT_EQ(TasksApart(), 1U);
  ::setenv("SLURM_PROCID", "1", 1);
  EXPECT_EQ(TasksApart(), 1U) << "the shell of a batch script";
  ::setenv("SLURM_STEP_NUM_TASKS", "4", 1);
  EXPECT_EQ(TasksApart(), 4U);
  ::setenv("SHARDWRIGHT_MPI", "none", 1);
  EXPECT_EQ(TasksApart(), 1U);
  ::unsetenv("SHARDWRIGHT_MPI");
  ::setenv("SLURM_MPI_TYPE", "pmix", 1);
  EXPECT_EQ(TasksApart(), 1U);
}

TEST_F(LauncherTest, OddMessageSizesAreRefused) {
  for (const std::uint64_t bytes : {std::uint64_t{0}, (std::uint64_t{1} << 30) + 1}) {
    const auto comm = MakeComm({.chunk_bytes = bytes});
    ASSERT_FALSE(comm);
    EXPECT_EQ(comm.error().code, Errc::kUsage);
  }
}

}  // namespace
}  // namespace shardwright::comm
