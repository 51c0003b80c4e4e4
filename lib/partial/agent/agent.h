// SPDX-License-Identifier: Apache-2.0
// lib/partial/agent: keeps snapshots in memory, so that training does not wait for storage.
// An Agent owns the state: three buffers (buffers.h) of checkpoints in memory (memory.h), which
// it persists into a store one after the other, and copies of the newest checkpoints of other
// agents. AgentServer answers requests over a socket, AgentClient sends them in the protocol of
// agent_protocol.h. RunAgent (agent_run.h) runs the process. Source: docs/formats/agent.md.

#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "convert/input.h"
#include "partial/agent/buffers.h"
#include "partial/agent/gradient_logs.h"
#include "partial/agent/memory/memory.h"
#include "partial/agent/throttle/limiter.h"
#include "partial/save/save.h"
#include "support/base/result.h"
#include "support/base/sink.h"

namespace shardwright::partial {

/// Configuration of an agent. The fields correspond to flags of pec-save.
struct AgentOptions {
  SaveRequest save;                        ///< selection policy and storage options
  std::vector<std::string> pattern_files;  ///< sharding patterns for the source
  std::string tokens_path;                 ///< token log, read by snapshots; empty: do not count
  std::uint64_t memory_bytes = 0;          ///< limit for all blobs in memory
  std::uint64_t bandwidth = 0;  ///< limit for persists and copies, bytes per second (Limiter)
  IdleOptions idle;             ///< idle intervals of the ranks
  /// Limit for gradients buffered in memory (GradientLogs). 0: log all gradients at once. Required
  /// if other agents keep copies of snapshots, because those outlive this agent's buffer.
  std::uint64_t held_bytes = std::uint64_t{1} << 30;
  bool replay = false;  ///< replay logged gradients onto the experts in memory
};

/// A complete checkpoint in an agent's memory.
struct AgentEntry {
  std::string state;   ///< "filled", "persisting", "recovery", "copy"
  std::string origin;  ///< name of the agent that sent the copy; empty: own
  std::shared_ptr<const MemoryCheckpoint> checkpoint;
};

/// A trained parameter of an expert.
struct ExpertParam {
  std::string module;
  std::string name;
  std::uint64_t elems = 0;
};

/// Statistics of gradient replays onto snapshots in memory.
struct MemoryReplays {
  std::uint64_t modules = 0;         ///< replayed modules, counted each time
  std::uint64_t gradient_bytes = 0;  ///< gradients read for replays, as stored
  double seconds = 0;
  std::uint64_t older = 0;           ///< experts that are older than the newest snapshot
  std::vector<std::string> refused;  ///< reason for each expert that stays older
};

/// Counters and state that an agent reports.
struct AgentStatus {
  std::array<BufferState, SnapshotBuffers::kBuffers> states{};
  std::array<std::uint64_t, SnapshotBuffers::kBuffers> iterations{};  ///< if the buffer is not idle
  std::uint64_t snapshots = 0;
  std::uint64_t snapshots_failed = 0;
  std::uint64_t snapshots_skipped = 0;  ///< discarded before they were persisted
  std::uint64_t persists = 0;
  std::uint64_t persists_failed = 0;
  std::optional<std::uint64_t> newest;     ///< iteration of the newest complete snapshot
  std::optional<std::uint64_t> persisted;  ///< iteration of the newest durable checkpoint
  std::uint64_t snapshot_bytes = 0;        ///< total of all snapshots
  double snapshot_seconds = 0;             ///< total time until these bytes were copied
  std::uint64_t memory_bytes = 0;
  std::uint64_t memory_limit_bytes = 0;
  std::array<std::uint64_t, kSentKinds> sent{};  ///< bytes of persists and copies, indexed by Sent
  std::uint64_t sends_due = 0;  ///< persists and copies that ran while ranks computed, being due
  std::uint32_t ranks_marking = 0;  ///< processes that record idle intervals
  MemoryReplays replays;
  std::string last_error;
};

/// Keeps snapshots of checkpoints in memory and persists them on request. Starts no threads
/// and opens no sockets; every method is thread-safe. Methods return without waiting for a
/// persist, except Persist and Flush, and CatchUp and Replay after a restore.
/// Source: MoC-System section 5; docs/pec-planning.md section 6.2; docs/formats/agent.md.
class Agent {
 public:
  explicit Agent(AgentOptions options);

  /// Called as soon as all bytes of a snapshot are in memory, so that training may resume.
  using Copied = std::function<void(std::uint64_t iteration)>;

