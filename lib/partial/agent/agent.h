// SPDX-License-Identifier: Apache-2.0
// lib/partial/agent: keeps snapshots in memory, so that training does not wait for storage.
// An Agent is the state: three buffers (buffers.h) of checkpoints in memory (memory.h), persisted
// into a store one after the other, and copies of other agents' newest. AgentServer answers
// requests over a socket, AgentClient asks, agent_protocol.h is the language between them. RunAgent
// (agent_run.h) is the process. Source: docs/formats/agent.md.

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
#include "partial/agent/memory.h"
#include "partial/agent/throttle/limiter.h"
#include "partial/save/save.h"
#include "support/base/result.h"
#include "support/base/sink.h"

namespace shardwright::partial {

/// How an agent works; the fields are flags of pec-save.
struct AgentOptions {
  SaveRequest save;                        ///< how checkpoints are chosen and stored
  std::vector<std::string> pattern_files;  ///< of the source
  std::string tokens_path;                 ///< its end is read by snapshots; empty: not counted
  std::uint64_t memory_bytes = 0;          ///< of all blobs in memory
  std::uint64_t bandwidth = 0;  ///< bytes per second that persists and copies take (Limiter)
  IdleOptions idle;             ///< when ranks idle
  /// Gradients that are held back at most (GradientLogs); 0: all are logged, as wherever copies of
  /// snapshots go to others, who could have them restored when this agent is gone.
  std::uint64_t held_bytes = std::uint64_t{1} << 30;
  bool replay = false;  ///< gradients also bring forward what is in memory
};

/// A complete checkpoint in an agent's memory.
struct AgentEntry {
  std::string state;   ///< "filled", "persisting", "recovery", "copy"
  std::string origin;  ///< of a copy: the agent that it is of
  std::shared_ptr<const MemoryCheckpoint> checkpoint;
};

/// A parameter of an expert that an optimizer trains.
struct ExpertParam {
  std::string module;
  std::string name;
  std::uint64_t elems = 0;
};

/// How gradients have brought forward what is in memory.
struct MemoryReplays {
  std::uint64_t modules = 0;         ///< that were, each time counted
  std::uint64_t gradient_bytes = 0;  ///< that were read for it, as stored
  double seconds = 0;
  std::uint64_t older = 0;           ///< experts of the newest snapshot that are older than it
  std::vector<std::string> refused;  ///< why these stay so, one sentence each
};

/// Numbers of an agent.
struct AgentStatus {
  std::array<BufferState, SnapshotBuffers::kBuffers> states{};
  std::array<std::uint64_t, SnapshotBuffers::kBuffers> iterations{};  ///< of buffers not idle
  std::uint64_t snapshots = 0;
  std::uint64_t snapshots_failed = 0;
  std::uint64_t snapshots_skipped = 0;  ///< given up without being persisted
  std::uint64_t persists = 0;
  std::uint64_t persists_failed = 0;
  std::optional<std::uint64_t> newest;     ///< iteration of the newest complete snapshot
  std::optional<std::uint64_t> persisted;  ///< iteration of the last durable one
  std::uint64_t snapshot_bytes = 0;        ///< of all snapshots
  double snapshot_seconds = 0;             ///< until they were copied
  std::uint64_t memory_bytes = 0;
  std::uint64_t memory_limit_bytes = 0;
  std::array<std::uint64_t, kSentKinds> sent{};  ///< bytes of persists and copies, by Sent
  std::uint64_t sends_due = 0;  ///< persists and copies that did not wait for idle ranks in the end
  std::uint32_t ranks_marking = 0;  ///< processes that mark when they idle
  MemoryReplays replays;
  std::string last_error;
};

/// Keeps snapshots of checkpoints in memory and persists them, as it is told. It has no threads and
/// no sockets; every call may come from any thread. A call returns without waiting for a persist,
/// except Persist, Flush, and CatchUp and Replay if there was a restore.
/// Source: MoC-System section 5; docs/pec-planning.md section 6.2; docs/formats/agent.md.
class Agent {
 public:
  explicit Agent(AgentOptions options);

  /// Called when all bytes of a snapshot are in memory: training may go on.
  using Copied = std::function<void(std::uint64_t iteration)>;

  /// Reads the selected modules of a checkpoint into memory, and then works out their sums. A
  /// snapshot of the newest snapshot's iteration takes its place, and holds what that held besides.
  /// \param known  the number of the store's last recovery (Store::RecoveriesAfter) before the
  ///        files of `input` were opened; 0: there was none
  /// \param copied  not called for a checkpoint whose very files are in memory already
  /// \param fill    of a source that is filled with what the snapshot takes; else empty. Not called
  ///        where `copied` is not.
  /// \returns its iteration
  /// \error kUsage  older than the newest snapshot; kLimit  memory; kMismatch  another model, or a
  ///        restore later than `known`; as Save. The buffer is given up; older snapshots stay.
  Result<std::uint64_t> Snapshot(convert::Input& input, std::uint64_t known, Sink& sink,
                                 const Copied& copied = {}, const FillSource& fill = {});

  /// Until no snapshot is under way.
  void WaitForSnapshot();

  /// Whether a snapshot waits to be persisted.
  bool wants_persist() const;

  /// Writes the newest snapshot that is not persisted into the store.
  /// \returns its iteration; nothing if there is none
  /// \error as Save; the snapshot stays and can be persisted later
  Result<std::optional<std::uint64_t>> Persist(Sink& sink);

