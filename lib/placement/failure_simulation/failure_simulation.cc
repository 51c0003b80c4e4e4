// SPDX-License-Identifier: Apache-2.0
#include "placement/failure_simulation/failure_simulation.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "placement/core/layer_groups.h"
#include "placement/core/metrics.h"
#include "placement/core/parallel.h"
#include "placement/migration/migration.h"

namespace shardwright::placement {
namespace {

/// Tracks the node of each machine, and which nodes are alive.
class Machines {
 public:
  Machines(const Cluster& cluster, const std::vector<NodeEvent>& events, bool places)
      : cluster_(cluster), places_(places) {
    for (std::uint32_t n = 0; n < cluster_.node_count(); ++n) {
      if (places_) {
        cluster_.nodes[n].alive = false;
      } else {
        at_.emplace(cluster_.nodes[n].name, n);
      }
    }
    std::set<std::string> seen;
    for (const NodeEvent& event : events) {
      if (!seen.insert(event.node).second) continue;
      if (places_ && !event.add) early_.push_back(event.node);
      // A machine that is added first was absent before.
      const auto at = at_.find(event.node);
      if (!places_ && event.add && at != at_.end()) cluster_.nodes[at->second].alive = false;
    }
  }

  /// Assigns nodes to the machines that are present from the start.
  Status Start() {
    for (const std::string& name : early_) SW_TRY(Add(name));
    return {};
  }

  Status Add(const std::string& name) {
    const auto free = std::find_if(cluster_.nodes.begin(), cluster_.nodes.end(),
                                   [](const Node& node) { return !node.alive; });
    if (places_ && free == cluster_.nodes.end()) {
      return Fail(Errc::kBadInput, "events: node \"", name, "\": all ", cluster_.node_count(),
                  " nodes of the cluster are in use");
    }
    if (places_) at_[name] = static_cast<std::uint32_t>(free - cluster_.nodes.begin());
    SW_TRY_ASSIGN(const std::uint32_t node, Find(name));
    cluster_.nodes[node].alive = true;
    return {};
  }

  /// \returns the node that the machine leaves
  Result<std::uint32_t> Remove(const std::string& name) {
    SW_TRY_ASSIGN(const std::uint32_t node, Find(name));
    cluster_.nodes[node].alive = false;
    if (places_) at_.erase(name);
    return node;
  }

  const Cluster& cluster() const { return cluster_; }

 private:
  Result<std::uint32_t> Find(const std::string& name) const {
    const auto at = at_.find(name);
    if (at != at_.end()) return at->second;
    return Fail(Errc::kBadInput, "events: node \"", name, "\" is not in the cluster");
  }

  Cluster cluster_;
  const bool places_;
  std::map<std::string, std::uint32_t> at_;
  std::vector<std::string> early_;
};

/// Empties the slots of a node after its state is lost.
void Clear(Placement* placement, const Cluster& cluster, std::uint32_t node) {
  for (std::uint32_t l = 0; l < placement->layers; ++l) {
    for (std::uint32_t d = cluster.device_first(node); d < cluster.device_first(node + 1); ++d) {
      const auto slots = placement->slots(l, d);
      std::fill(slots.begin(), slots.end(), kNoExpert);
    }
  }
}

/// Returns true if a GPU has an expert in any layer.
bool HoldsExperts(const Placement& placement, std::uint32_t device) {
  for (std::uint32_t l = 0; l < placement.layers; ++l) {
    const auto slots = placement.slots(l, device);
    if (std::any_of(slots.begin(), slots.end(), [](auto e) { return e != kNoExpert; })) return true;
  }
  return false;
}

/// Returns true if a GPU of a node has an expert in any layer.
bool NodeHoldsExperts(const Placement& placement, const Cluster& cluster, std::uint32_t node) {
  for (std::uint32_t d = cluster.device_first(node); d < cluster.device_first(node + 1); ++d) {
    if (HoldsExperts(placement, d)) return true;
  }
  return false;
}

std::uint64_t ExpertsLost(const Placement& placement) {
  std::uint64_t lost = 0;
  for (std::uint32_t l = 0; l < placement.layers; ++l) {
    std::vector<bool> there(placement.ExpertsOf(l), false);
    for (const std::int32_t expert : placement.layer(l)) {
      if (expert != kNoExpert) there[static_cast<std::size_t>(expert)] = true;
    }
    lost += static_cast<std::uint64_t>(std::count(there.begin(), there.end(), false));
  }
  return lost;
}

std::uint64_t ReplicaCount(const Placement& placement) {
  return static_cast<std::uint64_t>(
      std::count_if(placement.slot_expert.begin(), placement.slot_expert.end(),
                    [](std::int32_t expert) { return expert != kNoExpert; }));
}

std::uint32_t GpusUsed(const Placement& placement) {
  std::uint32_t used = 0;
  for (std::uint32_t d = 0; d < placement.device_count(); ++d) {
    if (HoldsExperts(placement, d)) ++used;
  }
  return used;
}

class Run {
 public:
  Run(comm::Comm& comm, const Strategy& strategy, const token_counts::TokenTrace& trace,
      const Cluster& cluster, const std::vector<NodeEvent>& events,
      const SimulationOptions& options)
      : comm_(comm),
        strategy_(strategy),
        trace_(trace),
        events_(events),
        options_(options),
        machines_(cluster, events, options.nodes_are_places) {
    result_.strategy = strategy.name;
    const auto iterations =
        static_cast<double>(trace.records.back().iteration - trace.records.front().iteration);
    const auto span = static_cast<double>(events.back().time_ms - events.front().time_ms);
    iteration_ms_ = options.iteration_ms;
    if (iteration_ms_ <= 0) iteration_ms_ = iterations > 0 && span > 0 ? span / iterations : 1;
  }

