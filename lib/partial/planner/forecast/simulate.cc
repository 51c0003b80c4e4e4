// SPDX-License-Identifier: Apache-2.0
#include "partial/planner/forecast/simulate.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <utility>

#include "partial/planner/forecast/overhead.h"
#include "partial/select/sharding/saved_model.h"
#include "support/base/checked.h"
#include "support/base/limits.h"

namespace shardwright::partial {
namespace {

/// Node of an expert that was never saved. A fault destroys a copy if it hits the saving node.
constexpr std::uint32_t kNoNode = std::numeric_limits<std::uint32_t>::max();

/// Contents of the checkpoints in memory and storage. A fault resets them to the newest one.
struct Levels {
  LevelState memory;
  LevelState storage;
  PerExpert<std::uint32_t> node;  // [layer][expert]: node with the copy in memory
  std::uint64_t iteration = 0;    // of the newest checkpoint; 0: none
};

Status Check(const SimulationInput& input) {
  const LayerExperts experts = input.map.experts();
  SW_TRY(ValidateExperts(experts));
  SW_TRY(Validate(input.ranks, input.map.ep));
  if (input.tokens.empty())
    return Fail(Errc::kUsage, "expected at least one iteration to simulate, found none");
  if (input.interval == 0 || input.ranks_per_node == 0) {
    return Fail(Errc::kUsage, "a checkpoint every ", input.interval, " iterations, ",
                input.ranks_per_node, " ranks per node: expected at least 1 of each");
  }
  const std::uint64_t nodes = CeilDiv(input.ranks.dp, input.ranks_per_node);
  std::uint64_t before = 0;
  for (const SimulatedFault& fault : input.faults) {
    if (fault.iteration < before || fault.iteration == 0 || fault.iteration > input.tokens.size()) {
      return Fail(Errc::kUsage, "fault at iteration ", fault.iteration, ", expected ",
                  std::max<std::uint64_t>(before, 1), " to ", input.tokens.size());
    }
    before = fault.iteration;
    for (std::uint32_t node : fault.nodes) {
      if (node < nodes) continue;
      return Fail(Errc::kUsage, "fault at iteration ", fault.iteration, ": node ", node,
                  " does not exist, there are ", nodes);
    }
  }
  return {};
}

/// Simulates one policy on the trace of tokens.
class Run {
 public:
  Run(const SimulationInput& input, const SimulatedPolicy& policy, TokenHistory history,
      const StopCheck& stop)
      : input_(input), stop_(stop), experts_(input.map.experts()), history_(std::move(history)) {
    row_.policy = policy;
    ledger_ = LossLedger::Make(experts_);
    k_snapshot_ = policy.k_snapshot;
    k_persist_ = policy.dynamic_limit ? policy.k_snapshot : policy.k_persist;
    if (policy.rule) chains_ = GradientChains::Make(experts_);
    levels_.memory = MakeLevelState(experts_, k_snapshot_);
    levels_.storage = MakeLevelState(experts_, k_persist_);
    for (std::uint32_t n : experts_) levels_.node.emplace_back(n, kNoNode);
    newest_ = levels_;
  }

  Result<SimulationRow> Execute() {
    SW_TRY_ASSIGN(saved_, SavedModelOf(input_.model, input_.keep, input_.map, input_.ranks, 0));
    saved_.options.split_above = input_.split_above;
    whole_run_ = ObservedTokens(history_, input_.tokens.size());
    if (row_.policy.dynamic_limit) SW_TRY(StartDynamicK(*row_.policy.dynamic_limit));
    SW_TRY_ASSIGN(iteration_log_bytes_, LogBytes(input_.model.expert));
    logged_.assign(input_.tokens.size() + 1, 0);
    std::size_t fault = 0;
    for (std::uint64_t i = 1; i <= input_.tokens.size(); ++i) {
      ++step_;
      SW_TRY(CheckStop(stop_));
      SW_TRY(CountTokens(&levels_.memory, input_.tokens[i - 1]));
      SW_TRY(CountTokens(&levels_.storage, input_.tokens[i - 1]));
      // The log begins with the first checkpoint.
      if (Logs() && levels_.iteration > 0) {
        logged_[i] = LoggedNow();
        SW_TRY(EnterLog(logged_[i], 1));
      }
      if (i % input_.interval == 0) SW_TRY(Checkpoint(i));
      if (fault < input_.faults.size() && input_.faults[fault].iteration == i) {
        SW_TRY(Recover(input_.faults[fault++]));
        i = levels_.iteration;
      }
    }
    SW_TRY(Finish());
    return std::move(row_);
  }

