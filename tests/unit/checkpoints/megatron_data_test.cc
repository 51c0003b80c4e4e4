// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/registry.h"
#include "engine/layout/shard_map.h"
#include "fixtures.h"

namespace shardwright::checkpoints {
namespace {

/// Checkpoints from Megatron-Core itself, made by tests/data/megatron_core.py.
class MegatronCase : public ::testing::TestWithParam<const char*> {};

TEST_P(MegatronCase, HoldsWhatTheTrainerHeld) {
  const fs::path folder = fs::path(SW_SOURCE_DIR) / "tests/data/megatron" / GetParam();
  const auto source = ScanSource({(folder / "ckpt").string()});
  ASSERT_TRUE(source) << source.error().message;
  const Result<Checkpoint> checkpoint = ReadCheckpoint(*source, Patterns());
  ASSERT_TRUE(checkpoint) << checkpoint.error().message;
  EXPECT_TRUE(layout::Validate(checkpoint->map));
  EXPECT_EQ(checkpoint->groups.size(), 2U);
  ASSERT_TRUE(checkpoint->iteration);
  EXPECT_EQ(*checkpoint->iteration, 2U);
  ExpectTensors(*checkpoint, Expected::Read(folder / "expected.safetensors"));
}

INSTANTIATE_TEST_SUITE_P(Real, MegatronCase,
                         ::testing::Values("dist_buckets_dp2", "dist_full_tp2", "legacy_pp2"),
                         [](const auto& test) { return TestName(test.param); });

}  // namespace
}  // namespace shardwright::checkpoints
