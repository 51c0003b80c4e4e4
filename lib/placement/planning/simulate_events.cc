// SPDX-License-Identifier: Apache-2.0
#include "placement/planning/simulate_events.h"

#include <set>
#include <string_view>
#include <utility>

#include "placement/core/node_events.h"
#include "placement/failure_simulation/deepspeed.h"
#include "placement/planning/planning_internal.h"
#include "support/base/stop.h"
#include "support/base/text.h"

namespace shardwright::placement {
namespace {

/// Fails for a simulation in which even the whole cluster is too small for the experts.
Status CheckSimulation(const PlanRequest& request, const EventsRequest& events,
                       const token_counts::TokenTrace& trace, Cluster cluster) {
  for (Node& node : cluster.nodes) node.alive = true;
  token_counts::LoadWindow window;
  window.layers = request.window.layers;
  SW_TRY_ASSIGN(const TokenCounts loads, token_counts::Pick(trace, window));
  SW_TRY(Validate(loads, cluster));
  SW_TRY(internal::CheckRates(request, cluster));
  if (events.expert_parallel > 0) {
    SW_TRY(token_counts::RequireEqualExperts(loads, "--ep"));
    SW_TRY(CheckExpertParallel(events.expert_parallel, loads.experts, cluster));
  }
  return CheckFaults(request.faults, loads, cluster, request.options.failure_unit);
}

/// Warns if the events name fewer machines than the cluster has places for.
void WarnOfFewMachines(const std::string& file, const std::vector<NodeEvent>& events,
                       const Cluster& cluster, Sink& sink) {
  std::set<std::string_view> names;
  for (const NodeEvent& event : events) names.insert(event.node);
  if (names.size() >= cluster.node_count()) return;
  sink.Warn(StrCat(file, " names ", Plural(names.size(), "node"), ", so at most ", names.size(),
                   " of the ", cluster.node_count(),
                   " nodes of --nodes exist; add a line "
                   "\"0,add,NAME\" for each other node, or describe all nodes with --cluster"));
}

/// Warns if the throughput does not include the time of copies.
void WarnOfFreeCopies(const Cluster& cluster, Sink& sink) {
  const bool rates = cluster.device_bytes_per_s > 0 || cluster.node_bytes_per_s > 0;
  if (cluster.expert_bytes > 0 && rates) return;
  sink.Warn(
      "--step-time: copies of experts count as 0 s, because that needs a --cluster with bandwidth "
      "and expert_bytes");
}

}  // namespace

Result<FailureSimulations> SimulateEvents(comm::Comm& comm, const PlanRequest& request,
                                          const EventsRequest& events, Sink& sink) {
  const Interruptible simulating(sink);
  FailureSimulations simulations;
  const Cluster& cluster = simulations.cluster;
  const bool timed = events.throughput.step_seconds > 0;
  std::uint64_t idle_records = 0;
  Result<token_counts::TokenTrace> trace =
      internal::ReadTrace(request.loads, comm.rank() == 0, &idle_records, sink);
  std::vector<NodeEvent> moments;
  const auto read = [&]() -> Status {
    if (!trace) return tl::unexpected<Error>(trace.error());
    SW_TRY_ASSIGN(moments, ReadNodeEvents(events.events));
    const std::size_t layers = trace->layer_id.size();
    SW_TRY_ASSIGN(simulations.cluster,
                  ClusterOf(request.cluster, static_cast<std::uint32_t>(layers)));
    SW_TRY(Validate(cluster));
    if (request.cluster.file.empty()) WarnOfFewMachines(events.events, moments, cluster, sink);
    SW_TRY(CheckSimulation(request, events, *trace, cluster));
    if (timed) WarnOfFreeCopies(cluster, sink);
    return {};
  };
  SW_TRY(comm.Agree(read()));
  SimulationOptions options;
  options.plan = request.options;
  options.plan.stop = StopOf(sink);
  options.window = request.window;
  options.iteration_ms = events.iteration_seconds * 1e3;
  options.rebalance_every = events.rebalance_every;
  // Nodes that are specified by a number have no names of their own.
  options.nodes_are_places = request.cluster.file.empty();
  options.seconds = ClockSeconds;
  for (const Strategy& strategy : Strategies()) {
    if (!events.strategy.empty() && strategy.name != events.strategy) continue;
    sink.Pass("simulate failures");
    SW_TRY_ASSIGN(SimulationResult result, internal::InArena(request.threads, [&]() {
                    return SimulateFailures(comm, strategy, *trace, cluster, moments, options,
                                            sink);
                  }));
    if (timed) simulations.throughput.push_back(ComputeThroughput(result, events.throughput));
    simulations.results.push_back(std::move(result));
  }
  if (!timed || events.expert_parallel == 0) return simulations;
  for (const Recovery recovery : {Recovery::kSurvivors, Recovery::kRestart}) {
    const auto size = static_cast<std::uint32_t>(events.expert_parallel);
    SW_TRY_ASSIGN(const SimulationResult result, internal::InArena(request.threads, [&]() {
                    return SimulateDeepSpeed(comm, size, recovery, *trace, cluster, moments,
                                             options, sink);
                  }));
    ThroughputOptions throughput = events.throughput;
    if (recovery == Recovery::kRestart && events.ds_checkpoint_every) {
      throughput.checkpoint_every = *events.ds_checkpoint_every;
    }
    simulations.throughput.push_back(ComputeThroughput(result, throughput));
  }
  return simulations;
}

}  // namespace shardwright::placement
