// SPDX-License-Identifier: Apache-2.0
#include "partial/agent/agent.h"

#include <algorithm>
#include <utility>

#include "partial/agent/quiet_sink.h"
#include "partial/store/modules.h"
#include "partial/store/store.h"
#include "support/comm/comm.h"

namespace shardwright::partial {
namespace {

class ThrottledBytes final : public exec::ByteSource {
 public:
  ThrottledBytes(std::unique_ptr<exec::ByteSource> source, Limiter::Job& job)
      : source_(std::move(source)), job_(job) {}
  Status Read(std::uint32_t member, std::uint64_t offset, std::span<std::byte> out) override {
    job_.Spend(out.size());
    return source_->Read(member, offset, out);
  }
  std::uint64_t bytes_read() const override { return source_->bytes_read(); }
  std::uint64_t files_read() const override { return source_->files_read(); }

 private:
  std::unique_ptr<exec::ByteSource> source_;
  Limiter::Job& job_;
};

/// Returns the experts that a snapshot took: those with the snapshot's own version.
Snapshotted SnapshottedOf(const Manifest& manifest) {
  Snapshotted out;
  out.level = manifest.state.snapshot;
  for (const auto& layer : out.level.version) {
    std::vector<std::uint32_t>& ids = out.selection.emplace_back();
    for (std::uint32_t e = 0; e < layer.size(); ++e) {
      if (layer[e] == manifest.iteration) ids.push_back(e);
    }
  }
  return out;
}

/// Returns the experts that a checkpoint has completely in its own version.
ModuleNames WholeModules(const Manifest& manifest) {
  ModuleNames names;
  for (std::size_t i = 0; i < manifest.modules.size(); ++i) {
    if (IsAllOf(manifest.modules[i], manifest.iteration)) names.insert(manifest.names[i]);
  }
  return names;
}

}  // namespace

Agent::Agent(AgentOptions options)
    : options_(std::move(options)),
      pool_(std::make_shared<MemoryPool>(options_.memory_bytes)),
      limiter_(options_.bandwidth, options_.idle),
      logs_(options_.save.store, options_.held_bytes, options_.replay ? pool_ : nullptr) {
  status_.memory_limit_bytes = options_.memory_bytes;
}

Result<std::shared_ptr<TokenLog>> Agent::OpenTokens() const {
  if (options_.tokens_path.empty()) return std::shared_ptr<TokenLog>();
  return TokenLog::Open(options_.tokens_path);
}

/// Drops the records of idle buffers. \pre the caller has locked mutex_
void Agent::DropIdle() {
  for (std::size_t i = 0; i < SnapshotBuffers::kBuffers; ++i) {
    const BufferState state = buffers_.state(i);
    if (state == BufferState::kIdle || state == BufferState::kFilling) records_[i].reset();
  }
}

void Agent::WaitForSnapshot() { const std::lock_guard under_way(snapshot_mutex_); }

bool Agent::wants_persist() const {
  const std::lock_guard lock(mutex_);
  return buffers_.Find(BufferState::kFilled).has_value();
}

Result<SaveReport> Agent::Write(const MemoryCheckpoint& checkpoint, Limiter::Job& job, Sink& sink) {
  SW_TRY_ASSIGN(const std::unique_ptr<convert::Input> input,
                OpenMemory(checkpoint, options_.pattern_files));
  input->bytes = std::make_unique<ThrottledBytes>(std::move(input->bytes), job);
  std::shared_ptr<TokenLog> tokens = checkpoint.tokens;
  if (!tokens) {
    SW_TRY_ASSIGN(tokens, OpenTokens());
  }
  Snapshotted snapshotted = SnapshottedOf(checkpoint.manifest);
  snapshotted.recovery = checkpoint.recovery;
  SaveRequest options = RequestOfSave();
  options.iteration = checkpoint.manifest.iteration;
  options.snapshotted = &snapshotted;
  options.tokens = tokens.get();
  // Not stopped with the process, because a stop waits for the newest snapshot to be durable.
  QuietSink own(sink, &stop_persist_);
  const std::unique_ptr<comm::Comm> comm = comm::MakeSerialComm();
  SW_TRY_ASSIGN(SaveReport report, Save(*comm, *input, options, own));
  SW_TRY_ASSIGN(const Store store, Store::Open(options.store));
  const std::lock_guard lock(mutex_);
  if (!store_id_) store_id_ = store.head().id;
  return report;
}

Result<std::optional<std::uint64_t>> Agent::Persist(Sink& sink) {
  SW_TRY(CatchUp());
  const std::lock_guard one(persist_mutex_);
  std::shared_ptr<const MemoryCheckpoint> checkpoint;
  {
    const std::lock_guard lock(mutex_);
    const std::optional<std::size_t> buffer = buffers_.StartPersist();
    if (!buffer) return std::optional<std::uint64_t>();
    DropIdle();
    checkpoint = records_[*buffer];
    stop_persist_.store(false);
  }
  // Logs first, so that readers of the checkpoint find the gradients for its older experts.
  const ModuleNames saved = WholeModules(checkpoint->manifest);
  const auto write = [&]() -> Result<SaveReport> {
    SW_TRY(PersistLogs(checkpoint->manifest.iteration, saved, sink));
    Limiter::Job job(limiter_, checkpoint->own_bytes);
    return Write(*checkpoint, job, sink);
  };
  const Result<SaveReport> report = write();
  if (report) logs_.Drop(report->iteration, saved);
  const std::lock_guard lock(mutex_);
  if (!report) {
    ++status_.persists_failed;
    status_.last_error = report.error().message;
    SW_TRY(buffers_.FailPersist());
    DropIdle();
    return tl::unexpected<Error>(report.error());
  }
  SW_TRY(buffers_.EndPersist());
  DropIdle();
  ++status_.persists;
  status_.persisted = report->iteration;
  return std::optional(report->iteration);
}

Result<std::optional<std::uint64_t>> Agent::StoredIteration() const {
  std::optional<std::uint64_t> newest;
  SW_TRY_ASSIGN(const bool there, Store::IsStore(options_.save.store));
  if (!there) return newest;
  SW_TRY_ASSIGN(const Store store, Store::Open(options_.save.store));
  SW_TRY_ASSIGN(const std::vector<StoredCheckpoint> all, store.List());
  for (const StoredCheckpoint& one : all) {
    if (!one.abandoned) newest = one.iteration;
  }
  return newest;
}

Result<std::optional<std::uint64_t>> Agent::Flush(Sink& sink) {
  const Limiter::Hurry hurry(limiter_);
  WaitForSnapshot();
  for (;;) {
    SW_TRY_ASSIGN(const std::optional<std::uint64_t> done, Persist(sink));
    if (!done) break;
  }
  ReplayInTime(sink);
  for (const AgentEntry& entry : Entries()) {
    if (entry.state != "copy") continue;
    Status saved = FlushCopy(entry, sink);
    if (saved) continue;
    SW_TRY(CatchUp());
    if (Holds(entry)) return tl::unexpected<Error>(std::move(saved).error());
  }
  return StoredIteration();
}

/// \error as GradientLogs::Persist: the caller must not write the checkpoint of that iteration
Status Agent::PersistLogs(std::uint64_t iteration, const ModuleNames& saved, Sink& sink) {
  SW_TRY(ExpectStore(RequestOfSave()));
  const Result<std::string> lacks = logs_.Persist(iteration, saved);
  if (!lacks) return Within("gradient log", lacks.error());
  if (!lacks->empty()) sink.Warn(StrCat("gradient log: ", *lacks));
  return {};
}

Status Agent::FlushCopy(const AgentEntry& entry, Sink& sink) {
  const std::lock_guard one(persist_mutex_);
  SW_TRY_ASSIGN(const std::optional<std::uint64_t> stored, StoredIteration());
  if (stored && *stored >= entry.checkpoint->manifest.iteration) return {};
  stop_persist_.store(false);
  SW_TRY(PersistLogs(entry.checkpoint->manifest.iteration, {}, sink));
  Limiter::Job job(limiter_);
  SW_TRY(Write(*entry.checkpoint, job, sink));
  return {};
}

bool Agent::Holds(const AgentEntry& copy) const {
  const std::lock_guard lock(mutex_);
  const auto found = copies_.find(copy.origin);
  return found != copies_.end() && found->second == copy.checkpoint;
}

Status Agent::CatchUp() {
  const std::lock_guard one(catch_up_mutex_);
  return LookForRestores();
}

/// Returns the request for saves. Once the agent has seen its store, it requires that
/// store and creates no new one, because the file system may have been unmounted since.
SaveRequest Agent::RequestOfSave() const {
  SaveRequest request = options_.save;
  const std::lock_guard lock(mutex_);
  request.continues = status_.persisted;
  if (!store_id_) return request;
  request.existing_store = true;
  request.store_id = *store_id_;
  return request;
}

std::string Agent::store_id() const {
  const std::lock_guard lock(mutex_);
  return store_id_.value_or("");
}

/// \pre the caller has locked catch_up_mutex_
Status Agent::LookForRestores() {
  SW_TRY_ASSIGN(const bool there, Store::IsStore(options_.save.store));
  if (!there) return {};
  SW_TRY_ASSIGN(const Store store, Store::Open(options_.save.store));
  std::uint64_t known = 0;
  {
    const std::lock_guard lock(mutex_);
    if (!store_id_) store_id_ = store.head().id;
    if (*store_id_ != store.head().id) return {};  // RequestOfSave makes persists fail
    known = recovery_;
  }
  SW_TRY_ASSIGN(const std::vector<RecoveryRecord> news, store.RecoveriesAfter(known));
  if (!news.empty()) Rollback(news);
  return {};
}

/// \param restores  restores that were unknown before
void Agent::Rollback(const std::vector<RecoveryRecord>& restores) {
  {
    // From here on, no snapshot with an older selection can begin.
    const std::lock_guard lock(mutex_);
    recovery_ = restores.back().sequence;
  }
  stop_persist_.store(true);
  const Limiter::Hurry hurry(limiter_);
  const std::lock_guard one(persist_mutex_);
  std::unique_lock lock(mutex_);
  for (const RecoveryRecord& restore : restores) {
    buffers_.Rollback(restore.resume);
    std::erase_if(copies_, [&](const auto& copy) {
      return GivesUp(restore, copy.second->recovery, copy.second->manifest.iteration);
    });
  }
  DropIdle();
  level_before_.reset();
  level_.reset();
  next_.reset();
  logs_.DiscardAll();
  lock.unlock();
  logs_.GiveUp(restores);
}

std::vector<AgentEntry> Agent::Entries() const {
  std::vector<AgentEntry> entries;
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < SnapshotBuffers::kBuffers; ++i) {
    if (records_[i]) entries.push_back({Name(buffers_.state(i)), "", records_[i]});
  }
  std::sort(entries.begin(), entries.end(), [](const AgentEntry& a, const AgentEntry& b) {
    return a.checkpoint->manifest.iteration > b.checkpoint->manifest.iteration;
  });
  for (const auto& [origin, checkpoint] : copies_) entries.push_back({"copy", origin, checkpoint});
  return entries;
}

