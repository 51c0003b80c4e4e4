// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>

#include "placement/strategy/hecate.h"
#include "property/cases.h"
#include "random_moe.h"
#include "support/base/checked.h"

namespace shardwright::placement {
namespace {

using Owners = std::vector<std::uint32_t>;
using Holders = std::vector<std::vector<std::uint32_t>>;

bool IsHot(std::span<const std::uint64_t> tokens, std::uint32_t e, std::uint32_t hot) {
  const auto hottest = HottestExperts(tokens, hot);
  return std::find(hottest.begin(), hottest.end(), e) != hottest.end();
}

std::vector<std::uint32_t> Foreign(const Owners& owner, const Holders& holders,
                                   std::uint32_t devices) {
  std::vector<std::uint32_t> foreign(devices, 0);
  for (std::uint32_t e = 0; e < owner.size(); ++e) {
    for (const std::uint32_t d : holders[e]) foreign[d] += d != owner[e] ? 1 : 0;
  }
  return foreign;
}

// Owners keep their experts. Only hot ones are copied, at most m[d] to device d. Volumes equal the
// copied bytes, within the published bounds. Calibration adds copies in the remaining space.
TEST(MaterializeProperty, CopiesFitAndVolumesAddUp) {
  Random random(401);
  int calibrated = 0;
  for (int i = 0; i < kCases; ++i) {
    const LiveDevices devices(UniformCluster(Between(&random, 1, 3), Between(&random, 1, 3), 1));
    const std::uint32_t experts = Between(&random, 1, 10);
    const auto tokens = RandomTokens(&random, experts);
    Owners owner(experts);
    for (auto& o : owner) o = static_cast<std::uint32_t>(random.Below(devices.size()));
    const std::uint32_t t = Between(&random, 0, 5);
    std::vector<std::uint32_t> m(devices.size());
    for (std::uint32_t& spare : m) spare = Between(&random, 0, 4);
    const std::uint32_t least = *std::min_element(m.begin(), m.end());
    const Holders holders = Materialize(owner, tokens, devices, t, m);
    std::uint64_t copies = 0;
    std::uint64_t copied = 0;
    for (std::uint32_t e = 0; e < experts; ++e) {
      ASSERT_TRUE(std::binary_search(holders[e].begin(), holders[e].end(), owner[e]));
      ASSERT_EQ(std::adjacent_find(holders[e].begin(), holders[e].end()), holders[e].end());
      if (holders[e].size() > 1) {
        ASSERT_TRUE(IsHot(tokens, e, t));
      }
      if (IsHot(tokens, e, t) && std::min(t, experts) <= least) {
        ASSERT_EQ(holders[e].size(), devices.size());
      }
      copies += holders[e].size() - 1;
      copied += holders[e].size() > 1 ? 1 : 0;
    }
    const auto foreign = Foreign(owner, holders, devices.size());
    for (std::uint32_t d = 0; d < devices.size(); ++d) ASSERT_LE(foreign[d], std::min(m[d], t));
    const SparseVolumes volumes = VolumesOf(owner, holders, devices.size());
    std::uint64_t in = 0, out = 0;
    for (std::uint32_t d = 0; d < devices.size(); ++d) {
      ASSERT_EQ(volumes.in[d], foreign[d]);
      ASSERT_LE(volumes.in[d], volumes.bound);
      in += volumes.in[d];
      out += volumes.out[d];
    }
    ASSERT_EQ(in, copies);
    ASSERT_EQ(out, in);
    ASSERT_EQ(volumes.bound, copied);
    ASSERT_LE(volumes.all_reduce, 2.0 * static_cast<double>(volumes.bound) + 1e-9);

    const auto later = RandomTokens(&random, experts);
    const CalibrationCost cost{1, 0, 1e9, 10};
    const Calibrated again = Calibrate(owner, holders, later, devices, t, m, cost);
    calibrated += again.changed ? 1 : 0;
    for (std::uint32_t e = 0; e < experts; ++e) {
      ASSERT_TRUE(std::includes(again.holders[e].begin(), again.holders[e].end(),
                                holders[e].begin(), holders[e].end()));
      if (again.holders[e].size() > holders[e].size()) {
        ASSERT_TRUE(IsHot(later, e, t));
      }
    }
    const auto more = Foreign(owner, again.holders, devices.size());
    for (std::uint32_t d = 0; d < devices.size(); ++d) ASSERT_LE(more[d], m[d]);
  }
  EXPECT_GT(calibrated, kCases / 100);
}

TEST(ShardOwnersProperty, EveryExpertOnceAndNoDeviceOverTheMeanOrItsSlots) {
  Random random(402);
  for (int i = 0; i < kCases; ++i) {
    const TokenCounts loads = RandomLoads(&random, Between(&random, 1, 3), Between(&random, 1, 8));
    const std::uint32_t nodes = Between(&random, 1, 3);
    const std::uint32_t gpus = Between(&random, 1, 3);
    const std::uint64_t least = CeilDiv(std::uint64_t{loads.experts}, std::uint64_t{nodes} * gpus);
    Cluster cluster = UniformCluster(nodes, gpus, static_cast<std::uint32_t>(least));
    for (Device& device : cluster.devices) device.slots += Between(&random, 0, 2);
    const LiveDevices devices(cluster);
    const auto owner = ShardOwners(loads, devices, Between(&random, 0, 9));
    ASSERT_EQ(owner.size(), loads.layers);
    std::vector<std::uint64_t> owned(devices.size(), 0);
    for (const auto& layer : owner) {
      ASSERT_EQ(layer.size(), loads.experts);
      std::vector<std::uint32_t> here(devices.size(), 0);
      for (const std::uint32_t d : layer) {
        ASSERT_LT(d, devices.size());
        ++owned[d];
        ASSERT_LE(++here[d], devices.slots[d]) << i;
      }
    }
    const std::uint64_t cap = CeilDiv(std::uint64_t{loads.layers} * loads.experts, devices.size());
    ASSERT_LE(*std::max_element(owned.begin(), owned.end()), cap);
  }
}

TEST(HecateProperty, WithoutSparePlansKeepToTheSlots) {
  Random random(403);
  const Strategy* hecate = *FindStrategy("hecate");
  int planned = 0;
  for (int i = 0; i < kCases; ++i) {
    const TokenCounts loads = RandomLoads(&random, Between(&random, 1, 3), Between(&random, 1, 8));
    const Cluster cluster = RandomCluster(&random);
    Options options;
    options.hecate.reshard = random.Below(4) > 0;
    if (random.Below(2) == 0) options.hecate.overlap = Between(&random, 0, 8);
    const auto plan = hecate->plan(loads, cluster, nullptr, options);
    if (!plan) continue;
    ++planned;
    for (std::uint32_t l = 0; l < loads.layers; ++l) {
      for (std::uint32_t d = 0; d < cluster.device_count(); ++d) {
        const auto slots = plan->placement.slots(l, d);
        const auto held = std::count_if(slots.begin(), slots.end(),
                                        [](std::int32_t e) { return e != kNoExpert; });
        ASSERT_LE(held, cluster.devices[d].slots) << i;
      }
    }
  }
  EXPECT_GT(planned, kCases / 10);
}

}  // namespace
}  // namespace shardwright::placement
