// SPDX-License-Identifier: Apache-2.0
#include "partial/store/check_store.h"

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <utility>

#include "partial/store/collect.h"
#include "support/comm/threads.h"
#include "unit/partial/agent_fixture.h"

namespace shardwright::partial {
namespace {

/// Runs a function when a pass begins.
class PassSink final : public NullSink {
 public:
  explicit PassSink(std::function<void(const std::string&)> at) : at_(std::move(at)) {}
  void Pass(std::string_view name) override { at_(std::string(name)); }

 private:
  std::function<void(const std::string&)> at_;
};

class CheckBeside : public test::AgentTest {
 protected:
  void Save(std::uint64_t iteration) {
    SaveRequest request = Options().save;
    request.k_persist.reset();
    const auto input = Open(iteration);
    const auto saved = partial::Save(*comm_, *input, request, sink_);
    ASSERT_TRUE(saved) << saved.error().message;
  }

  /// Checks the store and runs `beside` at the beginning of a pass.
  Result<StoreCheck> Check(const std::string& pass, const std::function<void()>& beside) {
    PassSink sink([&](const std::string& name) {
      if (name == pass) beside();
    });
    const checkpoints::Patterns patterns;
    return CheckStore(*comm_, At("store"), patterns, 2, sink);
  }

  void Collect() {
    const auto done = CollectGarbage(At("store"), {}, false);
    ASSERT_TRUE(done) << done.error().message;
    EXPECT_GT(done->blobs_removed, 0U);
  }

  std::unique_ptr<comm::Comm> comm_ = comm::MakeSerialComm();
};

TEST_F(CheckBeside, WhatACollectionRemovesIsNoDamage) {
  std::uint64_t next = 1;
  for (; next <= 3; ++next) Save(next);
  for (const char* pass : {"read", "check"}) {
    const auto check = Check(pass, [&] { Collect(); });
    ASSERT_TRUE(check) << check.error().message;
    EXPECT_EQ(check->damaged, std::vector<std::string>()) << pass;
    EXPECT_EQ(std::pair(check->checkpoints, check->collected), std::pair(1UL, 2UL)) << pass;
    EXPECT_GT(check->blobs, 0U);
    for (int i = 0; i < 2; ++i) Save(next++);
  }
}

TEST_F(CheckBeside, DamageIsStillSeen) {
  for (std::uint64_t i = 1; i <= 3; ++i) Save(i);
  const Manifest newest = *Stored();
  const auto store = Store::Open(At("store"));
  const auto check = Check("check", [&] {
    Collect();
    std::filesystem::remove(store->BlobPath(newest.modules[0][0]->blob));
  });
  ASSERT_TRUE(check) << check.error().message;
  ASSERT_EQ(check->damaged.size(), 1U);
  EXPECT_NE(check->damaged[0].find(newest.names[0]), std::string::npos);
}

TEST_F(CheckBeside, ClientStateIsLookedAt) {
  Save(1);
  const auto store = Store::Open(At("store"));
  std::filesystem::remove(store->BlobPath(Stored()->passed.value()));
  const auto check = Check("none", [] {});
  ASSERT_TRUE(check) << check.error().message;
  ASSERT_EQ(check->damaged.size(), 1U);
  EXPECT_NE(check->damaged[0].find("client state of iteration 1"), std::string::npos)
      << check->damaged[0];
}

TEST_F(CheckBeside, RanksShareAllBlobs) {
  Save(1);
  const auto store = Store::Open(At("store"));
  const auto blobs = store->ListBlobs();
  for (const BlobFile& blob : *blobs) std::filesystem::remove(store->BlobPath(blob));
  for (const int size : {1, 3}) {
    const auto ranks = comm::RunThreads(size, [&](comm::Comm& comm) -> Status {
      NullSink sink;
      SW_TRY_ASSIGN(const StoreCheck check,
                    CheckStore(comm, At("store"), checkpoints::Patterns(), 1, sink));
      EXPECT_EQ(check.damaged.size(), blobs->size()) << size;
      return {};
    });
    for (const Status& one : ranks) EXPECT_TRUE(one) << one.error().message;
  }
}

TEST_F(CheckBeside, AStoreThatGoesAwayIsNotWhole) {
  for (std::uint64_t i = 1; i <= 2; ++i) Save(i);
  const auto check = Check("check", [&] { std::filesystem::rename(At("store"), At("elsewhere")); });
  ASSERT_FALSE(check);
  EXPECT_EQ(check.error().code, Errc::kBusy);
}

TEST_F(CheckBeside, CollectionsInARow) {
  // The checkpoint being read is removed each time, and a new one appears.
  Save(1);
  for (std::uint64_t next = 2; next < kLast; ++next) {
    Save(next);
    const auto check = Check(next % 2 == 0 ? "read" : "check", [&] { Collect(); });
    ASSERT_TRUE(check) << check.error().message;
    EXPECT_EQ(check->damaged, std::vector<std::string>());
    EXPECT_EQ(check->collected, 1U);
  }
}

TEST_F(CheckBeside, RanksHaveOneList) {
  Save(1);
  // While the second rank is late a checkpoint is saved; then the first one is collected.
  const auto ranks = comm::RunThreads(2, [&](comm::Comm& comm) -> Status {
    PassSink sink([&](const std::string& name) {
      if (comm.rank() == 0) return;
      if (name == "list") {
        std::this_thread::sleep_for(std::chrono::milliseconds(200));
        Save(2);
      }
      if (name == "check") Collect();
    });
    const checkpoints::Patterns patterns;
    SW_TRY_ASSIGN(const StoreCheck check, CheckStore(comm, At("store"), patterns, 1, sink));
    EXPECT_EQ(check.damaged, std::vector<std::string>());
    return {};
  });
  // For any list that the root has read, the ranks agree.
  for (const Status& one : ranks) {
    EXPECT_EQ(one.has_value(), ranks.front().has_value());
    if (!one) {
      EXPECT_EQ(one.error().code, Errc::kBusy) << one.error().message;
    }
  }
}

}  // namespace
}  // namespace shardwright::partial
