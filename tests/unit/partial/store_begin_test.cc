// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <set>

#include "partial/store/store.h"
#include "support/os/fault.h"
#include "unit/support/os/scratch.h"

namespace shardwright::partial {
namespace {

class StoreBegin : public os::Scratch {
 protected:
  /// Returns the outcome of HasNoCheckpoint for At("store"): "none", "some", or an error's code.
  std::string Said() const {
    const auto none = Store::HasNoCheckpoint(At("store"));
    if (none) return *none ? "none" : "some";
    return "error " + std::to_string(static_cast<int>(none.error().code));
  }
};

TEST_F(StoreBegin, ABegunFolderBecomesAStore) {
  EXPECT_EQ(Said(), "error 3");
  ASSERT_TRUE(Store::Begin(At("store")));
  EXPECT_EQ(Said(), "none");
  EXPECT_EQ(Store::Begin(At("store")).error().code, Errc::kBusy);
  EXPECT_FALSE(*Store::IsStore(At("store")));
  ASSERT_TRUE(Store::OpenOrCreate(At("store"), {}));
  EXPECT_EQ(Said(), "none");
  Scratch::Put("store/manifests/0000000001-0000000004.json.tmp", "half");
  Scratch::Put("store/manifests/.nfs0001", "removed while it was open");
  EXPECT_EQ(Said(), "none");
  Scratch::Put("store/manifests/0000000001-0000000004.json", "{");
  EXPECT_EQ(Said(), "some") << "a manifest that cannot be read is one";
}

TEST_F(StoreBegin, PrepareMakesTheStoreOrRefusesItsName) {
  const auto code = [&](const std::string& name) {
    const Status prepared = Store::Prepare(At(name));
    return prepared ? 0 : static_cast<int>(prepared.error().code);
  };
  EXPECT_EQ(code("absent/store"), static_cast<int>(Errc::kNotFound));
  EXPECT_EQ(code("store"), 0);
  EXPECT_EQ(Said(), "none") << "it is begun";
  EXPECT_EQ(code("store"), 0) << "begun by another run";
  ASSERT_TRUE(Store::OpenOrCreate(At("store"), {}));
  EXPECT_EQ(code("store"), 0);
  {
    const auto lock = Store::Open(At("store"))->LockForWriting("a save");
    ASSERT_TRUE(lock);
    EXPECT_EQ(code("store"), 0) << "another process writes to it";
  }
  {
    const os::ScopedFault fault(*os::ParseFault("write:1+:eio"));
    EXPECT_EQ(code("store"), static_cast<int>(Errc::kIo));
  }
  Scratch::Put("file", "no folder");
  EXPECT_EQ(code("file"), static_cast<int>(Errc::kBusy));
  Scratch::Put("ckpt/latest", "global_step1");
  EXPECT_EQ(code("ckpt"), static_cast<int>(Errc::kBusy));
}

TEST_F(StoreBegin, NothingIsProvedByWhatIsNotSeen) {
  ASSERT_TRUE(Store::Begin(At("store")));
  Scratch::Put("store/begun.json", "{}");
  EXPECT_EQ(Said(), "error 4");
  std::filesystem::remove(At("store/begun.json"));
  EXPECT_EQ(Said(), "error 3") << "an empty folder";
  ASSERT_TRUE(Store::OpenOrCreate(At("store"), {}));
  EXPECT_EQ(Said(), "none");
  for (const char* folder : {"manifests", "recoveries", "catalogues"}) {
    std::filesystem::rename(At("store/" + std::string(folder)), At("aside"));
    EXPECT_EQ(Said(), "error 3") << folder;
    std::filesystem::rename(At("aside"), At("store/" + std::string(folder)));
  }
  for (const char* stranger : {"manifests/0000000001-0000000004.json~", "recoveries/1.json"}) {
    Scratch::Put("store/" + std::string(stranger), "x");
    EXPECT_EQ(Said(), "error 4") << stranger;
    std::filesystem::remove(At("store/" + std::string(stranger)));
  }
  EXPECT_EQ(Said(), "none");
  const os::ScopedFault fault({.target = "list", .first = 1, .onward = true, .error = EIO});
  EXPECT_EQ(Said(), "error 3");
}

TEST_F(StoreBegin, AKillLeavesNoFolderWithoutItsMark) {
  std::uint64_t calls = 0;
  {
    const os::ScopedFault count;
    ASSERT_TRUE(Store::Begin(At("store")));
    calls = count.CountMutating();
  }
  ASSERT_GT(calls, 4U);
  for (std::uint64_t n = 1; n <= calls; ++n) {
    std::filesystem::remove_all(At("store"));
    const int status = os::InChild([&] {
      const os::ScopedFault fault({.target = "any", .first = n, .action = os::FaultAction::kKill});
      return Store::Begin(At("store")) ? 0 : 1;
    });
    EXPECT_NE(status, 0) << n;
    EXPECT_EQ(Said(), std::filesystem::exists(At("store")) ? "none" : "error 3") << n;
    if (!std::filesystem::exists(At("store"))) {
      ASSERT_TRUE(Store::Begin(At("store")));
    }
  }
  Scratch::Put("store.begin-mine/notes", "not of a store");
  std::filesystem::create_directory(At("other.begin-1"));
  std::filesystem::remove_all(At("store"));
  ASSERT_TRUE(Store::Begin(At("store")));
  std::set<std::string> names;
  for (const auto& one : std::filesystem::directory_iterator(At(""))) {
    names.insert(one.path().filename());
  }
  EXPECT_EQ(names, (std::set<std::string>{"other.begin-1", "store", "store.begin-mine"}));
}

}  // namespace
}  // namespace shardwright::partial