  /// Makes everything durable that is newer than the store: own snapshots, and copies of agents
  /// that may be gone. Replays for a minute at most.
  /// \returns the store's newest iteration; nothing if it has none
  Result<std::optional<std::uint64_t>> Flush(Sink& sink);

  /// Brings experts of the newest snapshot that are older than it to its iteration, as far as the
  /// log has intact chains of their gradients; all at once, each as a whole, and room for another
  /// snapshot is left. status() tells what could not be. Older buffers stay as they are. Nothing
  /// where options().replay is false.
  /// \param stop  asked between ranges of experts; true: what is done is kept, the rest is left,
  ///        and is tried again by the next call
  /// \param wait  for another replay that is under way, at most; absent: until it ends
  /// \error kBusy  it goes on; as CatchUp and OpenMemory: nothing is brought forward
  Status Replay(const std::function<bool()>& stop = {},
                std::optional<std::chrono::milliseconds> wait = {});

  /// Asks the store for restores that this agent does not know yet, and forgets the checkpoints
  /// that training gave up with them; a persist of such a checkpoint is stopped. Snapshot, Persist,
  /// Flush and Accept call this themselves.
  /// \error as Store::RecoveriesAfter
  Status CatchUp();

  /// Complete checkpoints, newest first; then copies.
  std::vector<AgentEntry> Entries() const;
  /// The newest complete own snapshot; null: none.
  std::shared_ptr<const MemoryCheckpoint> Newest() const;
  /// A blob of any entry. Null: not in memory
  BlobPtr Find(const exec::Digest& digest) const;

  /// Reads the manifest of a copy. One text at a time, since while it is taken apart it takes many
  /// times its size.
  /// \param counted  where what it holds is counted
  /// \error as ParseManifest; kLimit
  Result<Manifest> ReadManifest(const std::string& text, const std::string& where,
                                Counted* counted);

  /// Keeps another agent's checkpoint in place of the one before.
  /// \error kBadInput  it contradicts itself; kMismatch  of another model than the store, or given
  ///        up by a restore; kNotFound  of another store
  Status Accept(const std::string& origin, MemoryCheckpoint checkpoint);

  /// What the experts of the model have that an optimizer trains, by module and name: of the newest
  /// snapshot, else of the store's newest checkpoint. Waits for a snapshot under way.
  /// \error kNotFound  there is neither yet; as Store
  Result<std::vector<ExpertParam>> ExpertParams();

  /// With policy gradient-log: has the gradients held back of the experts that the next snapshot
  /// will have, as far as it can be known. Called after each snapshot, and when a process begins to
  /// hand gradients over.
  void PlanLogs();

  AgentStatus status() const;
  GradientLogs& logs() { return logs_; }
  const GradientLogs& logs() const { return logs_; }
  const std::shared_ptr<MemoryPool>& pool() const { return pool_; }
  const AgentOptions& options() const { return options_; }
  Limiter& limiter() { return limiter_; }
  const Limiter& limiter() const { return limiter_; }

 private:
  /// What the next snapshot is planned from.
  struct NextPlan {
    std::uint64_t iteration = 0;  ///< of the newest snapshot
    std::uint64_t interval = 0;   ///< since the one before; 0: not known
    ExpertMap map;
    LevelState snapshot;
    LevelState persist;
    ModelBytes bytes;
    PerExpert<std::string> names;
    std::uint32_t k = 1;
  };
  /// What buffers hold of a module, or of a part of it.
  struct ModuleCopy {
    std::array<BlobPtr, kComponents> parts;
    std::optional<std::uint64_t> replayed_from;  ///< iteration whose snapshot has read it
  };
  /// Of the newest snapshot, what of an expert is older than it.
  struct OlderPart {
    ModuleId id;
    std::shared_ptr<const void> data;  ///< a ModuleCopy
    std::uint64_t version = 0;
  };
  /// What a replay begins with.
  struct ReplayJob {
    std::shared_ptr<const MemoryCheckpoint> record;  ///< the newest; null: there is none
    std::vector<OlderPart> older;
    std::uint64_t recovery = 0;  ///< the store's last one that was known
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
  std::mutex text_mutex_;          // one text of a copy at a time is taken apart
  std::mutex snapshot_mutex_;      // one snapshot at a time; before mutex_
  std::mutex catch_up_mutex_;      // before persist_mutex_
  std::mutex persist_mutex_;       // one persist at a time; before mutex_
  std::timed_mutex replay_mutex_;  // one replay at a time; before mutex_
  /// What was tried last: a snapshot, and how many records there were. Under replay_mutex_.
  std::pair<std::weak_ptr<const MemoryCheckpoint>, std::uint64_t> replayed_;
  std::atomic<bool> stop_persist_ = false;
  mutable std::mutex mutex_;
  SnapshotBuffers buffers_;
  std::array<std::shared_ptr<const MemoryCheckpoint>, SnapshotBuffers::kBuffers> records_;
  std::map<std::string, std::shared_ptr<const MemoryCheckpoint>> copies_;
  std::uint64_t recovery_ = 0;                  // the last one of the store that is known here
  std::optional<std::string> store_id_;         // of the store once it was seen
  std::optional<SelectionState> level_;         // of the snapshots; absent: as the store says
  std::optional<SelectionState> level_before_;  // the newest snapshot, for one in its place
  std::optional<NextPlan> next_;                // kReplay
  AgentStatus status_;
};

}  // namespace shardwright::partial