  /// Copies the selected modules of a checkpoint, then computes their checksums. A snapshot of
  /// the newest one's iteration replaces it and keeps the modules that only the old one has.
  /// \param known  number of the store's last recovery (Store::RecoveriesAfter)
  ///        before the files of `input` were opened; 0: there was none
  /// \param copied  not called if exactly these files are in memory already
  /// \param fill  provides the bytes of a source that is filled on demand;
  ///        empty otherwise. Not called where `copied` is not called.
  /// \returns the iteration of the snapshot
  /// \error kUsage  older than the newest snapshot; kLimit  memory; kMismatch  another model, or
  ///        a restore later than `known`; as Save. The buffer is discarded; older snapshots stay.
  Result<std::uint64_t> Snapshot(convert::Input& input, std::uint64_t known, Sink& sink,
                                 const Copied& copied = {}, const FillSource& fill = {});

  /// Waits until no snapshot is in progress.
  void WaitForSnapshot();

  /// Returns true if a snapshot waits to be persisted.
  bool wants_persist() const;

  /// Writes the newest snapshot that is not yet persisted into the store.
  /// \returns its iteration; nullopt if there is no such snapshot
  /// \error as Save; the snapshot stays in memory and can be persisted later
  Result<std::optional<std::uint64_t>> Persist(Sink& sink);

  /// Makes everything durable that is newer than the store: own snapshots, and copies of
  /// agents that may have failed. Before that it replays gradients for at most one minute.
  /// \returns the newest iteration in the store; nullopt if the store is empty
  Result<std::optional<std::uint64_t>> Flush(Sink& sink);

  /// Replays logged gradients onto experts of the newest snapshot that are older
  /// than it, for all experts with an intact chain in the log. Publishes all results
  /// at once and leaves memory for another snapshot. status() lists the failures.
  /// Older buffers do not change. Does nothing if options().replay is false.
  /// \param stop  polled between ranges of experts; true keeps the
  ///        finished experts and leaves the others to the next call
  /// \param wait  time limit for waiting for another replay; absent: until that replay ends
  /// \error kBusy  another replay is running; as CatchUp and OpenMemory: no expert is changed
  Status Replay(const std::function<bool()>& stop = {},
                std::optional<std::chrono::milliseconds> wait = {});

  /// Reads restores from the store that this agent does not know yet, and
  /// discards the checkpoints that those restores rolled back. Stops a persist
  /// of such a checkpoint. Called by Snapshot, Persist, Flush and Accept.
  /// \error as Store::RecoveriesAfter
  Status CatchUp();

  /// Returns StoreHead::id of the store; empty if it has not been seen yet.
  std::string store_id() const;

  /// Returns complete checkpoints, newest first, followed by copies.
  std::vector<AgentEntry> Entries() const;
  /// Returns the newest complete own snapshot; null: there is none.
  std::shared_ptr<const MemoryCheckpoint> Newest() const;
  /// Returns the copy of another agent's newest checkpoint; null: there is none.
  std::shared_ptr<const MemoryCheckpoint> CopyOf(const std::string& origin) const;
  /// Returns a blob of any entry; null: not in memory.
  BlobPtr Find(const exec::Digest& digest) const;

  /// Reads the manifest of a copy. Parses one text at a time,
  /// because the parser needs many times the memory of the text.
  /// \param counted  accounts for the memory of the parsed manifest
  /// \error as ParseManifest; kLimit
  Result<Manifest> ReadManifest(const std::string& text, const std::string& where,
                                Counted* counted);

  /// Locks the parser of texts that other agents send. See ReadManifest.
  std::unique_lock<std::mutex> LockParser() { return std::unique_lock(text_mutex_); }

  /// Stores another agent's checkpoint and replaces the previous one of that agent.
  /// \param before  copy of that agent when the transfer began; nullopt: any may be replaced
  /// \error kBadInput  inconsistent; kMismatch  its model differs from the store's,
  ///        or a restore has rolled it back, or another copy has arrived since `before`;
  ///        kNotFound  it belongs to another store
  Status Accept(
      const std::string& origin, MemoryCheckpoint checkpoint,
      const std::optional<std::shared_ptr<const MemoryCheckpoint>>& before = std::nullopt);

  /// Returns the trained parameters of all experts, by module and name, from the newest
  /// snapshot, or else from the store's newest checkpoint. Waits for a snapshot in progress.
  /// \error kNotFound  no snapshot and no checkpoint exists; as Store
  Result<std::vector<ExpertParam>> ExpertParams();

  /// Policy gradient-log: selects the experts that the next snapshot is
  /// expected to save; their gradients are buffered meanwhile. Called
  /// after each snapshot, and when a process begins to submit gradients.
  void PlanLogs();