std::shared_ptr<const MemoryCheckpoint> Agent::Newest() const {
  const std::lock_guard lock(mutex_);
  const std::optional<std::size_t> newest = buffers_.NewestComplete();
  return newest ? records_[*newest] : nullptr;
}

std::shared_ptr<const MemoryCheckpoint> Agent::CopyOf(const std::string& origin) const {
  const std::lock_guard lock(mutex_);
  const auto copy = copies_.find(origin);
  return copy != copies_.end() ? copy->second : nullptr;
}

BlobPtr Agent::Find(const exec::Digest& digest) const {
  for (const AgentEntry& entry : Entries()) {
    const auto found = entry.checkpoint->blobs.find(digest);
    if (found != entry.checkpoint->blobs.end()) return found->second;
  }
  return nullptr;
}

Result<Manifest> Agent::ReadManifest(const std::string& text, const std::string& where,
                                     Counted* counted) {
  const std::lock_guard one(text_mutex_);
  SW_TRY_ASSIGN(Manifest manifest, ParseManifest(text, where));
  SW_TRY(counted->Grow(manifest.modules.size() * (sizeof(StoredModule) + sizeof(std::string))));
  return manifest;
}

/// Checks that a copy can belong to the store, if it exists. The first checkpoint creates it.
Status Agent::CheckStore(const std::string& what, const MemoryCheckpoint& checkpoint,
                         const Model& model) const {
  const std::string& path = options_.save.store;
  SW_TRY_ASSIGN(const bool there, Store::IsStore(path));
  if (!there) {
    if (checkpoint.recovery == 0) return {};
    return Fail(Errc::kNotFound, path, ": no store found, but ", what, " was made after recovery ",
                checkpoint.recovery, " of the store; check that the file system is mounted");
  }
  SW_TRY_ASSIGN(const Store store, Store::Open(path));
  if (store.head().fingerprint != model.fingerprint) {
    return Fail(Errc::kMismatch, what, ": differs from the model in ", path, ": fingerprint ",
                exec::Hex(store.head().fingerprint), " expected, found ",
                exec::Hex(model.fingerprint));
  }
  SW_TRY(store.CheckOwn(checkpoint.manifest, what));
  return store.CheckPast(checkpoint.recovery, checkpoint.manifest.iteration, what);
}

