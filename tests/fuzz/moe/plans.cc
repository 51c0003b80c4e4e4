// Any bytes as a placement plan, of any format. What is accepted lies on the cluster that it tells,
// or on one of four GPUs, or is refused; what lies there can be measured and written again.

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/result.h"
#include "moe/io/plan_file.h"
#include "moe/io/plan_text.h"
#include "moe/judge/judge.h"

namespace moe = shardwright::moe;

namespace {

moe::Loads LoadsOf(const moe::PlanFile& plan) {
  moe::Loads loads;
  loads.layers = static_cast<std::uint32_t>(plan.layer_id.size());
  loads.experts = plan.experts;
  loads.layer_id = plan.layer_id;
  loads.tokens.assign(std::size_t{loads.layers} * loads.experts, 3);
  return loads;
}

void PlaceAgain(const moe::PlanFile& plan, const moe::Cluster& cluster) {
  constexpr std::size_t kCells = 1 << 16;  // larger ones are slow, not different
  const moe::Loads loads = LoadsOf(plan);
  if (loads.tokens.size() > kCells || !moe::Validate(loads, cluster)) return;
  auto placed = moe::PlacedOn(plan, loads, cluster);
  if (!placed || placed->slot_expert.size() > kCells) return;
  if (!moe::Validate(*placed, loads, cluster, moe::Rules{})) return;
  moe::StrategyResult result;
  result.placement = *placed;
  moe::JudgeOptions options;
  options.recovery.failures_max = 3;
  options.recovery.samples = 10;
  const auto judged = moe::Judge("plan", std::move(result), loads, cluster, nullptr, options);
  SW_CHECK(judged.has_value());
  const auto text = moe::PlanText(*judged, loads, cluster, moe::FailureUnit::kNode);
  const auto again = moe::ParsePlan(text, "again");
  SW_CHECK(again.has_value());
  const auto same = moe::PlacedOn(*again, loads, cluster);
  SW_CHECK(same && same->slot_expert == placed->slot_expert);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size_bytes) {
  const std::string_view text(reinterpret_cast<const char*>(data), size_bytes);
  const auto plan = moe::ParsePlan(text, "input");
  if (!plan) return 0;
  SW_CHECK(plan->experts > 0 && plan->slots.size() == plan->layer_id.size());
  if (plan->cluster) PlaceAgain(*plan, *plan->cluster);
  const auto slots = static_cast<std::uint32_t>(plan->slots.front().size());
  PlaceAgain(*plan, moe::UniformCluster(2, 2, slots / 4 + 1));
  return 0;
}
