// SPDX-License-Identifier: Apache-2.0
#include "placement/failure_simulation/deepspeed.h"

#include <algorithm>

#include "placement/strategy/strategies.h"
#include "support/base/text.h"

namespace shardwright::placement {

Status CheckExpertParallel(std::uint64_t size, std::uint32_t experts, const Cluster& cluster) {
  std::uint64_t gpus = 0;
  std::uint32_t slots = UINT32_MAX;
  for (const Device& device : cluster.devices) {
    if (!device.alive || device.slots == 0) continue;
    ++gpus;
    slots = std::min(slots, device.slots);
  }
  if (size == 0) return Fail(Errc::kUsage, "--ep 0: a number of at least 1 expected");
  if (size > gpus) {
    return Fail(Errc::kUsage, "--ep ", size, ": the cluster has only ", Plural(gpus, "gpu"));
  }
  if (experts % size != 0) {
    return Fail(Errc::kUsage, "--ep ", size, " does not divide the ", Plural(experts, "expert"));
  }
  if (experts / size <= slots) return {};
  return Fail(Errc::kUsage, "--ep ", size, ": ", Plural(experts / size, "expert"),
              " of a gpu do not fit in its ", Plural(slots, "slot"));
}

Result<SimulationResult> SimulateDeepSpeed(comm::Comm& comm, std::uint32_t size, Recovery recovery,
                                           const token_counts::TokenTrace& trace,
                                           const Cluster& cluster,
                                           const std::vector<NodeEvent>& events,
                                           const SimulationOptions& options, Sink& sink) {
  const Strategy strategy{recovery == Recovery::kRestart ? "ds" : "ds-ft", "",
                          internal::DraftVanilla, internal::FinishByNodes};
  SimulationOptions own = options;
  own.plan = {};  // options of other strategies do not apply
  own.plan.expert_parallel = size;
  own.plan.stop = options.plan.stop;
  own.recovery = recovery;
  return SimulateFailures(comm, strategy, trace, cluster, events, own, sink);
}

}  // namespace shardwright::placement
