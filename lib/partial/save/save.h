// SPDX-License-Identifier: Apache-2.0
// lib/partial/save: saves a checkpoint into a store. Save reads the state of the
// store, counts tokens, selects experts (partial/select), divides the blobs among the
// ranks (blob_writers.h), writes the new ones and finally the manifest. ChooseSnapshot
// makes the same selection for snapshots in the memory of an agent. repair.h rewrites
// blobs that a store has lost. Source: docs/formats/store.md, "Writing".

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "convert/input.h"
#include "engine/exec/run/run.h"
#include "partial/select/lost_tokens.h"
#include "partial/select/selection.h"
#include "partial/store/dynamic_run.h"
#include "partial/store/manifest.h"
#include "partial/store/modules.h"
#include "partial/store/token_log.h"
#include "support/base/result.h"
#include "support/base/sink.h"
#include "support/comm/comm.h"

namespace shardwright::partial {

/// Returns text such as "master,weights", or "nothing".
std::string KeepText(const KeptComponents& keep);

/// A snapshot of an agent. Save selects the experts to persist from its experts.
struct Snapshotted {
  Selection selection;
  LevelState level;            ///< state of the snapshot level, including this one
  std::uint64_t recovery = 0;  ///< as MemoryCheckpoint
};

/// Options of dynamic K. The first save of a store that uses it fixes limit and mode.
struct DynamicKOptions {
  double limit = kPltLimit;      ///< PLT of the whole run
  bool predict = false;          ///< raise K before a fault could exceed its share
  std::uint64_t iterations = 0;  ///< length of the run; 0: as in an earlier save, or unknown
};

/// Input of policy gradient-log about a run with an agent that logs gradients.
struct ReplayRun {
  std::uint64_t full_every = 500;             ///< as ReplayPoint
  std::optional<std::uint64_t> logged_since;  ///< as ReplayPoint
  /// Iteration of the previous snapshot; absent: that of the store's newest checkpoint.
  std::optional<std::uint64_t> before;
};

/// Options of a save; the fields correspond to flags of pec-save.
struct SaveRequest {
  std::string store;
  Policy policy = Policy::kSequential;
  std::uint32_t k_snapshot = 1;
  std::optional<std::uint32_t> k_persist;  ///< absent: k_snapshot
  /// Take K from the store's state, starting with k_snapshot; k_persist must be absent.
  std::optional<DynamicKOptions> dynamic_k;
  std::optional<std::uint64_t> max_age;
  /// Budget policies: bytes per checkpoint, including the non-expert
  /// part; absent: k_snapshot experts per layer on average.
  std::optional<std::uint64_t> budget_bytes;
  std::optional<KeptComponents> keep;  ///< absent: as in the store, none for a new store
  TokenLog* tokens = nullptr;          ///< null: tokens are not counted
  bool zstd = false;
  bool partial_start = false;  ///< the first checkpoint is partial too
  /// Iteration from which training resumed without pec-restore; abandons newer checkpoints.
  std::optional<std::uint64_t> resumed_from;
  std::optional<std::uint64_t> iteration;  ///< absent: the iteration of the checkpoint
  const Snapshotted* snapshotted = nullptr;
  /// Last iteration that this run saved. It distinguishes a restart
  /// from a restore that only inspected the store. Absent: unknown.
  std::optional<std::uint64_t> continues;
  bool existing_store = false;  ///< fail if the store does not exist, instead of creating it
  std::string store_id;         ///< with existing_store: required StoreHead::id; empty: any
  ReplayRun replay;             ///< for kReplay; its `budget_bytes` are per iteration
  bool dry_run = false;
  bool take_over = false;  ///< as os::Lock::Take, of the store's lock
  exec::Verify verify = exec::Verify::kChecksums;
  unsigned threads = 1;
  std::uint64_t memory_bytes = std::uint64_t{1} << 30;
};

/// Result of a save; with dry_run, what it would do.
struct SaveReport {
  std::uint64_t iteration = 0;
  std::uint64_t sequence = 0;
  bool first = false;          ///< first checkpoint of its store, with every expert
  std::uint64_t replaces = 0;  ///< sequence of an earlier save of the same iteration; 0: none
  std::uint64_t modules = 0;
  std::uint64_t nonexpert_modules = 0;
  LayerExperts experts;
  std::vector<std::uint32_t> layer_id;
  TwoLevelSelection selection;
  std::uint64_t full_bytes = 0;  ///< C_full: all components of all modules
  std::uint64_t bytes = 0;       ///< C: bytes in this checkpoint (docs/pec-planning.md section 1)
  std::uint64_t written_bytes = 0;  ///< size of the new blobs on disk
  std::uint64_t blobs = 0;
  std::uint64_t blobs_written = 0;
  std::uint64_t blobs_unchanged = 0;
  std::uint64_t blobs_restored = 0;       ///< missing blobs of the newest manifest, rewritten
  std::uint64_t text_bytes = 0;           ///< manifest and catalogue
  std::vector<std::uint64_t> rank_bytes;  ///< [rank]: part of `bytes` that it hashes and writes
  std::uint64_t bottleneck_bytes = 0;     ///< largest of rank_bytes
  std::uint64_t bound_bytes = 0;          ///< lower bound for any cut into whole blobs
  std::uint32_t cut_ep = 0;               ///< as BlobWriters::ep
  /// Unsaved tokens of the experts left out, which a fault now would lose, and of all experts.
  std::optional<TokensAtRisk> at_risk;
  std::optional<DynamicKReport> dynamic_k;  ///< as stored with the checkpoint
  std::uint64_t members_verified = 0;
  std::uint64_t members_in_part = 0;  ///< read only in part, so their checksums were not compared
};

/// Checks that the expected store exists. An empty
/// mount point must not be taken for a new store.
/// \error kNotFound  no store there; kMismatch  another store. Local.
Status ExpectStore(const SaveRequest& request);

/// Saves a checkpoint into a store: the non-expert modules, the selected
/// experts, and the kept components of the others. The first checkpoint of
/// a store contains every expert unless partial_start is set. Each rank
/// writes its own share of the blobs, and rank 0 also writes the manifest.
/// \error kMismatch  a store of another model or with other kept components (names both); a
///        store newer than the checkpoint; a snapshot that a restore has rolled back; kBusy
///        another process writes; kUsage  a policy without its required input, k_snapshot above
///        the experts of every layer; kBadInput  source, tokens; kIo; kLimit  memory; kStopped
/// Collective. Source: MoC-System section 3; docs/formats/store.md.
Result<SaveReport> Save(comm::Comm& comm, convert::Input& input, const SaveRequest& options,
                        Sink& sink);

/// Contents of a snapshot.
struct SnapshotChoice {
  std::uint64_t iteration = 0;
  Model model;
  KeptComponents keep{};
  Selection selection;   ///< every expert until the store has a checkpoint
  SelectionState state;  ///< both levels before the snapshot, with tokens up to `iteration`
  ExpertMap map;
  std::uint32_t k_snapshot = 1;  ///< K of this snapshot
  std::uint32_t k_persist = 1;
};

/// Selects the contents of a snapshot like Save for a checkpoint, but writes nothing.
/// \param level  state of the snapshot level after the last snapshot,
///               with counted tokens; null: as in the store
/// \error as Save
/// Collective. Source: docs/pec-planning.md section 6.1.
Result<SnapshotChoice> ChooseSnapshot(comm::Comm& comm, convert::Input& input,
                                      const SaveRequest& options, const SelectionState* level,
                                      Sink& sink);

}  // namespace shardwright::partial