 private:
  bool Replays() const { return row_.policy.policy == Policy::kReplay; }
  /// Returns true if gradients are logged in every iteration.
  bool Logs() const { return Replays() && !row_.policy.rule; }
  /// Returns the bytes logged per iteration: gradients of experts not in the next checkpoint.
  std::uint64_t LoggedNow() const {
    return next_ ? next_->gradient_bytes / input_.interval : iteration_log_bytes_;
  }
  ReplayRates Rates() const {
    return {input_.snapshot_bytes_per_s, input_.storage_bytes_per_s, input_.replay_elems_per_s};
  }

  /// Adds `bytes` of gradients, logged in equal parts by `iterations`, to the results.
  Status EnterLog(std::uint64_t bytes, std::uint64_t iterations) {
    SW_TRY_ASSIGN(row_.log_bytes, CheckedAdd(row_.log_bytes, bytes));
    const double each = static_cast<double>(bytes) / static_cast<double>(iterations);
    const double copied = Logs() ? static_cast<double>(iteration_log_bytes_) : each;
    const double stall_s = LogStall(copied, each, input_.ranks.dp, Rates(), input_.iteration_s);
    row_.log_stall_s = std::max(row_.log_stall_s, stall_s);
    row_.overhead_s += stall_s * static_cast<double>(iterations);
    most_logged_ =
        std::max(most_logged_, Logs() ? iteration_log_bytes_ : CeilDiv(bytes, iterations));
    return {};
  }

  /// Plans the state and gradients that a rule sends at a checkpoint.
  Result<TwoLevelSelection> Transfer(std::uint64_t iteration, GradientRule rule) {
    GradientOptions options{rule, input_.interval, input_.full_every, 0};
    if (rule == GradientRule::kLeast) options.budget_bytes = input_.gradient_budget;
    SW_TRY_ASSIGN(TransferPlan plan, PlanTransfers(chains_, input_.model.expert,
                                                   SelectAll(experts_), iteration, options));
    SW_TRY(EnterTransfers(&chains_, plan));
    SW_TRY(EnterLog(plan.gradient_bytes, input_.interval));
    row_.window = std::max(row_.window, LongestChain(chains_) + input_.interval);
    return TwoLevelSelection{plan.full, plan.full};
  }

  /// Returns the work to replay experts from `version` to the newest checkpoint after a fault.
  /// The log begins at the oldest version in storage.
  ReplayWork WorkOf(const Counts& version, std::uint64_t fault) const {
    ReplayWork work;
    if (newest_.iteration == 0) return work;
    std::uint64_t oldest = newest_.iteration;
    for (std::size_t m = 0; m < experts_.size(); ++m) {
      for (std::uint32_t e = 0; e < experts_[m]; ++e) {
        oldest = std::min(oldest, newest_.storage.version[m][e]);
        work.chain_bytes += static_cast<double>(newest_.iteration - version[m][e]) *
                            static_cast<double>(LogBytes(input_.model.expert[m][e]));
      }
    }
    for (std::uint64_t i = oldest + 1; i <= fault; ++i) {
      const bool was = i <= newest_.iteration;
      work.log_bytes += static_cast<double>(was ? logged_[i] : LoggedNow());
    }
    return work;
  }

