// SPDX-License-Identifier: Apache-2.0
// lib/partial/restore: restores the newest usable state. recovery.h, which is pure,
// chooses the resume point X, and for every module the newest version up to X in agents'
// memory or storage. RestoreStore queries the agents, maps the blobs as a source like
// any checkpoint, writes it in any layout with convert::RunPlan, and records in the
// store that training resumes from X. Source: docs/pec-planning.md section 6.3.

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

/// Use of the store's log of gradients in a restore (docs/lossless.md).
enum class ReplayMode : std::uint8_t {
  kAuto,     ///< replay experts older than X to X if their chains are intact
  kNever,    ///< ignore the log
  kRequire,  ///< replay all experts older than X, or fail
};

/// Returns "auto", "never" or "require".
std::string_view Name(ReplayMode mode);

/// Options of a restore; the fields correspond to flags of pec-restore.
struct RestoreOptions {
  std::string store;
  std::optional<std::uint64_t> at;  ///< no resume point above this iteration
  bool require_complete = false;    ///< fail if a module is older than X
  ReplayMode replay = ReplayMode::kAuto;
  bool allow_older = false;  ///< use older versions of damaged blobs
  bool read_only = false;    ///< leave the store unchanged, to inspect an old checkpoint
  /// Record immediately that training restarts from here. Otherwise a restore that writes
  /// a checkpoint is recorded as pending, and the next save decides (Store::PutPending).
  bool restart = false;
  bool allow_empty = false;  ///< accept a store that provably has no checkpoint yet
  /// With allow_empty: if the store does not exist, create its folder
  /// with a mark that the run has begun. Its parent must exist.
  bool begin = false;
  /// Checkpoint that provides experts without any version; empty: those are an error.
  std::string restart_missing;
  /// Output format; null: write no checkpoint, only record that training resumes from X.
  const checkpoints::Format* format = nullptr;
  checkpoints::TargetSpec target;  ///< options of `format`
  std::vector<std::string> pattern_files;
  /// Addresses of agents to read memory from. Socket files are agents of this node.
  std::vector<std::string> agents;
  std::shared_ptr<const os::TlsKey> key;  ///< key of agents at ports; null: none
  /// User id of agents accepted at socket files (os::Address::trusted_user).
  std::optional<std::uint32_t> trusted_user;
  /// Positions in `agents` of failed agents: their memory is lost, and they are not queried.
  std::set<std::size_t> lost_nodes;
  bool lost_unreachable = false;  ///< treat unreachable agents as lost instead of failing
  convert::ConvertOptions write;
};

/// Restored component of a module.
struct RestoredPart {
  std::uint64_t version = 0;
  std::uint64_t bytes = 0;
  bool rounded_from_master = false;  ///< weights computed from a newer kept master
};

/// Replay of a module to X with gradients of the log.
struct ReplayedChain {
  std::uint64_t version = 0;     ///< version in the store
  std::uint64_t iterations = 0;  ///< number of repeated iterations
  std::uint64_t bytes = 0;       ///< size of the gradients, as stored
};

/// Result of the search in the log of gradients.
struct ReplayReport {
  ReplayMode mode = ReplayMode::kAuto;
  bool log = false;                  ///< a log exists and was read
  std::uint64_t modules = 0;         ///< replayed
  std::uint64_t bytes = 0;           ///< size of their gradients, as stored
  std::uint64_t in_memory = 0;       ///< modules that agents have already replayed
  std::vector<std::string> refused;  ///< reason for each module that stays older than X
  std::vector<std::string> torn;     ///< incomplete ends of segments after a kill
};

/// A restored module.
struct RestoredModule {
  std::string name;
  ModuleId id;
  std::uint64_t version = 0;  ///< the oldest of its parts
  Source source = Source::kStorage;
  std::array<std::optional<RestoredPart>, kComponents> parts;
  std::optional<ReplayedChain> replayed;  ///< absent: as stored, or from an agent
  /// Version before an agent replayed the module in its memory; absent: it did not.
  std::optional<std::uint64_t> replayed_in_memory;
};

/// Tokens that the recovery loses.
struct RestoreLoss {
  FaultLoss fault;  ///< of this recovery
  double plt = 0;   ///< of this recovery
  LossSummary run;  ///< all recoveries of the store's run, including this one
  std::uint64_t faults = 0;
};

/// Result of a restore; with dry_run, what it would do.
struct RestoreReport {
  bool empty = false;           ///< no checkpoint exists yet; the other fields are unset
  std::uint64_t iteration = 0;  ///< X
  std::uint64_t sequence = 0;   ///< of the checkpoint with the restored non-expert part
  std::string tag;
  std::vector<RestoredModule> modules;
  std::vector<std::uint32_t> layer_id;   ///< by MoE layer: its number in checkpoint files
  std::uint64_t stale_modules = 0;       ///< older than X
  std::uint64_t storage_bytes = 0;       ///< size of restored versions from the store
  std::uint64_t memory_bytes = 0;        ///< from agents of this node
  std::uint64_t peer_bytes = 0;          ///< from agents of other nodes
  std::vector<std::size_t> lost_nodes;   ///< by position in RestoreOptions::agents, ascending
  std::vector<std::string> lost_agents;  ///< their addresses
  std::uint64_t restarted_modules = 0;
  std::vector<std::uint64_t> abandoned;  ///< newer iterations that a restart abandons
  bool recorded = false;                 ///< the restart is recorded
  std::vector<std::string> damaged;      ///< damaged blobs that were skipped
  ReplayReport replay;
  std::optional<RestoreLoss> loss;          ///< absent: tokens were not counted
  std::optional<DynamicKReport> dynamic_k;  ///< including this recovery; absent: not in use
  bool unknown_spent = false;               ///< dynamic K was not charged, as tokens are unknown
  bool wrote = false;
  convert::ConvertReport convert;
};

/// Receives the restored state as a source, for example in a trainer, in place of
/// RestoreOptions::format. All ranks call it once with a report complete but for `wrote` and
/// `convert`. Not called for an empty store. If it fails, the restore is not recorded in the store.
/// \param source  must not outlive the call
using UseRestored =
    std::function<Status(std::unique_ptr<convert::Input> source, const RestoreReport& report)>;

/// Restores the newest usable state of a store, or the newest up to `at`,
/// into any layout. A restart marks newer checkpoints as abandoned.
/// \param use  empty: the state is only written in `format`
/// \error kNotFound  no store, or no checkpoint up to `at`; with allow_empty a store that may
///        have lost one; with begin an agent with a checkpoint but no store; an unreachable agent
///        not named lost (then nothing is written, not even by agents). kInfeasible  experts
///        without any version (named); kMismatch  stale modules with require_complete (named), or
///        a module that a required replay cannot reach; kBadInput  a damaged blob without
///        allow_older, or a damaged log of a required replay; as convert::Convert
/// Collective. Source: MoC-System section 4.3; docs/pec-planning.md section 6.3;
/// docs/formats/store.md.
Result<RestoreReport> RestoreStore(comm::Comm& comm, const RestoreOptions& options, Sink& sink,
                                   const UseRestored& use = {});

}  // namespace shardwright::partial
