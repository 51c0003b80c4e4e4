// SPDX-License-Identifier: Apache-2.0
// Any bytes as a cluster description, and as node events. Accepted input passes its own
// verification and is written so that it reads back as the same.

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "placement/core/node_events.h"
#include "placement/io/cluster_text.h"
#include "placement/io/plan_text.h"
#include "support/base/result.h"

namespace placement = shardwright::placement;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size_bytes) {
  const std::string_view text(reinterpret_cast<const char*>(data), size_bytes);
  const auto events = placement::ParseNodeEvents(text, "input");
  for (std::size_t i = 1; events && i < events->size(); ++i) {
    SW_CHECK((*events)[i - 1].time_ms <= (*events)[i].time_ms && !(*events)[i].node.empty());
  }
  const auto cluster = placement::ParseCluster(text, 3, "input");
  if (!cluster) return 0;
  SW_CHECK(placement::Validate(*cluster).has_value());
  // A few bytes may ask for 262144 GPUs. Their text takes longer than 10000 other inputs.
  constexpr std::uint32_t kDevicesWritten = 4096;
  if (cluster->device_count() > kDevicesWritten || cluster->node_count() > kDevicesWritten)
    return 0;
  const auto written = placement::ClusterText(*cluster);
  const auto again = placement::ParseCluster(written, 3, "again");
  SW_CHECK(again && placement::ClusterText(*again) == written);
  return 0;
}
