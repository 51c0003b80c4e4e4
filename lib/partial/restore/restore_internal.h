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

// A restore is a list of passes (RestoreStore in restore.cc). Each takes what the passes before it
// have returned.

/// What every pass may use.
struct Job {
  comm::Comm& comm;
  const RestoreOptions& options;
  Sink& sink;

  /// Whether the store learns of the restore. Otherwise it stays as it is, and agents are not asked
  /// to save what they hold.
  bool notes() const { return !options.write.dry_run && !options.read_only; }
  /// Whether a restart is recorded at once. Without an output that is all a restore does.
  bool recorded() const { return options.restart || options.format == nullptr; }
};

/// A checkpoint in the memory of an agent.
struct AgentCopy {
  std::shared_ptr<AgentClient> agent;
  std::uint32_t node = 0;                         ///< of the recovery plan: 0 is this one
  std::uint64_t recovery = 0;                     ///< as MemoryCheckpoint
  std::map<std::string, std::uint64_t> replayed;  ///< as MemoryCheckpoint
  Manifest manifest;
};

/// What the agents have told.
struct Agents {
  std::vector<AgentCopy> copies;
  std::vector<std::size_t> lost_nodes;   ///< as RestoreReport
  std::vector<std::string> lost_agents;  ///< as RestoreReport
};

/// The store as the restore finds it.
struct Base {
  Store store;
  std::vector<StoredCheckpoint> all;  ///< Store::List
};

/// The checkpoint that experts without any version start again from.
struct Restart {
  std::unique_ptr<convert::Input> input;
  std::uint64_t iteration = 0;
};

/// What has been read so far, so that nothing is read or told twice.
struct Checked {
  std::set<exec::Digest> good;        ///< blobs that can be used
  std::set<exec::Digest> damaged;     ///< blobs that cannot be used
  std::vector<std::string> messages;  ///< of all damage, manifests too: RestoreReport::damaged

  /// Adds the message of some damage.
  void Note(const Error& error);
};

/// The checkpoints that modules may be taken from.
struct Candidates {
  std::vector<Manifest> stored;   ///< ascending sequence, never empty
  std::vector<AgentCopy> copies;  ///< in memory
  Checked checked;
};

/// What a checkpoint says of itself: logical tensors, groups, client state.
struct Described {
  convert::Input input;  ///< without a way to read payloads
  Model model;
};

/// What is restored of a module, and from where.
struct ChosenModule {
  HeldModule held;  ///< absent too where the expert starts again
  /// By component: the agent that it is read from; null: the store.
  std::array<std::shared_ptr<AgentClient>, kComponents> agent;
  Source source = Source::kLocalMemory;        ///< the farthest that any part comes from
  bool restarted = false;                      ///< the expert starts again
  std::optional<std::uint64_t> replayed_from;  ///< an agent has replayed it: RestoredModule

  const std::optional<Held>& of(Component component) const {
    return held[static_cast<std::size_t>(component)];
  }
  /// A kept master is newer than the weights: rounded it gives the weights of its own version.
  bool rounds_master() const {
    const std::optional<Held>& weights = of(Component::kWeights);
    const std::optional<Held>& master = of(Component::kMaster);
    return weights && master && master->version > weights->version;
  }
};

/// The checkpoint that is restored, and which version of every module.
struct Chosen {
  RecoveryPlan plan;
  Manifest at;  ///< the manifest of X; sequence 0: an agent's
  Described described;
  std::vector<ChosenModule> modules;  ///< by module
  std::vector<std::string> damaged;   ///< as RestoreReport
};

/// The modules that gradients bring to X.
struct Replays {
  std::vector<std::shared_ptr<const ReplayedModule>> modules;  ///< by module; null: not replayed
  std::shared_ptr<const ReplayLog> log;                        ///< null: there is none
  ReplayReport report;

  const std::shared_ptr<const ReplayedModule>& of(std::size_t module) const {
    return modules[module];
  }
};

/// Whether the weights of a module are its rounded master: a kept one that is newer, or one that is
/// replayed.
bool RoundsMaster(const ChosenModule& chosen, const std::shared_ptr<const ReplayedModule>& replayed,
                  std::uint64_t resume);