  Result<SimulationResult> Play(Sink& sink) {
    SW_TRY(machines_.Start());
    std::size_t next = 0;
    while (true) {
      const std::uint64_t stop = sink.stop_requested() ? 1 : 0;
      SW_TRY_ASSIGN(const std::uint64_t stops, comm_.AllReduceOr(stop));
      if (stops != 0) return Fail(Errc::kStopped, "stopped between two events");
      const std::optional<std::uint64_t> time = NextTime(next);
      if (!time) break;
      SW_TRY(PlayMoment(*time, &next));
    }
    Sum();
    return std::move(result_);
  }

 private:
  /// Returns the next time of a plan, or nothing after the last event.
  std::optional<std::uint64_t> NextTime(std::size_t next) const {
    if (next == events_.size()) return std::nullopt;
    const std::uint64_t event = events_[next].time_ms;
    if (options_.rebalance_every == 0 || !current_) return event;
    const double period = iteration_ms_ * static_cast<double>(options_.rebalance_every);
    const auto rebalance =
        planned_ms_ + std::max<std::uint64_t>(1, static_cast<std::uint64_t>(period));
    return std::min(event, rebalance);
  }

  Status PlayMoment(std::uint64_t time, std::size_t* next) {
    SimulationStep step;
    step.time_ms = time;
    for (; *next < events_.size() && events_[*next].time_ms == time; ++*next) {
      const NodeEvent& event = events_[*next];
      if (event.add) {
        SW_TRY(machines_.Add(event.node));
        ++step.nodes_added;
        continue;
      }
      SW_TRY_ASSIGN(const std::uint32_t node, machines_.Remove(event.node));
      ++step.nodes_removed;
      if (!current_) continue;
      step.failure = step.failure || NodeHoldsExperts(*current_, machines_.cluster(), node);
      Clear(&*current_, machines_.cluster(), node);
    }
    step.nodes_live = machines_.cluster().live_nodes();
    if (current_) step.experts_lost = ExpertsLost(*current_);
    const bool restart = options_.recovery == Recovery::kRestart && step.failure;
    if (restart || step.experts_lost > 0) LeaveState();
    planned_ms_ = time;
    SW_TRY(PlanMoment(&step));
    result_.steps.push_back(std::move(step));
    return {};
  }

  /// Makes the next plan read all state from a checkpoint.
  void LeaveState() {
    current_.reset();
    restore_ = true;
  }

  /// Returns the cluster of the next plan.
  Cluster UsableCluster(const SimulationStep& step) const {
    Cluster cluster = machines_.cluster();
    const bool survivors = options_.recovery == Recovery::kSurvivors && step.nodes_added == 0;
    for (std::uint32_t n = 0; survivors && current_ && n < cluster.node_count(); ++n) {
      cluster.nodes[n].alive = cluster.nodes[n].alive && NodeHoldsExperts(*current_, cluster, n);
    }
    return cluster;
  }

  Result<TokenCounts> LoadsAt(SimulationStep* step) const {
    const std::uint64_t first = trace_.records.front().iteration;
    const auto passed = static_cast<double>(step->time_ms - events_.front().time_ms);
    const double iteration = std::floor(passed / iteration_ms_);
    const std::uint64_t last = trace_.records.back().iteration;
    step->iteration = iteration >= static_cast<double>(last - first)
                          ? last
                          : first + static_cast<std::uint64_t>(iteration);
    token_counts::LoadWindow window = options_.window;
    window.at = step->iteration;
    SW_TRY_ASSIGN(const std::size_t record, token_counts::RecordAt(trace_, step->iteration));
    for (std::uint64_t& records : window.windows) {
      records = std::min<std::uint64_t>(records, record + 1);
    }
    return token_counts::Pick(trace_, window);
  }

