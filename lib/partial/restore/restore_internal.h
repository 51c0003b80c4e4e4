// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "convert/input.h"
#include "engine/layout/shard_map.h"
#include "partial/agent/agent_client.h"
#include "partial/restore/recovery.h"
#include "partial/restore/replay_bytes.h"
#include "partial/restore/restore.h"
#include "partial/store/modules.h"
#include "partial/store/read_blobs.h"
#include "partial/store/store.h"
#include "support/comm/comm.h"

namespace shardwright::partial::restore {

// A restore is a list of passes (RestoreStore in restore.cc).
// Each uses the results of the passes before it.

/// Context of all passes.
struct Job {
  comm::Comm& comm;
  const RestoreOptions& options;
  Sink& sink;

  /// Returns true if the restore is recorded in the store. Otherwise the store
  /// stays unchanged, and agents are not asked to save their checkpoints.
  bool notes() const { return !options.write.dry_run && !options.read_only; }
  /// Returns true if a restart is recorded immediately, also if there is no output.
  bool recorded() const { return options.restart || options.format == nullptr; }
};

/// A checkpoint in the memory of an agent.
struct AgentCopy {
  std::shared_ptr<AgentClient> agent;
  std::uint32_t node = 0;                         ///< in the recovery plan; 0 is this node
  std::uint64_t recovery = 0;                     ///< as MemoryCheckpoint
  std::map<std::string, std::uint64_t> replayed;  ///< as MemoryCheckpoint
  Manifest manifest;
};

/// Answers of the agents.
struct Agents {
  std::vector<AgentCopy> copies;
  std::vector<std::size_t> lost_nodes;   ///< as RestoreReport
  std::vector<std::string> lost_agents;  ///< as RestoreReport
};

/// State of the store at the beginning of the restore.
struct Base {
  Store store;
  std::vector<StoredCheckpoint> all;  ///< Store::List
};

/// The checkpoint from which experts without any version restart.
struct Restart {
  std::unique_ptr<convert::Input> input;
  std::uint64_t iteration = 0;
};

/// Blobs read so far, so that none is read or reported twice.
struct Checked {
  std::set<exec::Digest> good;        ///< usable blobs
  std::set<exec::Digest> damaged;     ///< unusable blobs
  std::vector<std::string> messages;  ///< of all damage, with manifests: RestoreReport::damaged

  /// Adds the message of a damaged file.
  void Note(const Error& error);
};

/// The checkpoints that can provide modules.
struct Candidates {
  std::vector<Manifest> stored;   ///< ascending sequence, never empty
  std::vector<AgentCopy> copies;  ///< in the memory of agents
  Checked checked;
};

/// Description of a checkpoint: logical tensors, groups, client state.
struct Described {
  convert::Input input;  ///< without access to payloads
  Model model;
};

/// Restored versions of a module, and their sources.
struct ChosenModule {
  StoredModule held;  ///< also absent if the expert restarts
  /// By component: the agent that provides it; null: the store.
  std::array<std::shared_ptr<AgentClient>, kComponents> agent;
  Source source = Source::kLocalMemory;        ///< the most distant source of its parts
  bool restarted = false;                      ///< the expert restarts
  std::optional<std::uint64_t> replayed_from;  ///< version before an agent replayed it

  const std::optional<StoredComponent>& of(Component component) const {
    return held[static_cast<std::size_t>(component)];
  }
  /// Returns true if a kept master is newer than the weights, which are then rounded from it.
  bool rounds_master() const {
    const std::optional<StoredComponent>& weights = of(Component::kWeights);
    const std::optional<StoredComponent>& master = of(Component::kMaster);
    return weights && master && master->version > weights->version;
  }
};

/// The checkpoint to restore, with the version of every module.
struct Chosen {
  RecoveryPlan plan;
  Manifest at;  ///< manifest of X; sequence 0: from an agent
  Described described;
  std::vector<ChosenModule> modules;  ///< by module
  std::vector<std::string> damaged;   ///< as RestoreReport
};

/// The modules that are replayed to X.
struct Replays {
  std::vector<std::shared_ptr<const ReplayedModule>> modules;  ///< by module; null: not replayed
  std::shared_ptr<const ReplayLog> log;                        ///< null: no log
  ReplayReport report;

