// SPDX-License-Identifier: Apache-2.0
#include "partial/select/gradient_plan.h"

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "support/base/checked.h"

namespace shardwright::partial {

namespace {

/// A selected expert with sufficient gradients.
struct Logged {
  std::uint64_t steps = 0;  // since its full copy
  std::size_t layer = 0;
  std::uint32_t expert = 0;
  std::uint64_t gradient_bytes = 0;
  std::uint64_t full_bytes = 0;
};

/// Selects the experts that get a full copy from the rest of
/// the budget: longest chain first, ties by layer and expert.
std::set<std::pair<std::size_t, std::uint32_t>> SpendRest(std::vector<Logged> logged,
                                                          std::uint64_t rest) {
  std::stable_sort(logged.begin(), logged.end(),
                   [](const Logged& a, const Logged& b) { return a.steps > b.steps; });
  std::set<std::pair<std::size_t, std::uint32_t>> full;
  for (const Logged& one : logged) {
    // A state smaller than the gradients does not reduce the budget.
    const std::uint64_t more =
        one.full_bytes > one.gradient_bytes ? one.full_bytes - one.gradient_bytes : 0;
    if (more > rest) continue;
    rest -= more;
    full.emplace(one.layer, one.expert);
  }
  return full;
}

Status CheckOptions(std::uint64_t iteration, const GradientOptions& options) {
  if (iteration == 0 || options.interval == 0) {
    return Fail(Errc::kUsage, "transfers of iteration ", iteration, " at an interval of ",
                options.interval, ": both must be at least 1");
  }
  if (options.budget_bytes == 0 || options.rule != GradientRule::kAlgorithm3) return {};
  return Fail(Errc::kUsage, "algorithm 3 does not support a byte budget");
}

/// Returns true if a rule prefers gradients where gradients and state are both possible.
bool TakesGradients(GradientRule rule, std::uint64_t interval, std::uint64_t gradients,
                    std::uint64_t state) {
  switch (rule) {
    case GradientRule::kAlgorithm3:
      return interval == 1;
    case GradientRule::kLeast:
      return gradients < state;
    case GradientRule::kFewest:
      break;
  }
  return true;
}

}  // namespace

std::string_view Name(GradientRule rule) {
  switch (rule) {
    case GradientRule::kAlgorithm3:
      return "algorithm-3";
    case GradientRule::kLeast:
      return "least";
    case GradientRule::kFewest:
      break;
  }
  return "fewest";
}

std::uint64_t LogBytes(const ComponentBytes& expert) {
  return expert.master > 0 ? expert.master : expert.weights;
}

Result<std::uint64_t> LogBytes(const PerExpert<ComponentBytes>& experts) {
  std::uint64_t sum = 0;
  for (const auto& layer : experts) {
    for (const ComponentBytes& expert : layer) {
      SW_TRY_ASSIGN(sum, CheckedAdd(sum, LogBytes(expert)));
    }
  }
  return sum;
}

Result<TransferPlan> PlanTransfers(const GradientChains& chains,
                                   const PerExpert<ComponentBytes>& bytes,
                                   const Selection& selected, std::uint64_t iteration,
                                   const GradientOptions& options) {
  SW_TRY(CheckOptions(iteration, options));
  const LayerExperts experts = ShapeOf(bytes);
  SW_TRY(Validate(selected, experts));
  SW_TRY(ValidateShape(chains.last, experts, "last messages"));
  SW_TRY(ValidateShape(chains.steps, experts, "gradients since full copies"));
  TransferPlan plan;
  plan.iteration = iteration;
  plan.interval = options.interval;
  plan.gradients.resize(experts.size());
  plan.full.resize(experts.size());
  std::vector<Logged> logged;
  std::uint64_t needed = 0;
  for (std::size_t m = 0; m < experts.size(); ++m) {
    for (std::uint32_t e : selected[m]) {
      const std::uint64_t last = chains.last[m][e];
      // A first message has no predecessor: iteration 1 does not follow "none".
      const bool follows = last != 0 && last < iteration && iteration - last == options.interval;
      const bool short_enough = chains.steps[m][e] < options.full_every &&
                                options.interval <= options.full_every - chains.steps[m][e];
      SW_TRY_ASSIGN(const std::uint64_t full, TotalBytes(bytes[m][e]));
      const std::uint64_t one = options.as_logged ? LogBytes(bytes[m][e]) : bytes[m][e].weights;
      SW_TRY_ASSIGN(const std::uint64_t gradients, CheckedMul(one, options.interval));
      const bool enough = follows && short_enough &&
                          TakesGradients(options.rule, options.interval, gradients, full);
      if (enough) logged.push_back({chains.steps[m][e], m, e, gradients, full});
      SW_TRY_ASSIGN(needed, CheckedAdd(needed, enough ? gradients : full));
    }
  }
  SW_TRY_ASSIGN(const std::uint64_t budget, CheckedMul(options.budget_bytes, options.interval));
  std::set<std::pair<std::size_t, std::uint32_t>> spent;
  if (budget > needed) spent = SpendRest(logged, budget - needed);
  plan.over_bytes = budget > 0 && needed > budget ? needed - budget : 0;
  auto next = logged.begin();
  for (std::size_t m = 0; m < experts.size(); ++m) {
    for (std::uint32_t e : selected[m]) {
      const bool enough = next != logged.end() && next->layer == m && next->expert == e;
      const bool gradient = enough && !spent.contains({m, e});
      SW_TRY_ASSIGN(const std::uint64_t full, TotalBytes(bytes[m][e]));
      (gradient ? plan.gradients : plan.full)[m].push_back(e);
      std::uint64_t& sum = gradient ? plan.gradient_bytes : plan.full_bytes;
      SW_TRY_ASSIGN(sum, CheckedAdd(sum, gradient ? next->gradient_bytes : full));
      if (enough) ++next;
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
        return Fail(Errc::kBadInput, Name(id), ": a transfer of iteration ", plan.iteration,
                    " follows one of iteration ", chains->last[m][e]);
      }
    }
  }
  for (std::size_t m = 0; m < experts.size(); ++m) {
    for (std::uint32_t e : plan.gradients[m]) {
      chains->last[m][e] = plan.iteration;
      chains->steps[m][e] += plan.interval;
    }
    for (std::uint32_t e : plan.full[m]) {
      chains->last[m][e] = plan.iteration;
      chains->steps[m][e] = 0;
    }
  }
  return {};
}

std::uint64_t LongestChain(const GradientChains& chains) {
  std::uint64_t longest = 0;
  for (const auto& layer : chains.steps) {
    for (const std::uint64_t steps : layer) longest = std::max(longest, steps);
  }
  return longest;
}

}  // namespace shardwright::partial
