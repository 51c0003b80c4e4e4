// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/open_source.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "checkpoints/registry.h"
#include "fixtures.h"
#include "support/base/sink.h"
#include "support/os/fault.h"
#include "unit/support/os/scratch.h"

namespace shardwright::checkpoints {
namespace {

/// A checkpoint of tests/data, and the most calls that its scan may take beyond one open and one
/// read for each file: to list folders, to read pointers and indexes, to decompress items.
struct Case {
  const char* folder;
  std::uint64_t more_opens;
  std::uint64_t more_reads;
};

Result<SourceSet> Scan(const std::string& folder, unsigned io_threads) {
  ScanOptions options;
  options.io_threads = io_threads;
  return ScanSource({folder}, options);
}

void PrintTo(const Case& one, std::ostream* out) { *out << one.folder; }

class Scans : public testing::TestWithParam<Case> {
 protected:
  static std::string Folder() {
    return (fs::path(SW_SOURCE_DIR) / "tests/data" / GetParam().folder / "ckpt").string();
  }
};

TEST_P(Scans, FindTheSameWithEveryNumberOfThreads) {
  const auto one = Scan(Folder(), 1);
  ASSERT_TRUE(one) << one.error().message;
  const std::string wanted = Serialize(*one);
  for (const unsigned threads : {2U, 5U, 64U}) {
    const auto many = Scan(Folder(), threads);
    ASSERT_TRUE(many) << many.error().message;
    EXPECT_EQ(Serialize(*many), wanted) << threads;
    ASSERT_EQ(many->files.size(), one->files.size());
    for (std::size_t i = 0; i < one->files.size(); ++i) {
      EXPECT_EQ(many->files[i].real, fs::canonical(one->files[i].path).string());
    }
  }
}

TEST_P(Scans, AskLittleOfTheFileSystemForEachFile) {
  if (::syscall(SYS_openat2, AT_FDCWD, ".", nullptr, 0) < 0 && errno == ENOSYS) {
    GTEST_SKIP() << "without openat2 every folder on the way to a file is opened";
  }
  const os::ScopedFault counted;
  const auto set = Scan(Folder(), 3);
  ASSERT_TRUE(set) << set.error().message;
  const std::uint64_t files = set->files.size();
  EXPECT_LE(counted.Count(os::Op::kOpen), files + GetParam().more_opens);
  EXPECT_LE(counted.Count(os::Op::kRead), files + GetParam().more_reads);
}

INSTANTIATE_TEST_SUITE_P(Formats, Scans,
                         testing::Values(Case{"deepspeed/zero3_w2_sub_groups", 4, 1},
                                         Case{"deepspeed/pp2_dp2_zero1", 4, 1},
                                         Case{"deepspeed/universal_zero2_w2", 17, 1},
                                         Case{"dcp/nested_w3", 4, 0}, Case{"dcp/ranks_w3", 8, 0},
                                         Case{"dcp/zstd_w2", 4, 47}, Case{"dtensor/fsdp_w3", 3, 1},
                                         Case{"megatron/dist_full_tp2", 7, 3},
                                         Case{"megatron/legacy_pp2", 6, 1}),
                         [](const auto& one) { return TestName(one.param.folder); });

class ScanErrors : public os::Scratch {
 protected:
  void SetUp() override {
    Scratch::SetUp();
    fs::copy(OwnCheckpoints() / "zero3_w4_frozen/ckpt", At("ckpt"), fs::copy_options::recursive);
  }

  /// Paths of the checkpoint's files, in the order in which they are read.
  std::vector<std::string> Files() const {
    std::vector<std::string> paths;
    const auto set = ScanSource({At("ckpt")});
    for (const SourceFile& file : set->files) paths.push_back(file.path);
    return paths;
  }