Status Agent::Accept(const std::string& origin, MemoryCheckpoint checkpoint,
                     const std::optional<std::shared_ptr<const MemoryCheckpoint>>& before) {
  const std::string what = "copy of " + origin;
  Model model;
  {
    const std::lock_guard one(text_mutex_);
    SW_TRY_ASSIGN(const std::unique_ptr<convert::Input> input,
                  OpenMemory(checkpoint, options_.pattern_files));
    SW_TRY_ASSIGN(model, DescribeModel(input->checkpoint));
  }
  SW_TRY(Validate(checkpoint.manifest.state.snapshot, model.experts));
  // The transfer may have taken long. No restore can be added between
  // this check and the end; a later one is found by the next check.
  const std::lock_guard one(catch_up_mutex_);
  SW_TRY(LookForRestores());
  SW_TRY(CheckStore(what, checkpoint, model));
  const std::lock_guard lock(mutex_);
  const auto held = copies_.find(origin);
  if (before && held != copies_.end() && held->second != *before) {
    return Fail(Errc::kMismatch, what, ": another copy has arrived meanwhile");
  }
  copies_[origin] = std::make_shared<const MemoryCheckpoint>(std::move(checkpoint));
  return {};
}

AgentStatus Agent::status() const {
  const std::lock_guard lock(mutex_);
  AgentStatus out = status_;
  for (std::size_t i = 0; i < SnapshotBuffers::kBuffers; ++i) {
    out.states[i] = buffers_.state(i);
    out.iterations[i] = out.states[i] == BufferState::kIdle ? 0 : buffers_.iteration(i);
  }
  if (const auto newest = buffers_.NewestComplete()) {
    out.newest = buffers_.iteration(*newest);
    out.replays.older = static_cast<std::uint64_t>(
        std::ranges::count_if(buffers_.content(*newest),
                              [&](const auto& held) { return held.second.version < *out.newest; }));
  }
  out.snapshots_skipped = buffers_.skipped();
  out.memory_bytes = pool_->used_bytes();
  out.sent = limiter_.sent();
  out.sends_due = limiter_.jobs_due();
  out.ranks_marking = limiter_.idle().marking();
  return out;
}

}  // namespace shardwright::partial
