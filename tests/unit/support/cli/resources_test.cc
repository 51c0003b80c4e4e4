// SPDX-License-Identifier: Apache-2.0
#include "support/cli/resources.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "support/cli/flags.h"

namespace shardwright::cli {
namespace {

/// Clears the variables that launchers set, and restores them.
class LauncherEnvironment : public ::testing::Test {
 protected:
  LauncherEnvironment() {
    for (const char* name : kNames) {
      const char* value = std::getenv(name);
      before_.emplace_back(value != nullptr, value != nullptr ? value : "");
      unsetenv(name);
    }
  }
  ~LauncherEnvironment() override {
    for (std::size_t i = 0; i < before_.size(); ++i) {
      if (before_[i].first) {
        setenv(kNames[i], before_[i].second.c_str(), 1);
      } else {
        unsetenv(kNames[i]);
      }
    }
  }

 private:
  static constexpr const char* kNames[] = {"OMPI_COMM_WORLD_LOCAL_SIZE",
                                           "MPI_LOCALNRANKS",
                                           "SLURM_NTASKS_PER_NODE",
                                           "SLURM_STEP_TASKS_PER_NODE",
                                           "PMI_RANK",
                                           "OMPI_COMM_WORLD_RANK",
                                           "PMIX_RANK",
                                           "SLURM_PROCID"};
  std::vector<std::pair<bool, std::string>> before_;
};

TEST_F(LauncherEnvironment, RanksComeFromTheLauncher) {
  EXPECT_EQ(LocalRankCount(), 1U);
  EXPECT_EQ(LauncherRank(), 0);
  setenv("SLURM_STEP_TASKS_PER_NODE", "4(x2),3", 1);
  EXPECT_EQ(LocalRankCount(), 4U);
  setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "8", 1);
  EXPECT_EQ(LocalRankCount(), 8U);
  setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "many", 1);
  EXPECT_EQ(LocalRankCount(), 4U) << "nonsense is passed over";
  setenv("PMI_RANK", "5", 1);
  EXPECT_EQ(LauncherRank(), 5);
}

TEST_F(LauncherEnvironment, RanksOfOneMachineShareIt) {
  const unsigned alone = DefaultThreads();
  cpu_set_t set;
  ASSERT_EQ(sched_getaffinity(0, sizeof set, &set), 0);
  EXPECT_GE(alone, 1U);
  EXPECT_LE(alone, static_cast<unsigned>(CPU_COUNT(&set)));
  const std::uint64_t alone_bytes = DefaultMemoryBytes();
  EXPECT_LE(alone_bytes, std::uint64_t{1} << 30);
  setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "4096", 1);
  EXPECT_EQ(DefaultThreads(), 1U);
  EXPECT_LT(DefaultMemoryBytes(), alone_bytes);
  EXPECT_GE(DefaultMemoryBytes(), kMemoryMinBytes);
}

TEST(ParseSlurmTasks, ReadsTheFirstCount) {
  EXPECT_EQ(ParseSlurmTasks("4"), 4U);
  EXPECT_EQ(ParseSlurmTasks("4(x2),3"), 4U);
  EXPECT_EQ(ParseSlurmTasks("2,1"), 2U);
  EXPECT_EQ(ParseSlurmTasks("x"), 0U);
  EXPECT_EQ(ParseSlurmTasks("4 nodes"), 0U);
  EXPECT_EQ(ParseSlurmTasks(""), 0U);
}

TEST(RaiseOpenFileLimit, RaisesItAndNeverLowersIt) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const auto raised_from = [&](rlim_t files) {
    rlimit limit{std::min<rlim_t>(files, before.rlim_max), before.rlim_max};
    EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
    RaiseOpenFileLimit();
    EXPECT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
    EXPECT_EQ(limit.rlim_max, before.rlim_max);
    return limit.rlim_cur;
  };
  const rlim_t most = std::min<rlim_t>(before.rlim_max, 65'536);
  EXPECT_EQ(raised_from(256), most);
  EXPECT_EQ(raised_from(before.rlim_max), before.rlim_max);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
}

TEST(PeakMemoryBytes, GrowsWithWhatIsTouched) {
  const std::uint64_t before = PeakMemoryBytes();
  std::vector<char> block(64 << 20);
  // Writes every page in a way that the compiler cannot remove.
  for (std::size_t i = 0; i < block.size(); i += 4096) *const_cast<volatile char*>(&block[i]) = 'x';
  EXPECT_GE(PeakMemoryBytes(), before);
  EXPECT_GE(PeakMemoryBytes(), block.size());
}

}  // namespace
}  // namespace shardwright::cli