  /// The error of a scan, which must be the same for every number of threads.
  std::string ErrorOfScan() const {
    std::string message;
    for (const unsigned threads : {1U, 2U, 3U, 32U, 32U, 32U}) {
      const auto set = Scan(At("ckpt"), threads);
      EXPECT_FALSE(set);
      const std::string found = set ? "" : set.error().message;
      if (!message.empty()) {
        EXPECT_EQ(found, message) << threads << " threads";
      }
      message = found;
    }
    return message;
  }
};

TEST_F(ScanErrors, NameTheFirstBrokenFileByName) {
  const std::vector<std::string> files = Files();
  ASSERT_GE(files.size(), 6U);
  for (const std::size_t broken : {5U, 3U, 1U}) {
    fs::resize_file(files[broken], fs::file_size(files[broken]) / 2);
    EXPECT_TRUE(ErrorOfScan().starts_with(files[broken] + ": ")) << ErrorOfScan();
  }
}

TEST_F(ScanErrors, NameAFileThatVanishesWhileOthersAreRead) {
  const std::vector<std::string> files = Files();
  fs::remove(files[2]);
  fs::create_symlink(At("nowhere"), files[2]);  // it is listed, and gone when it is opened
  EXPECT_TRUE(ErrorOfScan().starts_with(files[2] + ": cannot open: no such file")) << ErrorOfScan();
}

TEST_F(ScanErrors, NameAFileThatCannotBeReadWhileOthersCan) {
  const os::ScopedFault broken(*os::ParseFault("read:1+:eio"));
  const auto set = Scan(At("ckpt"), 8);
  ASSERT_FALSE(set);
  EXPECT_TRUE(set.error().message.find("cannot read") != std::string::npos) << set.error().message;
}

TEST_F(ScanErrors, AFewDescriptorsAreEnough) {
  const std::string wanted = Serialize(*Scan(At("ckpt"), 32));
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit few{std::min<rlim_t>(40, before.rlim_max), before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  const auto set = Scan(At("ckpt"), 1024);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  ASSERT_TRUE(set) << set.error().message;
  EXPECT_EQ(Serialize(*set), wanted);
}

TEST_F(ScanErrors, TooManyOpenFilesAreAClearError) {
  const os::ScopedFault full(*os::ParseFault("open:5+:emfile"));
  const auto set = Scan(At("ckpt"), 8);
  ASSERT_FALSE(set);
  EXPECT_TRUE(set.error().message.find("too many open files") != std::string::npos)
      << set.error().message;
}

/// Records the reports of a scan.
class Reports final : public NullSink {
 public:
  void Files(std::uint64_t done, std::uint64_t all) override {
    const std::lock_guard lock(mutex);
    most = std::max(most, done);
    total = all;
  }
  void Waits(std::string message) override {
    const std::lock_guard lock(mutex);
    waits.push_back(std::move(message));
  }
  bool Names(const std::string& path) {
    const std::lock_guard lock(mutex);
    return std::ranges::any_of(waits, [&](const std::string& text) {
      return text.starts_with(path + ": not read after ");
    });
  }

  std::mutex mutex;
  std::uint64_t most = 0;
  std::uint64_t total = 0;
  std::vector<std::string> waits;
};

/// The slow file of a scan, and the progress of the scan while it is read.
struct Slow {
  std::atomic<unsigned> others_read = 0;
  Reports reports;
  std::string path;
};
Slow* slow_file = nullptr;

Result<std::vector<Container>> ReadSlowly(const Found& file, const os::File&, const os::Identity&) {
  if (file.path != slow_file->path) {
    ++slow_file->others_read;
    return std::vector<Container>{};
  }
  // Until the other files are read and this one is named; the test's patience is generous.
  for (int i = 0; i < 6000; ++i) {
    if (slow_file->others_read == 39 && slow_file->reports.Names(file.path)) {
      return std::vector<Container>{};
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return Fail(Errc::kInternal, slow_file->others_read.load(),
              " files were read while this one waited");
}

TEST_F(ScanErrors, OneSlowFileIsNamedWhileTheOthersAreRead) {
  std::vector<Found> found;
  for (int i = 0; i < 40; ++i) {
    const std::string name = "f" + std::to_string(i);
    std::ofstream(At(name)) << name;
    found.push_back({At(name), name});
  }
  Slow slow;
  slow.path = At("f7");
  slow_file = &slow;
  ScanOptions options;
  options.io_threads = 4;
  options.sink = &slow.reports;
  options.slow_seconds = 0.05;
  const auto files = ReadInOrder(std::move(found), ReadSlowly, options, nullptr);
  slow_file = nullptr;
  ASSERT_TRUE(files) << files.error().message;
  EXPECT_EQ(slow.reports.most, 40U);
  EXPECT_EQ(slow.reports.total, 40U);
}

TEST_F(ScanErrors, LinksAreFollowedAsBefore) {
  const std::vector<std::string> files = Files();
  fs::rename(files[1], At("elsewhere.pt"));
  fs::create_symlink(At("elsewhere.pt"), files[1]);
  const auto set = Scan(At("ckpt"), 4);
  ASSERT_TRUE(set) << set.error().message;
  EXPECT_EQ(set->files[1].real, fs::canonical(At("elsewhere.pt")).string());
}

}  // namespace
}  // namespace shardwright::checkpoints
