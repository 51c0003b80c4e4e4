// SPDX-License-Identifier: Apache-2.0
#include "partial/restore/recovery.h"

#include <algorithm>

#include <gtest/gtest.h>

namespace shardwright::partial {
namespace {

ModuleId Rest(std::int32_t i) { return {i, kNonExpert}; }
ModuleId Expert(std::int32_t e) { return {0, e}; }

// The paper's two nodes: experts 0, 1 live on node 0 and 2, 3 on node 1; node 0 saves the
// non-expert shards 0, 1 and node 1 saves 2, 3; every node needs all four. Iteration 20 is durable;
// memory has experts that storage has older.
RecoveryInput ThePapers() {
  RecoveryInput input;
  input.nodes = 2;
  for (std::int32_t i = 0; i < 4; ++i) {
    const std::uint32_t owner = i < 2 ? 0 : 1;
    input.memory.push_back({owner, Rest(i), 20});
    for (std::uint64_t version : {10U, 20U}) input.storage.push_back({Rest(i), version});
    for (std::uint32_t node : {0U, 1U}) input.needs.push_back({node, Rest(i), 100});
    input.needs.push_back({owner, Expert(i), 1000});
    input.memory.push_back({owner, Expert(i), 20});
    input.storage.push_back({Expert(i), 10});
  }
  input.storage.push_back({Expert(0), 20});
  return input;
}

std::vector<Restore> Of(const RecoveryPlan& plan, std::uint32_t node, Source source) {
  std::vector<Restore> found;
  std::copy_if(plan.restores.begin(), plan.restores.end(), std::back_inserter(found),
               [&](const Restore& r) { return r.node == node && r.source == source; });
  return found;
}

std::uint64_t VersionOf(const RecoveryPlan& plan, const ModuleId& id) {
  for (const ModuleVersion& entry : plan.versions) {
    if (entry.module == id) return entry.version;
  }
  ADD_FAILURE() << Name(id) << " is not recovered";
  return 0;
}

TEST(Recovery, ThePapersExample) {
  RecoveryInput input = ThePapers();
  input.failed = {0};
  RecoveryOptions options;
  options.remote_memory = false;
  const auto plan = PlanRecovery(input, options);
  ASSERT_TRUE(plan) << plan.error().message;
  EXPECT_EQ(plan->resume, 20U);
  // Node 0 loads everything from storage: four non-expert shards and two experts.
  EXPECT_EQ(Of(*plan, 0, Source::kStorage).size(), 6U);
  // Node 1 reads the two shards that node 0 had saved, and keeps its own.
  const std::vector<Restore> read = Of(*plan, 1, Source::kStorage);
  ASSERT_EQ(read.size(), 2U);
  EXPECT_EQ(read[0].module, Rest(0));
  EXPECT_EQ(read[1].module, Rest(1));
  EXPECT_EQ(Of(*plan, 1, Source::kLocalMemory).size(), 4U);
  EXPECT_EQ(VersionOf(*plan, Expert(0)), 20U);
  EXPECT_EQ(VersionOf(*plan, Expert(1)), 10U);
  EXPECT_EQ(VersionOf(*plan, Expert(2)), 20U);  // newer than in storage
  EXPECT_EQ(plan->stale, (std::vector<ModuleId>{Expert(1)}));
  EXPECT_EQ(plan->bytes[static_cast<int>(Source::kStorage)], 4U * 100 + 2000 + 200);
  EXPECT_EQ(plan->bytes[static_cast<int>(Source::kLocalMemory)], 200U + 2000);
  EXPECT_EQ(*ExpertVersions(*plan, {4}), (Counts{{20, 10, 20, 20}}));
}

TEST(Recovery, MemoryOfOthersComesBeforeStorage) {
  RecoveryInput input = ThePapers();
  input.failed = {0};
  const auto plan = PlanRecovery(input, {});
  ASSERT_TRUE(plan);
  const std::vector<Restore> remote = Of(*plan, 0, Source::kRemoteMemory);
  ASSERT_EQ(remote.size(), 2U);
  EXPECT_EQ(remote[0].module, Rest(2));
  EXPECT_EQ(remote[0].from, 1U);
  EXPECT_EQ(Of(*plan, 0, Source::kStorage).size(), 4U);
}

TEST(Recovery, ASoftwareFaultGoesBackToTheNewestSnapshot) {
  RecoveryInput input = ThePapers();
  for (std::int32_t i = 0; i < 4; ++i) input.memory.push_back({i < 2 ? 0U : 1U, Rest(i), 30});
  input.memory.push_back({0, Expert(1), 30});
  auto plan = PlanRecovery(input, {});
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->resume, 30U);
  EXPECT_EQ(VersionOf(*plan, Expert(1)), 30U);
  EXPECT_EQ(VersionOf(*plan, Expert(0)), 20U);
  EXPECT_TRUE(plan->abandoned.empty());
  // With node 1 lost, its shards of iteration 30 are gone: 20, and newer ones are abandoned.
  input.failed = {1};
  plan = PlanRecovery(input, {});
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->resume, 20U);
  EXPECT_EQ(VersionOf(*plan, Expert(1)), 20U);
  EXPECT_EQ(plan->abandoned,
            (std::vector<Abandoned>{{Rest(0), 30, 0}, {Expert(1), 30, 0}, {Rest(1), 30, 0}}));
}

