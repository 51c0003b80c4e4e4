// SPDX-License-Identifier: Apache-2.0
// Any bytes as a placement plan, of any format. An accepted plan fits the cluster that it describes
// or one of four GPUs, or the check fails. Plans that fit can be measured and written again.

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "placement/io/plan_file.h"
#include "placement/io/plan_text.h"
#include "placement/verify/verify.h"
#include "support/base/result.h"

namespace placement = shardwright::placement;

namespace {

placement::TokenCounts LoadsOf(const placement::PlanFile& plan) {
  placement::TokenCounts loads;
  loads.layers = static_cast<std::uint32_t>(plan.layer_id.size());
  loads.experts = plan.experts;
  loads.layer_experts = plan.layer_experts;
  loads.layer_id = plan.layer_id;
  loads.tokens.assign(std::size_t{loads.layers} * loads.experts, 3);
  return loads;
}

void PlaceAgain(const placement::PlanFile& plan, const placement::Cluster& cluster) {
  constexpr std::size_t kCells = 1 << 16;  // larger ones are slow, not different
  const placement::TokenCounts loads = LoadsOf(plan);
  if (loads.tokens.size() > kCells || !placement::Validate(loads, cluster)) return;
  auto placed = placement::PlacedOn(plan, loads, cluster);
  if (!placed || placed->slot_expert.size() > kCells) return;
  if (!placement::Validate(*placed, loads, cluster, placement::Rules{})) return;
  placement::StrategyResult result;
  result.placement = *placed;
  placement::VerifyOptions options;
  options.recovery.failures_max = 3;
  options.recovery.samples = 10;
  const auto verified =
      placement::VerifyPlan("plan", std::move(result), loads, cluster, nullptr, options);
  SW_CHECK(verified.has_value());
  const auto text = placement::PlanText(*verified, loads, cluster, placement::FailureUnit::kNode);
  const auto again = placement::ParsePlan(text, "again");
  SW_CHECK(again.has_value());
  const auto same = placement::PlacedOn(*again, loads, cluster);
  SW_CHECK(same && same->slot_expert == placed->slot_expert);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size_bytes) {
  const std::string_view text(reinterpret_cast<const char*>(data), size_bytes);
  const auto plan = placement::ParsePlan(text, "input");
  if (!plan) return 0;
  SW_CHECK(plan->experts > 0 && plan->slots.size() == plan->layer_id.size());
  if (plan->cluster) PlaceAgain(*plan, *plan->cluster);
  const auto slots = static_cast<std::uint32_t>(plan->slots.front().size());
  PlaceAgain(*plan, placement::UniformCluster(2, 2, slots / 4 + 1));
  return 0;
}