  /// Updates the longest restart until the next checkpoint, and the window of saved experts.
  void NoteRecovery() {
    if (row_.policy.rule) return;
    double seconds = input_.restart_s;
    if (Logs()) {
      const std::uint64_t next = newest_.iteration + input_.interval;
      const ReplayWork work = WorkOf(newest_.storage.version, next);
      seconds += ReplaySeconds(work, input_.ranks.dp, Rates());
      for (const auto& layer : newest_.storage.version) {
        row_.window = std::max(row_.window, next - *std::min_element(layer.begin(), layer.end()));
      }
    }
    row_.recovery_s = std::max(row_.recovery_s.value_or(0), seconds);
  }

  /// Selects the experts that policy gradient-log saves in full at a checkpoint.
  Result<TransferPlan> PlanReplay(std::uint64_t iteration) const {
    const ReplayPoint point{iteration,         input_.interval,          std::uint64_t{0},
                            input_.full_every, row_.policy.budget_bytes, &input_.model};
    return SelectReplay(input_.map, levels_.memory.cursor,
                        ChainStarts(levels_.memory, levels_.storage), k_snapshot_, point);
  }

  Result<TwoLevelSelection> Select(std::uint64_t iteration) {
    if (row_.policy.rule) return Transfer(iteration, *row_.policy.rule);
    if (levels_.iteration == 0 && input_.first_full) {
      return TwoLevelSelection{SelectAll(experts_), SelectAll(experts_)};
    }
    if (Logs()) {
      SW_TRY_ASSIGN(const TransferPlan plan, PlanReplay(iteration));
      return TwoLevelSelection{plan.full, plan.full};
    }
    SelectionOptions options{row_.policy.policy, k_snapshot_, k_persist_, row_.policy.max_age, 0};
    options.budget = std::uint64_t{k_persist_} * experts_.size();
    return SelectTwoLevels(input_.map, levels_.memory, levels_.storage, options);
  }

  Status Checkpoint(std::uint64_t iteration) {
    const bool whole = levels_.iteration == 0 && input_.first_full;
    SW_TRY_ASSIGN(const TwoLevelSelection chosen, Select(iteration));
    SW_TRY(NoteRisk(chosen.persist, iteration));
    SW_TRY_ASSIGN(const CheckpointSize snapshot,
                  SizeOfCheckpoint(input_.model, chosen.snapshot, input_.keep));
    SW_TRY_ASSIGN(const CheckpointSize persist,
                  SizeOfCheckpoint(input_.model, chosen.persist, input_.keep));
    SW_TRY_ASSIGN(row_.snapshot_bytes, CheckedAdd(row_.snapshot_bytes, snapshot.bytes));
    SW_TRY_ASSIGN(row_.persist_bytes, CheckedAdd(row_.persist_bytes, persist.bytes));
    SW_TRY_ASSIGN(const SavePlan memory, PlanSave(saved_, chosen.snapshot));
    SW_TRY_ASSIGN(const SavePlan storage, PlanSave(saved_, chosen.persist));
    if (!whole) most_snapshot_ = std::max(most_snapshot_, snapshot.bytes);
    if (!whole && storage.bottleneck > row_.bottleneck_bytes) {
      row_.bottleneck_bytes = storage.bottleneck;
      row_.bound_bytes = storage.bound;
    }
    if (input_.snapshot_bytes_per_s > 0) {
      const double snapshot_s =
          static_cast<double>(memory.bottleneck) / input_.snapshot_bytes_per_s;
      const double stall_s = SaveStall(snapshot_s, input_.forward_backward_s);
      if (!whole) row_.stall_s = std::max(row_.stall_s, stall_s);
      row_.overhead_s += stall_s;
    }
    for (const ExpertOwner& owner : memory.experts) {
      levels_.node[static_cast<std::size_t>(owner.module.layer)]
                  [static_cast<std::size_t>(owner.module.expert)] =
          owner.rank / input_.ranks_per_node;
    }
    SW_TRY(CompleteSave(&levels_.memory, BeginSave(levels_.memory, chosen.snapshot, iteration)));
    SW_TRY(CompleteSave(&levels_.storage, BeginSave(levels_.storage, chosen.persist, iteration)));
    levels_.iteration = iteration;
    ++row_.checkpoints;
    row_.run.checkpoints.push_back({iteration, chosen.snapshot, chosen.persist});
    newest_ = levels_;
    if (Logs()) {
      SW_TRY_ASSIGN(next_, PlanReplay(iteration + input_.interval));
    }
    NoteRecovery();
    return {};
  }

