// SPDX-License-Identifier: Apache-2.0
#include "convert/scan/scan_ranks.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <mutex>
#include <string>
#include <vector>

#include "checkpoints/registry.h"
#include "support/comm/threads.h"
#include "support/os/fault.h"
#include "unit/support/os/scratch.h"

namespace shardwright::convert {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFolders[] = {"deepspeed/zero3_w4_frozen",
                                    "deepspeed/universal_zero2_w2",
                                    "dcp/nested_w3",
                                    "dcp/ranks_w3",
                                    "dcp/zstd_w2",
                                    "dtensor/fsdp_w3",
                                    "megatron/dist_full_tp2",
                                    "megatron/legacy_pp2"};

std::string Data(const std::string& folder) {
  return (fs::path(SW_SOURCE_DIR) / "tests/data" / folder / "ckpt").string();
}

Result<checkpoints::SourceSet> Scan(comm::Comm& comm, const std::string& folder) {
  checkpoints::ScanOptions options;
  options.io_threads = 3;
  return ScanByRanks(comm, options, [&](const checkpoints::ScanOptions& how) {
    return checkpoints::ScanSource({folder}, how);
  });
}

TEST(ScanByRanks, AllRanksHoldWhatOneRankFinds) {
  for (const char* const folder : kFolders) {
    const auto wanted = checkpoints::ScanSource({Data(folder)});
    ASSERT_TRUE(wanted) << wanted.error().message;
    for (const int ranks : {1, 2, 3, 12}) {
      const auto done = comm::RunThreads(ranks, [&](comm::Comm& comm) -> Status {
        SW_TRY_ASSIGN(const checkpoints::SourceSet set, Scan(comm, Data(folder)));
        if (checkpoints::Serialize(set) == checkpoints::Serialize(*wanted)) return {};
        return Fail(Errc::kInternal, "another set");
      });
      for (const Status& one : done) EXPECT_TRUE(one) << folder << ": " << one.error().message;
    }
  }
}

TEST(ScanByRanks, EachFileIsOpenedOnceInTotal) {
  for (const char* const folder : kFolders) {
    std::uint64_t reads = 0;
    std::uint64_t files = 0;
    {
      const os::ScopedFault counted;
      files = checkpoints::ScanSource({Data(folder)})->files.size();
      reads = counted.Count(os::Op::kRead);
    }
    const os::ScopedFault counted;
    constexpr int kRanks = 4;
    const auto done = comm::RunThreads(kRanks, [&](comm::Comm& comm) -> Status {
      SW_TRY(Scan(comm, Data(folder)));
      return {};
    });
    for (const Status& one : done) EXPECT_TRUE(one) << folder;
    EXPECT_EQ(counted.Count(os::Op::kRead), reads) << folder;
    // Each rank opens the folders of its files, and rank 0 those that it lists.
    EXPECT_LE(counted.Count(os::Op::kOpen), files + 30) << folder;
  }
}

class ScanByRanksErrors : public os::Scratch {
 protected:
  void SetUp() override {
    Scratch::SetUp();
    fs::copy(Data("deepspeed/zero3_w4_frozen"), At("ckpt"), fs::copy_options::recursive);
  }

  std::vector<std::string> Files() const {
    std::vector<std::string> paths;
    const auto set = checkpoints::ScanSource({At("ckpt")});
    for (const checkpoints::SourceFile& file : set->files) paths.push_back(file.path);
    return paths;
  }

  /// Expects this report from every rank, for every number of ranks.
  void ExpectError(Errc code, const std::string& message) const {
    for (const int ranks : {2, 3, 5}) {
      const auto done = comm::RunThreads(ranks, [&](comm::Comm& comm) -> Status {
        SW_TRY(Scan(comm, At("ckpt")));
        return {};
      });
      for (const Status& one : done) {
        ASSERT_FALSE(one);
        EXPECT_EQ(one.error().code, code);
        EXPECT_EQ(one.error().message, message) << ranks;
      }
    }
  }
};

TEST_F(ScanByRanksErrors, AreThoseOfOneRank) {
  const std::vector<std::string> files = Files();
  for (const std::size_t broken : {6U, 4U, 1U}) {
    fs::resize_file(files[broken], fs::file_size(files[broken]) / 2);
    const auto one = checkpoints::ScanSource({At("ckpt")});
    ASSERT_FALSE(one);
    EXPECT_TRUE(one.error().message.starts_with(files[broken]));
    ExpectError(one.error().code, one.error().message);
  }
}

TEST_F(ScanByRanksErrors, OfListingReachAllRanks) {
  fs::remove_all(At("ckpt"));
  const auto one = checkpoints::ScanSource({At("ckpt")});
  ASSERT_FALSE(one);
  ExpectError(one.error().code, one.error().message);
}

TEST_F(ScanByRanksErrors, ARankThatIsGoneLeavesNoneWaiting) {
  for (const int gone : {0, 2}) {
    const auto done = comm::RunThreads(4, [&](comm::Comm& comm) -> Status {
      if (comm.rank() == gone) return Fail(Errc::kIo, "gone");
      SW_TRY(Scan(comm, At("ckpt")));
      return {};
    });
    for (const Status& one : done) EXPECT_FALSE(one);
  }
}

}  // namespace
}  // namespace shardwright::convert
