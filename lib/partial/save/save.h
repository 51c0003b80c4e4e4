// SPDX-License-Identifier: Apache-2.0
// lib/partial/save: saves a checkpoint into a store.
// Save finds out what the store has, counts tokens, chooses experts (pec/select), shares the blobs
// among the ranks (blob_writers.h), writes those that are new and the manifest last. ChooseSnapshot
// makes the same choice for the memory of an agent. repair.h writes blobs again that a store has
// lost. Source: docs/formats/store.md, "Writing".

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

/// "master,weights", or "nothing".
std::string KeepText(const KeptComponents& keep);

/// A snapshot that an agent has taken: of its experts, those that go to storage are left to choose.
struct Snapshotted {
  Selection selection;
  LevelState level;            ///< of the snapshots, this one included
  std::uint64_t recovery = 0;  ///< as MemoryCheckpoint
};

/// K that grows as lost tokens add up. The first save of a store with it fixes limit and mode.
struct DynamicKOptions {
  double limit = kPltLimit;      ///< PLT of the whole run
  bool predict = false;          ///< raise K before a fault could exceed its share
  std::uint64_t iterations = 0;  ///< length of the run; 0: as a save before said, or not known
};

/// What policy gradient-log has to know of the run whose gradients an agent logs.
struct ReplayRun {
  std::uint64_t full_every = 500;             ///< as ReplayPoint
  std::optional<std::uint64_t> logged_since;  ///< as ReplayPoint
  /// Iteration of the previous snapshot; if absent, that of the store's newest checkpoint.
  std::optional<std::uint64_t> before;
};

/// How a checkpoint is saved; the fields are the flags of pec-save.
struct SaveRequest {
  std::string store;
  Policy policy = Policy::kSequential;
  std::uint32_t k_snapshot = 1;
  std::optional<std::uint32_t> k_persist;  ///< absent: k_snapshot
  /// K is what the store's state says, k_snapshot where it begins; k_persist must be absent.
  std::optional<DynamicKOptions> dynamic_k;
  std::optional<std::uint64_t> max_age;
  /// Budget policies: bytes of a checkpoint, of which the non-expert part is taken first; absent:
  /// k_snapshot experts per layer on average.
  std::optional<std::uint64_t> budget_bytes;
  std::optional<KeptComponents> keep;  ///< absent: as the store says, nothing for a new one
  TokenLog* tokens = nullptr;          ///< null: not counted
  bool zstd = false;
  bool partial_start = false;  ///< the first checkpoint is a selection too
  /// Training went on from this iteration without pec-restore: what is newer is abandoned.
  std::optional<std::uint64_t> resumed_from;
  std::optional<std::uint64_t> iteration;  ///< absent: the checkpoint's own
  const Snapshotted* snapshotted = nullptr;
  /// Iteration that this run saved last: it tells a restart from a restore that was a look at the
  /// store. Absent: not known.
  std::optional<std::uint64_t> continues;
  bool existing_store = false;  ///< fail where there is no store, rather than make one
  std::string store_id;         ///< with existing_store: its StoreHead::id; empty: any
  ReplayRun replay;             ///< kReplay, whose `budget_bytes` are those of an iteration
  bool dry_run = false;
  bool take_over = false;  ///< as os::Lock::Take, of the store's lock
  exec::Verify verify = exec::Verify::kSums;
  unsigned threads = 1;
  std::uint64_t memory_bytes = std::uint64_t{1} << 30;
};

/// What a save did, or with dry_run what it would do.
struct SaveReport {
  std::uint64_t iteration = 0;
  std::uint64_t sequence = 0;
  bool first = false;  ///< of its store: every expert is saved
  std::uint64_t modules = 0;
  std::uint64_t nonexpert_modules = 0;
  LayerExperts experts;
  std::vector<std::uint32_t> layer_id;
  TwoLevelSelection selection;
  std::uint64_t full_bytes = 0;  ///< C_full: every component of every module
  std::uint64_t bytes = 0;  ///< C: what this checkpoint covers (docs/pec-planning.md section 1)
  std::uint64_t written_bytes = 0;  ///< of blobs, as they lie on disk
  std::uint64_t blobs = 0;
  std::uint64_t blobs_written = 0;
  std::uint64_t blobs_unchanged = 0;
  std::uint64_t blobs_restored = 0;       ///< named by the newest manifest, but lost: written again
  std::uint64_t text_bytes = 0;           ///< manifest and catalogue
  std::vector<std::uint64_t> rank_bytes;  ///< [rank]: of `bytes`, what it hashes and writes
  std::uint64_t bottleneck_bytes = 0;     ///< largest of rank_bytes
  std::uint64_t bound_bytes = 0;          ///< no cut into whole blobs does better
  std::uint32_t cut_ep = 0;               ///< as BlobWriters::ep
  /// Tokens that the experts left out would lose at a fault now, and of all since their last save.
  std::optional<TokensAtRisk> at_risk;
  std::optional<DynamicKReport> dynamic_k;  ///< as the checkpoint has it
  std::uint64_t members_verified = 0;
  std::uint64_t members_in_part = 0;  ///< read in part, so that their checksum tells nothing
};

/// Checks that the store is the one that a request expects: an empty mount point is not a new
/// store.
/// \error kNotFound  there is none; kMismatch  another one. Local.
Status ExpectStore(const SaveRequest& request);

/// Saves a checkpoint into a store: the non-expert modules, the selected experts, and of the others
/// what the store keeps of all. The first checkpoint of a store holds every expert unless
/// partial_start. Under several ranks each writes its own share of the blobs and rank 0 the
/// manifest.
/// \error kMismatch  a store of another model, or of other kept components: both sides named; a
///        store that is ahead of the checkpoint; a snapshot that a restore has given up; kBusy
///        another process writes; kUsage  a policy without what it needs, k_snapshot above the
///        experts of every layer; kBadInput  source, tokens; kIo; kLimit  memory; kStopped
/// Collective. Source: MoC-System section 3; docs/formats/store.md.
Result<SaveReport> Save(comm::Comm& comm, convert::Input& input, const SaveRequest& options,
                        Sink& sink);

/// What a snapshot of a checkpoint takes.
struct SnapshotChoice {
  std::uint64_t iteration = 0;
  Model model;
  KeptComponents keep{};
  Selection selection;   ///< every expert as long as the store has no checkpoint
  SelectionState state;  ///< both levels before the snapshot, tokens counted up to `iteration`
  ExpertMap map;
  std::uint32_t k_snapshot = 1;  ///< K of this snapshot
  std::uint32_t k_persist = 1;
};

/// Chooses what a snapshot takes, as Save does for a checkpoint, and writes nothing.
/// \param level  the snapshot level after the last snapshot, with what it has counted; null: as
///               the store says
/// \error as Save
/// Collective. Source: docs/pec-planning.md section 6.1.
Result<SnapshotChoice> ChooseSnapshot(comm::Comm& comm, convert::Input& input,
                                      const SaveRequest& options, const SelectionState* level,
                                      Sink& sink);

}  // namespace shardwright::partial
