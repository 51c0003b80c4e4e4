#include "pec/forecast/gradient_plan.h"

#include <string>

#include "base/checked.h"

namespace shardwright::pec {

Result<TransferPlan> PlanTransfers(const GradientChains& chains,
                                   const PerExpert<ComponentBytes>& bytes,
                                   const Selection& selected, std::uint64_t iteration,
                                   const GradientOptions& options) {
  if (iteration == 0 || options.interval == 0) {
    return Fail(Errc::kUsage, "transfers of iteration " + std::to_string(iteration) + ", every " +
                                  std::to_string(options.interval) + ": both count from 1");
  }
  const LayerExperts experts = ShapeOf(bytes);
  SW_TRY(Validate(selected, experts));
  SW_TRY(ValidateShape(chains.last, experts, "last messages"));
  SW_TRY(ValidateShape(chains.steps, experts, "gradients since full copies"));
  TransferPlan plan;
  plan.iteration = iteration;
  plan.gradients.resize(experts.size());
  plan.full.resize(experts.size());
  for (std::size_t m = 0; m < experts.size(); ++m) {
    for (std::uint32_t e : selected[m]) {
      // A first message has no predecessor: iteration 1 does not follow "none".
      const bool follows = chains.last[m][e] != 0 && chains.last[m][e] == iteration - 1;
      const bool gradient =
          options.interval == 1 && follows && chains.steps[m][e] < options.full_every;
      (gradient ? plan.gradients : plan.full)[m].push_back(e);
      std::uint64_t& sum = gradient ? plan.gradient_bytes : plan.full_bytes;
      SW_TRY_ASSIGN(const std::uint64_t full, TotalBytes(bytes[m][e]));
      SW_TRY_ASSIGN(sum, CheckedAdd(sum, gradient ? bytes[m][e].weights : full));
    }
  }
  return plan;
}

Status EnterTransfers(GradientChains* chains, const TransferPlan& plan) {
  const LayerExperts experts = ShapeOf(chains->last);
  SW_TRY(Validate(plan.gradients, experts));
  SW_TRY(Validate(plan.full, experts));
  for (const Selection* selection : {&plan.gradients, &plan.full}) {
    for (std::size_t m = 0; m < experts.size(); ++m) {
      for (std::uint32_t e : (*selection)[m]) {
        if (chains->last[m][e] < plan.iteration) continue;
        const ModuleId id{static_cast<std::int32_t>(m), static_cast<std::int32_t>(e)};
        return Fail(Errc::kBadInput, Name(id) + ": a message of iteration " +
                                         std::to_string(plan.iteration) + " after that of " +
                                         std::to_string(chains->last[m][e]));
      }
    }
  }
  for (std::size_t m = 0; m < experts.size(); ++m) {
    for (std::uint32_t e : plan.gradients[m]) {
      chains->last[m][e] = plan.iteration;
      ++chains->steps[m][e];
    }
    for (std::uint32_t e : plan.full[m]) {
      chains->last[m][e] = plan.iteration;
      chains->steps[m][e] = 0;
    }
  }
  return {};
}

}  // namespace shardwright::pec
