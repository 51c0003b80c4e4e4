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

/// Options of a simulation; the fields correspond to flags of pec-save simulate.
struct SimulateRequest {
  JobRequest job;
  std::string tokens;        ///< token log
  double fault_rate = 0.02;  ///< faults per iteration, generated from the seed
  double node_share = 1;     ///< fraction of faults that destroy a node's memory
  std::uint64_t seed = 0;
  std::string fault_file;                  ///< faults to use instead of generated ones; empty: none
  std::uint64_t interval = 10;             ///< iterations between checkpoints
  bool partial_start = false;              ///< the first checkpoint is partial too
  double plt_limit = 0.0375;               ///< PLT limit of the best row
  std::optional<Policy> policy;            ///< absent: all
  std::optional<std::uint64_t> k;          ///< absent: 1, 2, 4, ...
  std::optional<std::uint64_t> k_persist;  ///< absent: k
  std::optional<std::uint64_t> max_age;
  std::optional<double> dynamic_limit;  ///< adds a row with dynamic K and this PLT limit
  bool gradients = false;               ///< adds a row for each GradientRule
  std::uint64_t full_every = 500;       ///< as GradientOptions and ReplayPoint
  std::uint64_t budget_bytes = 0;       ///< as ReplayPoint
  std::uint64_t gradient_budget = 0;    ///< as GradientOptions, for kLeast
};

/// A simulated trace.
struct Simulation {
  Job job;
  SimulationInput input;
  std::vector<SimulationRow> rows;
  std::optional<std::size_t> best;  ///< as BestRow
  std::string no_best;              ///< why no row is recommended; empty: `best` is set
  std::uint64_t full_bytes = 0;     ///< of the complete state
  double plt_limit = 0;
  std::uint64_t seed = 0;
};

/// Returns all policies and K that the request selects, with kReplay if the job allows it.
/// \param experts  number in each layer
/// \param no_replay  Job::no_replay
/// \error kUsage  the selection is empty; kReplay was requested but is impossible
/// Pure.
Result<std::vector<SimulatedPolicy>> PoliciesOf(const SimulateRequest& request,
                                                std::uint32_t experts,
                                                const std::string& no_replay);

/// Returns the row within the limit with the least overhead, then the fewest
/// bytes, except rows that are only computed; nullopt: no row is within the limit.
/// Pure.
std::optional<std::size_t> BestRow(const std::vector<SimulationRow>& rows, double plt_limit);

/// Returns why a simulation is too short to recommend a row; empty if it is not. Random faults have
/// to be several, because one of them decides little.
/// Pure.
std::string TooShort(const SimulateRequest& request, std::size_t faults, std::uint64_t checkpoints);

/// Simulates the policies of a request on its trace.
/// \error kBadInput  invalid trace or faults; kStopped; as ReadJob, PoliciesOf and SimulateAll
/// Local.
Result<Simulation> SimulateTrace(const SimulateRequest& request, Sink& sink);

/// Makes the `result` of the report of pec-save simulate.
/// Pure.
nlohmann::json SimulationJson(const Simulation& simulation);

/// Formats the answer as text: the run, one line per row, the columns' meaning, the best row.
/// \pre there are rows
/// Pure.
std::string SimulationText(const Simulation& simulation);

/// Formats the rows as CSV with a header line.
/// Pure.
std::string SimulationCsv(const std::vector<SimulationRow>& rows);

/// Makes the input of the HTML report with curves and rows; it has pointers into `simulation`.
/// \param trace_name  printable text
/// Pure.
SimulationPage PageOf(const Simulation& simulation, const std::string& trace_name);

}  // namespace shardwright::partial