  Status PlanMoment(SimulationStep* step) {
    SW_TRY_ASSIGN(const TokenCounts loads, LoadsAt(step));
    const Cluster cluster = UsableCluster(*step);
    if (cluster.live_slots() < loads.experts) {
      step->reason = std::to_string(loads.experts) + " experts do not fit in " +
                     std::to_string(cluster.live_slots()) + " live slots";
      return {};
    }
    if (current_) {
      step->imbalance_before =
          Measure(*current_, loads, cluster, options_.plan.stop).imbalance_mean;
    }
    const double start = options_.seconds();
    Result<StrategyResult> planned =
        PlanEachSize(loads, current_ ? &*current_ : nullptr,
                     [&](const TokenCounts& group, const Placement* current) {
                       return PlanOnRanks(comm_, strategy_, group, cluster, current, options_.plan);
                     });
    step->plan_seconds = options_.seconds() - start;
    if (!planned && planned.error().code == Errc::kInfeasible) {
      step->reason = planned.error().message;
      return {};
    }
    if (!planned) return tl::unexpected<Error>(std::move(planned).error());
    if (Stopped(options_.plan.stop)) return {};
    Rules rules;
    rules.cluster_slots = !planned->owners.has_value();
    SW_TRY(Validate(planned->placement, loads, cluster, rules));
    step->imbalance = Measure(planned->placement, loads, cluster).imbalance_mean;
    step->gpus_used = GpusUsed(planned->placement);
    step->imbalance_used = step->imbalance * step->gpus_used / cluster.live_devices();
    for (const LayerNotes& note : planned->notes) {
      const bool first = step->copies_min == 0;
      step->copies_min = first ? note.copies_min : std::min(step->copies_min, note.copies_min);
    }
    // Copies for one iteration have no state: survival depends on the owners.
    Placement state = planned->owners ? *std::move(planned->owners) : std::move(planned->placement);
    if (options_.recovery == Recovery::kRestart && current_ &&
        GpusUsed(state) > GpusUsed(*current_)) {
      LeaveState();
    }
    const Status moved = Move(state, cluster, step);
    // All ranks stop together, before the next step.
    if (!moved && moved.error().code == Errc::kStopped) return {};
    SW_TRY(moved);
    current_ = std::move(state);
    return {};
  }

  Status Move(const Placement& next, const Cluster& cluster, SimulationStep* step) {
    if (!current_) {
      step->state = restore_ ? SimulationStep::State::kRestored : SimulationStep::State::kStarted;
      if (restore_) step->restored_bytes = ReplicaCount(next) * cluster.expert_bytes;
      restore_ = false;
      return {};
    }
    MigrationOptions options;
    options.stop = options_.plan.stop;
    SW_TRY_ASSIGN(const Migration migration, PlanMigration(*current_, next, cluster, options));
    step->state = SimulationStep::State::kMigrated;
    step->transfers = migration.transfers.size();
    step->migrated = migration.inter_node_transfers;
    step->bytes = migration.bytes;
    step->inter_node_bytes = migration.inter_node_bytes;
    step->rounds = migration.rounds;
    step->migration_seconds = migration.seconds;
    return {};
  }

  void Sum() {
    std::optional<std::uint64_t> started;
    for (std::size_t i = 0; i < result_.steps.size(); ++i) {
      const SimulationStep& step = result_.steps[i];
      const bool planned = step.state != SimulationStep::State::kStalled;
      if (planned && !started) started = step.time_ms;
      const std::uint64_t end =
          i + 1 < result_.steps.size() ? result_.steps[i + 1].time_ms : step.time_ms;
      if (started && !planned) result_.stalled_ms += end - step.time_ms;
      result_.failures += step.failure ? 1 : 0;
      result_.survived += step.failure && step.experts_lost == 0 ? 1 : 0;
      result_.restores += step.state == SimulationStep::State::kRestored ? 1 : 0;
      result_.stalls += started && !planned ? 1 : 0;
      result_.transfers += step.transfers;
      result_.migrated += step.migrated;
      result_.bytes += step.bytes;
      result_.inter_node_bytes += step.inter_node_bytes;
      result_.restored_bytes += step.restored_bytes;
      result_.migration_seconds += step.migration_seconds;
      if (!planned) continue;
      ++result_.plans;
      result_.plan_seconds_mean += step.plan_seconds;
      result_.plan_seconds_max = std::max(result_.plan_seconds_max, step.plan_seconds);
      result_.imbalance_mean += step.imbalance;
    }
    if (started) result_.time_ms = result_.steps.back().time_ms - *started;
    if (result_.plans == 0) return;
    result_.plan_seconds_mean /= static_cast<double>(result_.plans);
    result_.imbalance_mean /= static_cast<double>(result_.plans);
  }

  comm::Comm& comm_;
  const Strategy& strategy_;
  const token_counts::TokenTrace& trace_;
  const std::vector<NodeEvent>& events_;
  const SimulationOptions& options_;
  Machines machines_;
  double iteration_ms_ = 1;
  std::optional<Placement> current_;
  bool restore_ = false;  // the next plan reads all state from a checkpoint
  std::uint64_t planned_ms_ = 0;
  SimulationResult result_;
};

}  // namespace

Result<SimulationResult> SimulateFailures(comm::Comm& comm, const Strategy& strategy,
                                          const token_counts::TokenTrace& trace,
                                          const Cluster& cluster,
                                          const std::vector<NodeEvent>& events,
                                          const SimulationOptions& options, Sink& sink) {
  return Run(comm, strategy, trace, cluster, events, options).Play(sink);
}

}  // namespace shardwright::placement