/// The tokens that are lost, and from which counters selection goes on.
struct Loss {
  SelectionState state;                     ///< for the next save
  std::optional<LossLedger> ledger;         ///< absent where tokens were never counted
  std::optional<RestoreLoss> loss;          ///< as RestoreReport
  std::optional<DynamicKReport> dynamic_k;  ///< as RestoreReport
  bool unknown_spent = false;               ///< as RestoreReport
};

/// The chosen versions as a source map: where each tensor lies in blobs.
struct BlobMap {
  layout::ShardMap map;
  std::vector<BlobSource> files;  ///< by file of the map, without those of a Restart
  std::uint32_t first_other = 0;  ///< number of the first member of a Restart
  /// Members whose bytes are made of blobs and gradients, by their numbers.
  std::map<std::uint32_t, ReplayedMember> replayed;
  os::Fingerprint fingerprint{};  ///< of all that was chosen
};

/// restore_agents.cc: proves, where there is no store, that no agent knows of one. Nobody is told
/// to write anything.
/// \error kNotFound  an agent that holds a checkpoint, or one that cannot be reached
/// Local; root.
Status ExpectNoCopies(const Job& job);

/// Makes durable what the agents hold (not where nothing is noted), and asks what that is.
/// \error kNotFound  an agent that cannot be reached and is not named lost
/// Collective.
Result<Agents> AskAgents(const Job& job);

/// The copies that no restore has given up. Warns of the others, which an agent should have
/// forgotten.
/// \error as Store::CheckPast, but for kMismatch
/// Local.
Result<std::vector<AgentCopy>> NotGivenUp(const Job& job, const Store& store,
                                          std::vector<AgentCopy> copies);

/// The catalogue of a checkpoint that is in memory only.
/// \error kBadInput  another digest; as AgentClient
/// Local.
Result<checkpoints::SourceSet> AskCatalogue(const std::vector<AgentCopy>& copies,
                                            const exec::Digest& catalogue);

/// restore_choose.cc: the checkpoints that modules may be taken from. Of the store the newest
/// usable one, with allow_older all.
/// \param copies  of all agents
/// \error kNotFound  there is none up to `at`; kBadInput  none can be read; as NotGivenUp
/// Local; every rank reads for itself.
Result<Candidates> FindCandidates(const Job& job, const Base& base, std::vector<AgentCopy> copies);

/// Chooses the checkpoint and a version of every module, and looks at their blobs: at their sizes,
/// with allow_older at their content, as there is a way out.
/// \param restart  absent: experts without a version are an error
/// \error as PlanRecovery; kBadInput  damage, without allow_older
/// Local.
Result<Chosen> Choose(const Job& job, const Base& base, const std::optional<Restart>& restart,
                      Candidates candidates);

/// restore_replay.cc: finds the chains that bring modules older than X to X, and makes the plan say
/// that these are of X. What the damage of a log, a torn or missing record and anything else that
/// cannot be replayed mean is said by RestoreOptions::replay.
/// \error with kRequire: kMismatch  a module cannot be replayed; as GradientLog::Open and ChainOf;
///        kIo
/// Local.
Result<Replays> FindReplays(const Job& job, const Base& base, Chosen* chosen);

/// Whether a checkpoint came after the one that is restored.
/// Pure.
bool IsNewer(const StoredCheckpoint& checkpoint, const Chosen& chosen);

/// restore_loss.cc: counts the tokens that are lost, and enters them into ledger and budget.
/// \error as ReadHistory, LossLedger::Charge
/// Local.
Result<Loss> CountLoss(const Base& base, const Chosen& chosen);

/// restore_source.cc: a map whose tensors come from blobs of different versions, and from `restart`
/// where experts start again.
/// \error kBadInput  a blob of another size; kMismatch  a tensor that `restart` lacks
/// Local.
Result<BlobMap> MapBlobs(const Job& job, const Base& base, const std::optional<Restart>& restart,
                         const Chosen& chosen, const Replays& replays);

/// The source as it will be read: what the checkpoint says of itself, with the map of blobs.
/// \pre restart outlives the source
std::unique_ptr<convert::Input> SourceOf(const Job& job, convert::Input described, BlobMap blobs,
                                         const std::optional<Restart>& restart,
                                         const Replays& replays);

}  // namespace shardwright::partial::restore