  /// Records the share of unsaved tokens that remains unsaved after a checkpoint.
  Status NoteRisk(const Selection& persisted, std::uint64_t iteration) {
    // Gradients are durable before the checkpoint, so no tokens are at risk.
    if (Replays()) {
      row_.risk.push_back({step_, iteration, 0});
      return {};
    }
    SW_TRY_ASSIGN(const TokensAtRisk risk, RiskOf(Unsaved(levels_.storage), persisted));
    row_.risk.push_back({step_, iteration, risk.fraction()});
    risk_sum_ += risk.fraction();
    row_.risk_max = std::max(row_.risk_max, risk.fraction());
    return {};
  }

  Status Recover(const SimulatedFault& fault) {
    row_.replayed_iterations += fault.iteration - newest_.iteration;
    row_.overhead_s += input_.restart_s + static_cast<double>(fault.iteration - newest_.iteration) *
                                              input_.iteration_s;
    SimulatedRun::Fault entry;
    entry.iteration = fault.iteration;
    entry.resume = newest_.iteration;
    entry.lost.resize(experts_.size());
    Levels back = newest_;
    Counts version = back.memory.version;
    for (std::size_t m = 0; m < experts_.size(); ++m) {
      for (std::uint32_t e = 0; e < experts_[m]; ++e) {
        const bool gone =
            std::find(fault.nodes.begin(), fault.nodes.end(), back.node[m][e]) != fault.nodes.end();
        if (!gone) continue;
        entry.lost[m].push_back(e);
        version[m][e] = back.storage.version[m][e];
      }
    }
    Counts restored = version;
    if (Replays()) {
      if (Logs()) {
        ReplayWork work = WorkOf(version, fault.iteration);
        SW_TRY_ASSIGN(const std::uint64_t held, AppendBuffered(fault));
        work.log_bytes += static_cast<double>(held);
        row_.overhead_s += ReplaySeconds(work, input_.ranks.dp, Rates());
      }
      restored = MakeCounts(experts_, entry.resume);
    }
    SW_TRY_ASSIGN(const FaultLoss loss, ledger_.Charge(history_, restored, entry.resume));
    SW_TRY(ForgetLost(&back.storage, loss.lost));
    // Memory now contains the state that training resumes with: surviving copies, and copies
    // loaded from storage for experts of lost nodes.
    back.memory.tokens = back.storage.tokens;
    back.memory.covered = back.storage.tokens;
    back.memory.version = version;
    SW_TRY(EnterFault(loss, entry));
    entry.layer = loss.layer;
    row_.run.faults.push_back(std::move(entry));
    levels_ = std::move(back);
    newest_ = levels_;
    return {};
  }

  /// Logs the buffered gradients after a software fault, which leaves the agents running. Until
  /// the next checkpoint, gradients of all experts are then logged.
  /// \returns the bytes of the buffered gradients
  Result<std::uint64_t> AppendBuffered(const SimulatedFault& fault) {
    std::uint64_t bytes = 0;
    if (fault.nodes.empty() && newest_.iteration > 0) {
      const std::uint64_t held = iteration_log_bytes_ - LoggedNow();
      SW_TRY_ASSIGN(bytes, CheckedMul(held, fault.iteration - newest_.iteration));
      SW_TRY_ASSIGN(row_.log_bytes, CheckedAdd(row_.log_bytes, bytes));
    }
    next_.reset();
    return bytes;
  }

