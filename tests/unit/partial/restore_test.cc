// SPDX-License-Identifier: Apache-2.0
#include "partial/restore/restore.h"

#include <unistd.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>

#include "partial/save/save.h"
#include "unit/partial/agent_fixture.h"

namespace shardwright::partial {
namespace {

/// Stores of a few checkpoints with changes to their files.
class RestoreTest : public test::AgentTest {
 protected:
  void SetUp() override {
    AgentTest::SetUp();
    ::alarm(30);  // a choice that never ends is a failure
  }
  void TearDown() override {
    ::alarm(0);
    AgentTest::TearDown();
  }

  /// Saves an iteration, with all experts unless `change` selects others.
  void Save(std::uint64_t iteration, const std::function<void(SaveRequest*)>& change = {}) {
    SaveRequest request;
    request.store = At("store");
    request.k_snapshot = 4;
    if (change) change(&request);
    const auto input = Open(iteration);
    const auto saved = partial::Save(*comm_, *input, request, sink_);
    ASSERT_TRUE(saved) << saved.error().message;
  }

  /// Returns the report of a dry run: the versions that a restore would use.
  Result<RestoreReport> Look(bool allow_older, const std::string& restart_missing = {}) {
    RestoreOptions options;
    options.store = At("store");
    options.allow_older = allow_older;
    options.restart_missing = restart_missing;
    options.read_only = true;
    return RestoreStore(*comm_, options, sink_);
  }

  /// A module of a checkpoint, an expert or not.
  static std::size_t Find(const Manifest& manifest, bool expert) {
    for (std::size_t i = 0; i < manifest.names.size(); ++i) {
      if ((manifest.names[i].find("deepspeed_experts") != std::string::npos) == expert) return i;
    }
    ADD_FAILURE() << "no such module";
    return 0;
  }

  std::string BlobOf(const Manifest& manifest, std::size_t module, Component component) const {
    const auto& held = manifest.modules[module][static_cast<std::size_t>(component)];
    return Store::Open(At("store"))->BlobPath(held->blob);
  }

  /// Flips one bit of a file; its size stays.
  static void Damage(const std::string& path) {
    std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
    const auto byte = static_cast<char>(file.get() ^ 1);
    file.seekp(0);
    file.put(byte);
    ASSERT_TRUE(file.good()) << path;
  }

  std::unique_ptr<comm::Comm> comm_ = comm::MakeSerialComm();
};

TEST_F(RestoreTest, AnExpertWhoseBlobIsDamagedIsOfTheCheckpointBefore) {
  for (std::uint64_t i = 1; i <= 3; ++i) Save(i);
  const Manifest newest = *Stored();
  const std::size_t expert = Find(newest, true);
  Damage(BlobOf(newest, expert, Component::kMoments));
  const auto report = Look(true);
  ASSERT_TRUE(report) << report.error().message;
  EXPECT_EQ(report->iteration, 3U);
  ASSERT_EQ(report->damaged.size(), 1U);
  EXPECT_NE(report->damaged[0].find(newest.names[expert] + " moments"), std::string::npos)
      << report->damaged[0];
  for (const RestoredModule& module : report->modules) {
    const std::uint64_t version = module.name == newest.names[expert] ? 2 : 3;
    for (const auto& part : module.parts) {
      EXPECT_EQ(part ? part->version : version, version) << module.name << ": no mixture";
    }
  }
}

TEST_F(RestoreTest, WithoutTheNewestRestNothingIsOfTheNewestCheckpoint) {
  for (std::uint64_t i = 1; i <= 3; ++i) Save(i);
  const Manifest newest = *Stored();
  std::filesystem::remove(BlobOf(newest, Find(newest, false), Component::kMaster));
  const auto refused = Look(false);
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().message.find("--allow-older"), std::string::npos);
  const auto report = Look(true);
  ASSERT_TRUE(report) << report.error().message;
  EXPECT_EQ(report->iteration, 2U);
  for (const RestoredModule& module : report->modules) {
    for (const auto& part : module.parts) {
      EXPECT_EQ(part ? part->version : 2, 2U) << module.name;
    }
  }
}

TEST_F(RestoreTest, AnExpertThatStartsAgainDoesSoAsAWhole) {
  Save(2, [](SaveRequest* request) {
    request->k_snapshot = 1;
    request->partial_start = true;
    request->keep = KeptComponents();
    (*request->keep)[static_cast<std::size_t>(Component::kMaster)] = true;
  });
  EXPECT_EQ(Look(false).error().code, Errc::kInfeasible);
  const auto report = Look(false, series + "/global_step1");
  ASSERT_TRUE(report) << report.error().message;
  EXPECT_GT(report->restarted_modules, 0U);
  for (const RestoredModule& module : report->modules) {
    const bool again = module.source == Source::kRestart;
    EXPECT_EQ(module.version, again ? 1U : 2U) << module.name;
    const bool any = std::any_of(module.parts.begin(), module.parts.end(),
                                 [](const auto& part) { return part.has_value(); });
    EXPECT_EQ(any, !again) << module.name;
  }
}

TEST_F(RestoreTest, AManifestOfOtherModulesIsRefused) {
  Save(1);
  Manifest manifest = *Stored();
  const auto store = Store::Open(At("store"));
  const std::string name = manifest.names[0];
  manifest.names[0] = "of another model";
  std::ofstream(store->ManifestPath({manifest.sequence, 1, false})) << ToText(manifest);
  const auto refused = Look(false);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Errc::kBadInput);
  EXPECT_NE(refused.error().message.find("module 0 is " + name), std::string::npos)
      << refused.error().message;
}

TEST_F(RestoreTest, ClientStateIsLookedAtBeforeAnythingIsSaid) {
  for (std::uint64_t i = 1; i <= 2; ++i) Save(i);
  const auto store = Store::Open(At("store"));
  std::filesystem::remove(store->BlobPath(Stored()->passed.value()));
  EXPECT_FALSE(Look(false));
  const auto report = Look(true);
  ASSERT_TRUE(report) << report.error().message;
  EXPECT_EQ(report->iteration, 1U);
  EXPECT_EQ(report->damaged.size(), 1U);
}

}  // namespace
}  // namespace shardwright::partial
