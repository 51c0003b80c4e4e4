// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "partial/planner/forecast/simulate.h"
#include "partial/planner/forecast/simulate_page.h"
#include "partial/planner/job.h"
#include "support/base/result.h"
#include "support/base/sink.h"

namespace shardwright::partial {

/// A trace that is played with policies; the fields are the flags of pec-save simulate.
struct SimulateRequest {
  JobRequest job;
  std::string tokens;        ///< file of loads
  double fault_rate = 0.02;  ///< faults per iteration, drawn from the seed
  double node_share = 1;     ///< of those, what takes a node's memory
  std::uint64_t seed = 0;
  std::string fault_file;                  ///< these faults in place of drawn ones; empty: none
  std::uint64_t interval = 10;             ///< iterations between checkpoints
  bool partial_start = false;              ///< the first checkpoint is a selection too
  double plt_limit = 0.0375;               ///< what the best row may lose
  std::optional<Policy> policy;            ///< absent: all
  std::optional<std::uint64_t> k;          ///< absent: 1, 2, 4, ...
  std::optional<std::uint64_t> k_persist;  ///< absent: k
  std::optional<std::uint64_t> max_age;
  std::optional<double> dynamic_limit;  ///< one more row, with K that grows within this PLT
  bool gradients = false;               ///< a row more for each GradientRule
  std::uint64_t full_every = 500;       ///< as GradientOptions and ReplayPoint
  std::uint64_t budget_bytes = 0;       ///< as ReplayPoint
  std::uint64_t gradient_budget = 0;    ///< as GradientOptions, for kLeast
};

/// A trace as it was played.
struct Simulation {
  Job job;
  SimulationInput input;
  std::vector<SimulationRow> rows;
  std::optional<std::size_t> best;  ///< as BestRow
  std::uint64_t full_bytes = 0;     ///< of the whole state
  double plt_limit = 0;
  std::uint64_t seed = 0;
};

/// All policies and K, or what the request leaves of them; kReplay where the job allows it.
/// \param experts  of each layer
/// \param no_replay  Job::no_replay
/// \error kUsage  nothing is left; kReplay was asked for and cannot be
/// Pure.
Result<std::vector<SimulatedPolicy>> PoliciesOf(const SimulateRequest& request,
                                                std::uint32_t experts,
                                                const std::string& no_replay);

/// The row within the limit with the least overhead, then the fewest bytes, of those that are not
/// computed only; none: no row is within.
/// Pure.
std::optional<std::size_t> BestRow(const std::vector<SimulationRow>& rows, double plt_limit);

/// Plays a trace.
/// \error kBadInput  the trace, the faults; kStopped; as ReadJob, PoliciesOf and SimulateAll
/// Local.
Result<Simulation> SimulateTrace(const SimulateRequest& request, Sink& sink);

/// The report's `result` of pec-save simulate.
/// Pure.
nlohmann::json SimulationJson(const Simulation& simulation);

/// The answer for people: the run, a line per row, what its columns mean, and the best row.
/// \pre rows
/// Pure.
std::string SimulationText(const Simulation& simulation);

/// The rows, with a line of names before them.
/// Pure.
std::string SimulationCsv(const std::vector<SimulationRow>& rows);

/// The page of curves and rows; it borrows from `simulation`.
/// \param trace_name  printable
/// Pure.
SimulationPage PageOf(const Simulation& simulation, const std::string& trace_name);

}  // namespace shardwright::partial