  Status StartDynamicK(double limit) {
    const std::uint32_t experts = *std::max_element(experts_.begin(), experts_.end());
    DynamicRun& run = row_.dynamic.emplace();
    SW_TRY_ASSIGN(run.state, MakeDynamicK(experts, k_snapshot_, limit, false));
    run.k = {{0, 0, k_snapshot_}};
    return {};
  }

  /// Charges dynamic K for a fault. Resuming from a checkpoint does not undo the charge.
  Status EnterFault(const FaultLoss& loss, const SimulatedRun::Fault& fault) {
    if (!row_.dynamic) return {};
    DynamicRun& run = *row_.dynamic;
    SW_TRY_ASSIGN(const LossSummary cost, SummarizeLoss(loss.layer, whole_run_));
    SW_TRY(EnterRecovery(&run.state, cost.plt));
    if (run.state.k == k_snapshot_) return {};
    k_snapshot_ = k_persist_ = run.state.k;
    run.k.push_back({step_, fault.iteration, run.state.k});
    return {};
  }

  void FinishDynamicK() {
    if (!row_.dynamic) return;
    row_.dynamic->faults_covered = FaultsCovered(
        row_.dynamic->state, EvenFaultCost(experts_, input_.interval, input_.tokens.size()));
  }

  Status Finish() {
    FinishDynamicK();
    SW_TRY_ASSIGN(const CheckpointSize all,
                  SizeOfCheckpoint(input_.model, SelectAll(experts_), input_.keep));
    row_.memory_bytes = all.bytes;
    for (const std::uint64_t more : {most_snapshot_, most_logged_}) {
      SW_TRY_ASSIGN(const std::uint64_t twice, CheckedMul(more, 2));
      SW_TRY_ASSIGN(row_.memory_bytes, CheckedAdd(row_.memory_bytes, twice));
    }
    SW_TRY_ASSIGN(row_.loss, SummarizeLoss(ledger_.layer_lost, whole_run_));
    if (row_.checkpoints > 0) {
      row_.risk_mean = risk_sum_ / static_cast<double>(row_.checkpoints);
    }
    return {};
  }

