// SPDX-License-Identifier: Apache-2.0
// lib/partial/restore: goes back to the newest usable state.
// recovery.h chooses: the resume point X, and for every module the newest version up to X, from
// memory of agents or from storage. It is pure. RestoreStore asks the agents, reads the blobs as a
// source map like that of any checkpoint, writes it in any layout with convert::RunPlan, and notes
// in the store what training has gone on from. Source: docs/pec-planning.md section 6.3.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "checkpoints/model/format.h"
#include "convert/convert.h"
#include "convert/input.h"
#include "partial/restore/recovery.h"
#include "partial/select/lost_tokens.h"
#include "partial/store/dynamic_run.h"
#include "partial/store/manifest.h"
#include "support/base/result.h"
#include "support/base/sink.h"
#include "support/comm/comm.h"
#include "support/os/tls.h"

namespace shardwright::partial {

/// What is done with the store's log of gradients (docs/lossless.md).
enum class ReplayMode : std::uint8_t {
  kAuto,     ///< experts older than X are replayed to X where their chains are intact
  kNever,    ///< the log is not looked at
  kRequire,  ///< all experts older than X are replayed, or nothing is restored
};

/// "auto", "never", "require".
std::string_view Name(ReplayMode mode);

/// How a store is restored; the fields are the flags of pec-restore.
struct RestoreOptions {
  std::string store;
  std::optional<std::uint64_t> at;  ///< no resume point above this iteration
  bool require_complete = false;    ///< refuse modules that are older than X
  ReplayMode replay = ReplayMode::kAuto;
  bool allow_older = false;  ///< go back to older versions where blobs are damaged
  bool read_only = false;    ///< leave the store as it is: a look at an old checkpoint
  /// Record at once that training restarts from here. Otherwise a restore that writes a checkpoint
  /// is noted as pending, and the next save decides (Store::PutPending).
  bool restart = false;
  bool allow_empty = false;  ///< a store that provably has no checkpoint yet is no error
  /// With allow_empty, a store that is not there: the run begins, and its folder is made with a
  /// mark that says so. Its parent must be there.
  bool begin = false;
  /// Checkpoint from which experts without any version are taken; empty: they are an error.
  std::string restart_missing;
  /// What is written; null: no checkpoint, the store is only told that training goes on from X.
  const checkpoints::Format* format = nullptr;
  checkpoints::TargetSpec target;  ///< keys of `format`
  std::vector<std::string> pattern_files;
  /// Addresses of agents whose memory is read too; those over a socket file are this node's.
  std::vector<std::string> agents;
  std::shared_ptr<const os::TlsKey> key;  ///< of agents at ports; null: none
  /// Whose agents are accepted at socket files too (os::Address::trusted_user).
  std::optional<std::uint32_t> trusted_user;
  /// Agents that are gone, by position in `agents`: their memory is lost, and they are not asked.
  std::set<std::size_t> lost_nodes;
  bool lost_unreachable = false;  ///< so are those that cannot be reached; else they are an error
  convert::ConvertOptions write;
};

/// A component of a module as it was restored.
struct RestoredPart {
  std::uint64_t version = 0;
  std::uint64_t bytes = 0;
  bool rounded_from_master = false;  ///< weights that a newer kept master replaces
};

/// How gradients of the log have brought a module to X.
struct ReplayedChain {
  std::uint64_t version = 0;     ///< that the store has
  std::uint64_t iterations = 0;  ///< that were made again
  std::uint64_t bytes = 0;       ///< of gradients, as stored
};

/// What was found of the log of gradients.
struct ReplayReport {
  ReplayMode mode = ReplayMode::kAuto;
  bool log = false;                  ///< there is one, and it was looked at
  std::uint64_t modules = 0;         ///< replayed
  std::uint64_t bytes = 0;           ///< of their gradients, as stored
  std::uint64_t in_memory = 0;       ///< modules that agents have replayed before
  std::vector<std::string> refused;  ///< why other modules older than X are not, one sentence each
  std::vector<std::string> torn;     ///< ends of segments that a kill cut short
};

/// A module as it was restored.
struct RestoredModule {
  std::string name;
  ModuleId id;
  std::uint64_t version = 0;  ///< the oldest of its parts
  Source source = Source::kStorage;
  std::array<std::optional<RestoredPart>, kComponents> parts;
  std::optional<ReplayedChain> replayed;  ///< absent: it is as the store or an agent has it
  /// An agent has replayed it in its memory, from this iteration to the version that was taken.
  std::optional<std::uint64_t> replayed_in_memory;
};

/// Tokens that the recovery loses.
struct RestoreLoss {
  FaultLoss fault;  ///< of this recovery
  double plt = 0;   ///< of this recovery
  LossSummary run;  ///< of all recoveries of the store's run so far, this one included
  std::uint64_t faults = 0;
};

/// What a restore did, or with dry_run what it would do.
struct RestoreReport {
  bool empty = false;           ///< there is no checkpoint yet; nothing else is said
  std::uint64_t iteration = 0;  ///< X
  std::uint64_t sequence = 0;   ///< of the checkpoint whose non-expert part is restored
  std::string tag;
  std::vector<RestoredModule> modules;
  std::vector<std::uint32_t> layer_id;   ///< by MoE layer: its number in checkpoint files
  std::uint64_t stale_modules = 0;       ///< older than X
  std::uint64_t storage_bytes = 0;       ///< of the versions that are restored, from the store
  std::uint64_t memory_bytes = 0;        ///< from agents of this node
  std::uint64_t peer_bytes = 0;          ///< from agents of other nodes
  std::vector<std::size_t> lost_nodes;   ///< by position in RestoreOptions::agents, ascending
  std::vector<std::string> lost_agents;  ///< their addresses
  std::uint64_t restarted_modules = 0;
  std::vector<std::uint64_t> abandoned;  ///< newer iterations, which a restart abandons
  bool recorded = false;                 ///< the restart is recorded
  std::vector<std::string> damaged;      ///< blobs that were passed over
  ReplayReport replay;
  std::optional<RestoreLoss> loss;          ///< absent where tokens were not counted
  std::optional<DynamicKReport> dynamic_k;  ///< the recovery's loss entered; absent: not in use
  bool unknown_spent = false;               ///< tokens were not counted: dynamic K was not charged
  bool wrote = false;
  convert::ConvertReport convert;
};

/// Takes what a restore has chosen, a source like any other, in place of RestoreOptions::format: a
/// trainer, say. Called once by all ranks, with everything in the report but `wrote` and `convert`;
/// not where the store is empty. With an error the store is not told of the restore.
/// \param source  must not outlive the call
using UseRestored =
    std::function<Status(std::unique_ptr<convert::Input> source, const RestoreReport& report)>;

/// Restores the newest usable state of a store, or the newest up to `at`, into any layout. A
/// restart marks newer checkpoints abandoned.
/// \param use  empty: nobody takes it but `format`
/// \error kNotFound  no store, nothing in it up to `at`, with allow_empty a store of which nothing
///        is proved, with begin an agent that holds something without a store; an agent that is
///        not named lost and cannot be reached: nothing is written, by no agent either;
///        kInfeasible  experts without any version: named; kMismatch  require_complete and stale
///        modules: named; replay is required and a module cannot be: why; kBadInput  a damaged blob
///        (without allow_older), or a damaged log and replay is required; as convert::Convert
/// Collective. Source: MoC-System section 4.3; docs/pec-planning.md section 6.3;
/// docs/formats/store.md.
Result<RestoreReport> RestoreStore(comm::Comm& comm, const RestoreOptions& options, Sink& sink,
                                   const UseRestored& use = {});

}  // namespace shardwright::partial