  const std::shared_ptr<const ReplayedModule>& of(std::size_t module) const {
    return modules[module];
  }
};

/// Returns true if the weights of a module are rounded from its
/// master, because that is a newer kept one or a replayed one.
bool RoundsMaster(const ChosenModule& chosen, const std::shared_ptr<const ReplayedModule>& replayed,
                  std::uint64_t resume);

/// Lost tokens, and the counters with which selection continues.
struct Loss {
  SelectionState state;                     ///< for the next save
  std::optional<LossLedger> ledger;         ///< absent: tokens were never counted
  std::optional<RestoreLoss> loss;          ///< as RestoreReport
  std::optional<DynamicKReport> dynamic_k;  ///< as RestoreReport
  bool unknown_spent = false;               ///< as RestoreReport
};

/// The chosen versions as a source map, which locates each tensor in blobs.
struct BlobMap {
  layout::ShardMap map;
  std::vector<BlobSource> files;  ///< by file of the map, except those of a Restart
  std::uint32_t first_other = 0;  ///< number of the first member of a Restart
  /// Members computed from blobs and gradients, by number.
  std::map<std::uint32_t, ReplayedMember> replayed;
  os::Fingerprint fingerprint{};  ///< over everything that was chosen
};

/// restore_agents.cc: checks that no agent knows of a store
/// if there is none. Does not ask any agent to write.
/// \error kNotFound  an agent has a checkpoint, or cannot be reached
/// Local; root.
Status ExpectNoCopies(const Job& job);

/// Has agents persist their checkpoints (unless nothing is recorded) and lists the results.
/// \error kNotFound  an agent that cannot be reached and is not named lost
/// Collective.
Result<Agents> AskAgents(const Job& job);

/// Returns the copies that no restore has rolled back. Warns
/// of the others, which an agent should have discarded.
/// \error as Store::CheckPast, except kMismatch
/// Local.
Result<std::vector<AgentCopy>> NotGivenUp(const Job& job, const Store& store,
                                          std::vector<AgentCopy> copies);

/// Reads the catalogue of a checkpoint that exists only in memory.
/// \error kBadInput  wrong digest; as AgentClient
/// Local.
Result<checkpoints::SourceSet> AskCatalogue(const std::vector<AgentCopy>& copies,
                                            const exec::Digest& catalogue);

/// restore_choose.cc: finds the checkpoints that can provide modules:
/// the newest usable one of the store, or all of them with allow_older.
/// \param copies  from all agents
/// \error kNotFound  none up to `at`; kBadInput  none can be read; as NotGivenUp
/// Local; every rank reads them itself.
Result<Candidates> FindCandidates(const Job& job, const Base& base, std::vector<AgentCopy> copies);

/// Chooses the checkpoint and a version of every module, and checks the sizes
/// of their blobs; with allow_older their contents, because alternatives exist.
/// \param restart  absent: experts without a version are an error
/// \error as PlanRecovery; kBadInput  damage without allow_older
/// Local.
Result<Chosen> Choose(const Job& job, const Base& base, const std::optional<Restart>& restart,
                      Candidates candidates);

/// restore_replay.cc: finds the chains that lead modules older than X to X, and
/// changes their version in the plan to X. RestoreOptions::replay determines
/// the effect of damaged logs, torn or missing records and other failures.
/// \error with kRequire: kMismatch  a module cannot be
///        replayed; as GradientLog::Open and ChainOf; kIo
/// Local.
Result<Replays> FindReplays(const Job& job, const Base& base, Chosen* chosen);

/// Returns true if a checkpoint is newer than the restored one.
/// Pure.
bool IsNewer(const StoredCheckpoint& checkpoint, const Chosen& chosen);

/// restore_loss.cc: counts the lost tokens and charges them to the ledger and the budget.
/// \error as ReadHistory, LossLedger::Charge
/// Local.
Result<Loss> CountLoss(const Base& base, const Chosen& chosen);

/// restore_source.cc: makes a map of tensors from blobs of
/// different versions, and from `restart` for experts that restart.
/// \error kBadInput  a blob of wrong size; kMismatch  a tensor is missing in `restart`
/// Local.
Result<BlobMap> MapBlobs(const Job& job, const Base& base, const std::optional<Restart>& restart,
                         const Chosen& chosen, const Replays& replays);

/// Makes the source to read: the checkpoint's description with the map of blobs.
/// \pre restart outlives the source
std::unique_ptr<convert::Input> SourceOf(const Job& job, convert::Input described, BlobMap blobs,
                                         const std::optional<Restart>& restart,
                                         const Replays& replays);

}  // namespace shardwright::partial::restore