  const SimulationInput& input_;
  const StopCheck& stop_;
  LayerExperts experts_;
  TokenHistory history_;
  LayerTokens whole_run_;
  LossLedger ledger_;
  std::uint32_t k_snapshot_ = 1;  // current values: dynamic K raises both
  std::uint32_t k_persist_ = 1;
  std::uint64_t step_ = 0;  // iterations run, including repeated ones
  Levels levels_;
  Levels newest_;  // state right after the newest checkpoint
  SavedModel saved_;
  double risk_sum_ = 0;
  GradientChains chains_;                  // for policies with a rule
  std::uint64_t iteration_log_bytes_ = 0;  // gradients of all experts
  std::optional<TransferPlan> next_;       // next checkpoint's plan, if Logs()
  std::vector<std::uint64_t> logged_;      // by iteration: bytes in the log
  std::uint64_t most_logged_ = 0;          // largest per iteration
  std::uint64_t most_snapshot_ = 0;        // except a full first one
  SimulationRow row_;
};

Result<TokenHistory> HistoryOf(const SimulationInput& input, const StopCheck& stop) {
  SW_TRY_ASSIGN(TokenHistory history, TokenHistory::Make(input.map.experts()));
  for (std::size_t i = 0; i < input.tokens.size(); ++i) {
    SW_TRY(CheckStop(stop));
    SW_TRY(history.Add(i + 1, input.tokens[i]));
  }
  return history;
}

}  // namespace

Result<std::vector<SimulatedFault>> MakeFaults(double rate, std::uint64_t first, std::uint64_t last,
                                               std::uint32_t nodes, double node_share,
                                               std::uint64_t seed) {
  const auto is_share = [](double value) { return value >= 0 && value <= 1; };
  if (!is_share(rate) || !is_share(node_share)) {
    return Fail(Errc::kUsage, "a fault rate of ", rate, " and a node share of ", node_share,
                ": expected numbers from 0 to 1");
  }
  if (nodes == 0 || first == 0 || first > last || last - first >= limits::kMoeEvents) {
    return Fail(Errc::kUsage, "faults of ", nodes, " nodes in iterations ", first, " to ", last,
                ": expected at least one node and iteration");
  }
  std::mt19937_64 random(seed);
  // Standard distributions differ between platforms: draw three raw numbers per iteration.
  const auto unit = [&random] { return static_cast<double>(random() >> 11) * 0x1p-53; };
  std::vector<SimulatedFault> faults;
  for (std::uint64_t i = first; i <= last; ++i) {
    const bool fails = unit() < rate;
    const bool takes_node = unit() < node_share;
    const auto node = static_cast<std::uint32_t>(random() % nodes);
    if (!fails) continue;
    faults.push_back({i, {}});
    if (takes_node) faults.back().nodes.push_back(node);
  }
  return faults;
}

std::vector<SimulatedPolicy> AllPolicies(std::uint32_t experts) {
  std::vector<SimulatedPolicy> policies;
  for (Policy policy :
       {Policy::kSequential, Policy::kLoadAware, Policy::kBudget, Policy::kBudgetGlobal}) {
    for (std::uint64_t k = 1; k < experts; k *= 2) {
      const auto saved = static_cast<std::uint32_t>(k);
      policies.push_back({policy, saved, saved, std::nullopt});
    }
  }
  policies.push_back({Policy::kFull, experts, experts, std::nullopt});
  return policies;
}

Result<std::vector<Counts>> CountsOfTrace(const token_counts::TokenTrace& trace) {
  const LayerExperts experts(trace.layer_id.size(), trace.experts);
  SW_TRY(ValidateExperts(experts));
  std::vector<Counts> tokens;
  for (const token_counts::TokenTrace::Record& record : trace.records) {
    if (record.tokens.size() != experts.size() * trace.experts) {
      return Fail(Errc::kBadInput, "iteration ", record.iteration, ": ", record.tokens.size(),
                  " counts, expected ", experts.size() * trace.experts);
    }
    Counts& counts = tokens.emplace_back();
    for (std::size_t m = 0; m < experts.size(); ++m) {
      const auto first = record.tokens.begin() + static_cast<std::ptrdiff_t>(m * trace.experts);
      counts.emplace_back(first, first + trace.experts);
    }
  }
  return tokens;
}

Result<SimulationRow> Simulate(const SimulationInput& input, const SimulatedPolicy& policy,
                               const StopCheck& stop) {
  SW_TRY(Check(input));
  const bool replays = policy.policy == Policy::kReplay;
  if (replays && !input.first_full) {
    return Fail(Errc::kUsage,
                "gradients can be replayed only on saved experts, so the first checkpoint "
                "must have all experts");
  }
  if (policy.rule && !replays)
    return Fail(Errc::kUsage, "a gradient rule requires policy gradient-log");
  SW_TRY_ASSIGN(TokenHistory history, HistoryOf(input, stop));
  return Run(input, policy, std::move(history), stop).Execute();
}

Result<std::vector<SimulationRow>> SimulateAll(const SimulationInput& input,
                                               std::span<const SimulatedPolicy> policies,
                                               const StopCheck& stop) {
  std::vector<SimulationRow> rows;
  for (const SimulatedPolicy& policy : policies) {
    auto row = Simulate(input, policy, stop);
    if (!row && row.error().code == Errc::kStopped) {
      return tl::unexpected<Error>(std::move(row).error());
    }
    if (!row) return Within(Name(policy.policy), std::move(row).error());
    rows.push_back(*std::move(row));
  }
  return rows;
}

}  // namespace shardwright::partial
