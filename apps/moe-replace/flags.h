#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/result.h"
#include "cli/app.h"
#include "moe/judge.h"
#include "moe/load_trace.h"
#include "moe/plan_text.h"
#include "moe/replay.h"
#include "moe/types.h"

namespace shardwright::apps {

/// What the command is asked to do.
enum class Task : std::uint8_t { kPlan, kCompare, kEvents, kEvaluate };

/// The flags of moe-replace.
struct MoeFlags {
  std::string loads;
  std::string cluster;
  std::uint64_t nodes = 0;
  std::uint64_t gpus = 0;
  std::uint64_t slots = kNoSlots;
  std::uint64_t expert_bytes = 0;
  std::string strategy = "best";
  std::string output;
  moe::PlanFormat format = moe::PlanFormat::kPlan;
  std::string old_plan;
  std::uint64_t faults = 0;
  std::uint64_t at = kNoIteration;
  std::uint64_t window = 1;
  std::string layers;
  std::uint64_t measured_at = kNoIteration;
  bool compare = false;
  std::string events;
  double iteration_seconds = 0;
  std::uint64_t rebalance_every = 0;
  std::string evaluate;
  std::string report;
  double node_failure = 0;
  std::uint64_t failures = 16;
  bool forward = false;
  moe::Options options;

  static constexpr std::uint64_t kNoSlots = UINT64_MAX;
  static constexpr std::uint64_t kNoIteration = UINT64_MAX;

  /// Declares the flags, and the rules between them.
  void AddTo(cli::App& app);

  Task task() const;
  /// Whether the cluster is told by numbers: its nodes are places without names of their own.
  bool short_cluster() const { return cluster.empty(); }
  /// What to read of the loads.
  Result<moe::LoadWindow> Window() const;
  /// The cluster that the flags tell. \pre gives_cluster()
  Result<moe::Cluster> ReadCluster(std::uint32_t layer_count) const;
  /// False for --evaluate of a plan that tells its own.
  bool gives_cluster() const { return !cluster.empty() || nodes != 0; }
  moe::JudgeOptions Judging(std::uint64_t seed) const;

 private:
  void AddClusterFlags(cli::App& app);
  void AddLoadFlags(cli::App& app);
  void AddPlanFlags(cli::App& app);
  void AddTaskFlags(cli::App& app);
  Status Check(const cli::App& app);
  Status CheckTask(const cli::App& app) const;
  Status CheckStrategy(const cli::App& app) const;

  std::string objective_;
  // Numbers that the library keeps in smaller types.
  std::uint64_t groups_ = 1;
  std::uint64_t effort_ = 4;
  std::uint64_t overlap_ = kNoIteration;
  std::uint64_t spare_ = kNoIteration;
};

}  // namespace shardwright::apps