  AgentStatus status() const;
  GradientLogs& logs() { return logs_; }
  const GradientLogs& logs() const { return logs_; }
  const std::shared_ptr<MemoryPool>& pool() const { return pool_; }
  const AgentOptions& options() const { return options_; }
  Limiter& limiter() { return limiter_; }
  const Limiter& limiter() const { return limiter_; }

 private:
  /// State from which the next snapshot is planned.
  struct NextPlan {
    std::uint64_t iteration = 0;  ///< of the newest snapshot
    std::uint64_t interval = 0;   ///< since the previous snapshot; 0: unknown
    ExpertMap map;
    LevelState snapshot;
    LevelState persist;
    ModelBytes bytes;
    PerExpert<std::string> names;
    std::uint32_t k = 1;
  };
  /// Blobs of a module, or of a part of it, in a buffer.
  struct ModuleCopy {
    std::array<BlobPtr, kComponents> parts;
    std::optional<std::uint64_t> replayed_from;  ///< iteration of the snapshot that read it
  };
  /// A part of an expert that is older than the newest snapshot.
  struct OlderPart {
    ModuleId id;
    std::shared_ptr<const void> data;  ///< a ModuleCopy
    std::uint64_t version = 0;
  };
  /// Input of one replay.
  struct ReplayJob {
    std::shared_ptr<const MemoryCheckpoint> record;  ///< the newest; null: there is none
    std::vector<OlderPart> older;
    std::uint64_t recovery = 0;  ///< the last recovery that was known
  };

  Status Fill(convert::Input& input, const SnapshotChoice& choice, const SaveRequest& options,
              std::shared_ptr<MemoryCheckpoint> record, Sink& sink, const Copied& copied,
              const FillSource& fill);
  Status Put(const SnapshotChoice& choice, Taken taken);
  void NotePlan(const SnapshotChoice& choice, const SelectionState& after, std::uint64_t known);
  NextPlan PlanAfter(const SnapshotChoice& choice, const SelectionState& after) const;
  static void Hold(const SnapshotBuffers::Content& content, const Model& model,
                   MemoryCheckpoint* record);
  ReplayJob NextReplay() const;
  void ReplayInTime(Sink& sink);
  Status BringForward(const std::function<bool()>& stop, ReplayJob* job, MemoryReplays* done);
  void Publish(const Model& model, const std::vector<std::pair<OlderPart, Blob>>& made,
               ReplayJob* job);
  Status LookForRestores();
  SaveRequest RequestOfSave() const;
  void Rollback(const std::vector<RecoveryRecord>& restores);
  Status CheckStore(const std::string& what, const MemoryCheckpoint& checkpoint,
                    const Model& model) const;
  Status FlushCopy(const AgentEntry& entry, Sink& sink);
  Status PersistLogs(std::uint64_t iteration, const ModuleNames& saved, Sink& sink);
  bool Holds(const AgentEntry& copy) const;
  Result<SaveReport> Write(const MemoryCheckpoint& checkpoint, Limiter::Job& job, Sink& sink);
  Result<std::shared_ptr<TokenLog>> OpenTokens() const;
  Result<std::optional<std::uint64_t>> StoredIteration() const;
  void DropIdle();

  const AgentOptions options_;
  const std::shared_ptr<MemoryPool> pool_;
  Limiter limiter_;
  GradientLogs logs_;
  std::mutex text_mutex_;          // serializes parsing of manifests of copies
  std::mutex snapshot_mutex_;      // serializes snapshots; before mutex_
  std::mutex catch_up_mutex_;      // before persist_mutex_
  std::mutex persist_mutex_;       // serializes persists; before mutex_
  std::timed_mutex replay_mutex_;  // serializes replays; before mutex_
  /// The last attempt: snapshot and number of log records. Under replay_mutex_.
  std::pair<std::weak_ptr<const MemoryCheckpoint>, std::uint64_t> replayed_;
  std::atomic<bool> stop_persist_ = false;
  mutable std::mutex mutex_;
  SnapshotBuffers buffers_;
  std::array<std::shared_ptr<const MemoryCheckpoint>, SnapshotBuffers::kBuffers> records_;
  std::map<std::string, std::shared_ptr<const MemoryCheckpoint>> copies_;
  std::uint64_t recovery_ = 0;                  // last recovery in the store that this agent knows
  std::optional<std::string> store_id_;         // identifier of the store once it was read
  std::optional<SelectionState> level_;         // after the last snapshot; absent: as in the store
  std::optional<SelectionState> level_before_;  // before it, to take that snapshot again
  std::optional<NextPlan> next_;                // policy kReplay only
  double copied_seconds_ = 0;                   // of the last snapshot, until its bytes were copied
  AgentStatus status_;
};

}  // namespace shardwright::partial