TEST(Recovery, NeverNewerThanTheResumePoint) {
  RecoveryInput input = ThePapers();
  input.storage.push_back({Expert(3), 25});
  const auto plan = PlanRecovery(input, {});
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->resume, 20U);
  EXPECT_EQ(VersionOf(*plan, Expert(3)), 20U);
  EXPECT_EQ(plan->abandoned, (std::vector<Abandoned>{{Expert(3), 25, std::nullopt}}));
}

TEST(Recovery, AtAnOlderIteration) {
  RecoveryOptions options;
  options.at = 19;
  const auto plan = PlanRecovery(ThePapers(), options);
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->resume, 10U);
  options.at = 9;
  const auto none = PlanRecovery(ThePapers(), options);
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error().code, Errc::kInfeasible);
  EXPECT_EQ(none.error().message,
            "non-expert module 0: no version up to iteration 9 is available for all required "
            "modules; its newest version is 20");
}

TEST(Recovery, AnExpertWithoutAnyCopy) {
  RecoveryInput input = ThePapers();
  input.failed = {1};
  std::erase_if(input.storage, [](const StoredCopy& c) { return c.module == Expert(3); });
  RecoveryOptions options;
  const auto none = PlanRecovery(input, options);
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error().code, Errc::kInfeasible);
  EXPECT_EQ(none.error().message,
            "expert 3 of MoE layer 0: no copy up to the resume point 20 is left");
  options.restart_missing = 0;
  const auto plan = PlanRecovery(input, options);
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->restarted, (std::vector<ModuleId>{Expert(3)}));
  EXPECT_EQ(VersionOf(*plan, Expert(3)), 0U);
  EXPECT_EQ(Of(*plan, 1, Source::kRestart).size(), 1U);
  options.restart_missing = 21;
  EXPECT_EQ(PlanRecovery(input, options).error().code, Errc::kUsage);
}

// Two nodes train copies of one expert: both must resume with the same version.
TEST(Recovery, CopiesOfAnExpertGetOneVersion) {
  RecoveryInput input;
  input.nodes = 2;
  input.storage = {{Rest(0), 20}, {Expert(0), 10}};
  input.memory = {{0, Expert(0), 20}};
  input.needs = {{0, Rest(0), 1}, {1, Rest(0), 1}, {0, Expert(0), 1}, {1, Expert(0), 1}};
  RecoveryOptions options;
  options.remote_memory = false;  // node 1 cannot read version 20
  auto plan = PlanRecovery(input, options);
  ASSERT_TRUE(plan);
  EXPECT_EQ(VersionOf(*plan, Expert(0)), 10U);
  plan = PlanRecovery(input, {});
  ASSERT_TRUE(plan);
  EXPECT_EQ(VersionOf(*plan, Expert(0)), 20U);
}

TEST(Recovery, KeptPartsHaveTheResumeVersion) {
  const ModuleId kept{0, 0, Part::kKept};
  const ModuleId selected{0, 0, Part::kSelected};
  RecoveryInput input;
  input.storage = {{Rest(0), 10}, {Rest(0), 20},  {Rest(0), 30}, {kept, 10},
                   {kept, 20},    {selected, 10}, {selected, 30}};
  input.needs = {{0, Rest(0), 1}, {0, kept, 1}, {0, selected, 1}};
  const auto refused = PlanRecovery(input, {});
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Errc::kUsage);
  RecoveryOptions options;
  options.kept_parts = true;
  const auto plan = PlanRecovery(input, options);
  ASSERT_TRUE(plan) << plan.error().message;
  EXPECT_EQ(plan->resume, 20U);  // 30 has no kept part
  EXPECT_EQ(VersionOf(*plan, kept), 20U);
  EXPECT_EQ(VersionOf(*plan, selected), 10U);
  EXPECT_EQ(*ExpertVersions(*plan, {1}), (Counts{{10}}));
  input.needs.pop_back();
  EXPECT_EQ(PlanRecovery(input, options).error().message,
            "kept part of expert 0 of MoE layer 0 is needed without the selected part of expert 0 "
            "of MoE layer 0");
}

TEST(Recovery, NoCommonIterationNamesTheObstacle) {
  RecoveryInput input;
  input.storage = {{Rest(0), 10}, {Rest(0), 20}, {Rest(1), 15}, {Expert(0), 10}};
  input.needs = {{0, Rest(0), 1}, {0, Rest(1), 1}, {0, Expert(0), 1}};
  const auto plan = PlanRecovery(input, {});
  ASSERT_FALSE(plan);
  EXPECT_EQ(plan.error().message,
            "non-expert module 1: no version is available for all required modules; its newest "
            "version is 15");
}

TEST(Recovery, InputThatMakesNoSense) {
  RecoveryInput input = ThePapers();
  input.failed = {2};
  EXPECT_EQ(PlanRecovery(input, {}).error().message,
            "failed node: node 2 does not exist, there are 2");
  input = ThePapers();
  input.needs.push_back(input.needs.front());
  EXPECT_EQ(PlanRecovery(input, {}).error().code, Errc::kUsage);
  input = ThePapers();
  std::erase_if(input.needs, [](const Need& need) { return !need.module.is_expert(); });
  EXPECT_EQ(PlanRecovery(input, {}).error().code, Errc::kUsage);
  input = ThePapers();
  input.needs.push_back({0, {0, 0, Part::kKept}, 1});
  RecoveryOptions options;
  options.kept_parts = true;
  EXPECT_FALSE(PlanRecovery(input, options));
}

}  // namespace
}  // namespace shardwright::partial
