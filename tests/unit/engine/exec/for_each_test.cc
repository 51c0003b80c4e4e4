// SPDX-License-Identifier: Apache-2.0
#include "engine/exec/for_each.h"

#include <gtest/gtest.h>

#include <tbb/global_control.h>

namespace shardwright::exec {
namespace {

TEST(ForEach, AnArenaHasNoMoreThreadsThanTbbRuns) {
  EXPECT_EQ(ArenaThreads(1), 1);
  const tbb::global_control limit(tbb::global_control::max_allowed_parallelism, 1);
  EXPECT_EQ(ArenaThreads(64), 1);
}

}  // namespace
}  // namespace shardwright::exec
